"""What makes a config impossible: one small check for each reason. Pure.

Every check yields one line for each problem, with the key, the numbers and the remedy. `checks_of` is the table that
`topology.plan.make_plan` walks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import combinations

from makers.config import (
    DatasetMaker,
    MakerConfig,
    ModelConfig,
    ReferenceMaker,
    RewardMaker,
    RolloutMaker,
    TeacherMaker,
)
from topology.config import RunConfig
from topology.job_checks import JOB_CHECKS
from topology.mixing_checks import check_mixing
from topology.models import SUPPORTED_FAMILIES, ModelInfo
from topology.placement_checks import PLACEMENT_CHECKS
from topology.reward_checks import REWARD_CHECKS, check_head
from topology.roles import POLICY, makers_that_pull, model_of, samples_of, samples_of_row, stages_of
from topology.scoring_checks import check_references, check_scoring, check_teachers, scoring_engine
from trainers.config import ClippedPolicy, CustomAlgorithm, DistillAlgorithm, Dpo, MegatronBackend, Ppo, Sft
from trainers.parallel import unsupported


def _check_trainers(config: RunConfig, model: ModelInfo) -> Iterator[str]:
    groups, algorithm = config.trainers[POLICY].groups_per_step, config.trainers[POLICY].algorithm
    for role, trainer in config.trainers.items():
        if groups % trainer.minibatches:
            yield (
                f"trainers.{role}.minibatches: {groups} groups_per_step cannot be split into {trainer.minibatches} equal "
                f"minibatches: use a divisor of {groups}"
            )
    for group, maker in config.makers.items():
        alone = isinstance(maker, RolloutMaker) and maker.sampling.n < 2
        if alone and isinstance(algorithm, ClippedPolicy) and algorithm.needs_groups:
            yield (
                f"makers.{group}.sampling.n: 1, but trainers.policy.algorithm `{algorithm.type}` compares the samples of a "
                "prompt, so that one alone teaches nothing: use 2 or more, or `reinforce_plus_plus` or `ppo`"
            )
    critic = config.trainers.critic
    if isinstance(algorithm, Ppo) and critic is None:
        yield (
            "trainers.critic: missing, but trainers.policy.algorithm is `ppo`, which learns from its values: add one with a "
            "backend of its own, or use `grpo`"
        )
    if critic is not None and not isinstance(algorithm, Ppo):
        yield (
            f"trainers.critic: nobody reads its values, as trainers.policy.algorithm is `{algorithm.type}`: remove it, or use "
            "`ppo`"
        )
    megatron = any(isinstance(trainer.backend, MegatronBackend) for _, trainer in config.trainers.items())
    if model.family not in SUPPORTED_FAMILIES and megatron:
        yield (
            f"model.path: family `{model.family}` is not supported by the Megatron backend; "
            f"supported: {', '.join(SUPPORTED_FAMILIES)}"
        )


def _check_distill(config: RunConfig, model: ModelInfo) -> Iterator[str]:
    policy = config.trainers[POLICY]
    distill, algorithm = policy.distill, policy.algorithm
    if distill is None:
        if isinstance(algorithm, DistillAlgorithm):
            yield "trainers.policy.distill: missing, but trainers.policy.algorithm is `distill`, which learns from it alone"
        return
    if not (distill.coef or distill.sft_alpha or distill.advantage_alpha):
        yield "trainers.policy.distill: coef, sft_alpha and advantage_alpha are all 0, so nothing is learnt from a teacher"
    if distill.teacher is None and distill.temperature != 1.0:
        yield (
            f"trainers.policy.distill.temperature: {distill.temperature:g}, but the log-probs of a group of `kind: teacher` are "
            "at temperature 1: use 1, or a teacher on the ranks (distill.teacher)"
        )
    for group, maker in config.makers.items():
        if not (distill.advantage_alpha and isinstance(maker, RolloutMaker)):
            continue
        if maker.sampling.temperature != distill.temperature:
            yield (
                f"makers.{group}.sampling.temperature: {maker.sampling.temperature:g}, but trainers.policy.distill."
                f"advantage_alpha compares the student's log-probs with a teacher's at distill.temperature "
                f"{distill.temperature:g}: give both the same, or set advantage_alpha to 0"
            )


def _check_parallel(config: RunConfig, model: ModelInfo) -> Iterator[str]:
    """What of a layout of ranks the model does not allow, and ranks that would have nothing to do."""
    for role, trainer in config.trainers.items():
        backend = trainer.backend
        if not isinstance(backend, MegatronBackend):
            continue
        for reason in _unsplittable(backend, model):
            yield f"trainers.{role}.backend.{reason}"


def _check_idle_ranks(config: RunConfig, model: ModelInfo) -> Iterator[str]:
    for role, trainer in config.trainers.items():
        backend = trainer.backend
        if not isinstance(backend, MegatronBackend) or "rollout" not in stages_of(config):
            continue
        policy = config.trainers[POLICY]
        groups = policy.groups_per_step / trainer.minibatches
        n = 1 if isinstance(policy.algorithm, Dpo) else samples_of(config)  # a pair is not shared out
        if backend.data_parallel > groups * n:
            yield (
                f"trainers.{role}.backend.data_parallel: {backend.data_parallel} ranks for the {groups * n:g} samples of an "
                f"optimizer step ({groups:g} groups x {n}): some would have nothing to do, use at most {groups * n:g}"
            )


def _check_rollouts(config: RunConfig, model: ModelInfo) -> Iterator[str]:
    if "rollout" in stages_of(config) and not any(samples_of_row(m) for m in config.makers.values()):
        yield "makers.rollout: a rollout maker of one's own kind is not supported so far, use `kind: rollout`"


def _check_columns(config: RunConfig, model: ModelInfo) -> Iterator[str]:
    provided = set(stages_of(config))
    for stage in config.trainers[POLICY].stages:
        if stage not in provided:
            penalty = ", or set trainers.policy.algorithm.kl_coef to 0" if stage == "reference" else ""
            yield (
                f"makers: no group provides `{stage}`, which trainers.policy needs; "
                f"add one with `kind: {stage}`{penalty} (groups: {', '.join(config.makers)})"
            )


def _check_datasets(config: RunConfig, model: ModelInfo) -> Iterator[str]:
    """Rows of a dataset and algorithms that learn from them belong together."""
    datasets = {group: maker for group, maker in config.makers.items() if isinstance(maker, DatasetMaker)}
    algorithm = config.trainers[POLICY].algorithm
    key = "trainers.policy.algorithm"
    if isinstance(algorithm, Sft | Dpo):
        if config.trainers[POLICY].distill is not None:
            yield f"trainers.policy.distill: is not read by `{algorithm.type}`: remove it, or use `distill` with `sft_alpha`"
        if not datasets:
            columns = "chosen: COLUMN, rejected: COLUMN" if algorithm.pairs else "completion: COLUMN"
            yield f"{key}: `{algorithm.type}` learns from a dataset: add a group {{kind: dataset, {columns}}} to makers"
        if config.evaluation is not None and (config.evaluation.by == "makers" or algorithm.pairs):
            remedy = "remove it" if algorithm.pairs else "use `by: ranks`, the loss of held-out rows"
            yield f"evaluation: samples rollouts, but `{algorithm.type}` has no group that makes any: {remedy}"
        if makers_that_pull(config):
            yield f"{key}: `{algorithm.type}` learns from datasets alone: remove the groups of `kind: rollout`"
        for group, maker in datasets.items():
            if algorithm.pairs and maker.samples != 2:
                yield f"makers.{group}: `dpo` learns from pairs: name the columns `chosen` and `rejected`"
            if not algorithm.pairs and maker.samples != 1:
                yield f"makers.{group}: `sft` learns from completions, not from pairs: name the column `completion`, or use `dpo`"
    elif config.evaluation is not None and config.evaluation.by == "ranks":
        yield f"evaluation.by: ranks score rows of a dataset with `sft` only, but {key} is `{algorithm.type}`: use `makers`"
    if datasets and not makers_that_pull(config) and not isinstance(algorithm, Sft | Dpo | CustomAlgorithm):
        yield (
            f"makers.{next(iter(datasets))}: `{algorithm.type}` needs rows that its policy sampled: use `sft` or `dpo`, or a "
            "group of `kind: rollout`"
        )
    for (first, one), (group, other) in combinations(datasets.items(), 2):
        shared = one.route is None or one.route.meets(other.route)
        if shared and (one.columns, one.max_tokens) != (other.columns, other.max_tokens):
            yield (
                f"makers.{group}: has other columns or max_tokens than makers.{first}, but a row comes from one of the two "
                "groups, whichever is free: give both the same, or a route each"
            )


def _check_groups(config: RunConfig, model: ModelInfo) -> Iterator[str]:
    rollouts = {group: maker for group, maker in config.makers.items() if isinstance(maker, RolloutMaker)}
    sizes = {maker.sampling.n for maker in rollouts.values()}
    if len(sizes) > 1:
        yield f"makers.*.sampling.n: all rollout groups need the same number of samples, got {sorted(sizes)}"
    rewards = {group: maker for group, maker in config.makers.items() if isinstance(maker, RewardMaker)}
    for first, second in _rivals(rewards):
        for what in ("functions", "models"):
            if getattr(rewards[first], what) != getattr(rewards[second], what):
                yield (
                    f"makers.{second}.{what}: differ from makers.{first}.{what}, but a row is scored by one of the two groups, "
                    f"whichever is free: give both the same {what}, put all of them into one group, or give the groups a "
                    "`route` each, with no value in common"
                )
    for kind in (ReferenceMaker, TeacherMaker):
        frozen = {group: maker for group, maker in config.makers.items() if isinstance(maker, kind)}
        for first, second in _rivals(frozen):
            if _frozen(frozen[first]) == _frozen(frozen[second]):
                continue
            yield (
                f"makers.{second}: has another model or dtype than makers.{first}, but a row is scored by one of the two "
                "groups, whichever is free: give both the same, or a `route` each, with no value in common"
            )
    for group, maker in rollouts.items():
        engine, sampling = maker.engine, maker.sampling
        if sampling.max_tokens >= engine.max_model_len:
            yield (
                f"makers.{group}.sampling.max_tokens: {sampling.max_tokens} leaves no room for a prompt in "
                f"engine.max_model_len {engine.max_model_len}: lower the one or raise the other"
            )
        if model.max_positions and engine.max_model_len > model.max_positions:
            yield (
                f"makers.{group}.engine.max_model_len: {engine.max_model_len} is more than the model's "
                f"{model.max_positions} positions"
            )
        if sampling.n > engine.max_num_seqs:
            yield (
                f"makers.{group}.sampling.n: one group of {sampling.n} samples does not fit "
                f"engine.max_num_seqs {engine.max_num_seqs}: raise it to at least {sampling.n}"
            )


def _rivals(groups: Mapping[str, MakerConfig]) -> Iterator[tuple[str, str]]:
    """Pairs of groups, of one stage, that may both get the same row."""
    for first, second in combinations(groups, 2):
        route, other = groups[first].route, groups[second].route
        if route is None or route.meets(other):
            yield first, second


def _check_engines(config: RunConfig, model: ModelInfo) -> Iterator[str]:
    """Of makers with the run's model; `check_own_models` sees to the others."""
    for group, maker in config.makers.items():
        if model_of(maker) is None:
            yield from _check_engine(group, maker, model)
            yield from check_scoring(config, group, model)


def _check_engine(group: str, maker: MakerConfig, model: ModelInfo) -> Iterator[str]:
    engine = maker.engine if isinstance(maker, RolloutMaker) else scoring_engine(maker)
    if engine is not None:
        gpus = maker.resources.gpus
        tensor, stages, where = engine.tensor_parallel, engine.pipeline_parallel, f"makers.{group}.engine"
        columns = model.expert_intermediate if model.experts else model.intermediate
        for what, count in (("attention heads", model.heads), ("intermediate columns", columns)):
            if count % tensor:
                yield (
                    f"{where}.tensor_parallel: the model's {count} {what} cannot be shared out over {tensor} processes: use a "
                    f"divisor of {count}"
                )
        if model.kv_heads % tensor and tensor % model.kv_heads:
            yield (
                f"{where}.tensor_parallel: the model's {model.kv_heads} key/value heads can be neither shared out over nor "
                f"repeated in {tensor} processes: use a divisor or a multiple of {model.kv_heads}"
            )
        if stages > model.layers:
            yield f"{where}.pipeline_parallel: {stages} stages for {model.layers} layers: use at most {model.layers}"
        if gpus and engine.workers != max(1, gpus):
            yield (
                f"makers.{group}.resources.gpus: {gpus:g}, but the engine has {tensor} x {stages} = {engine.workers} "
                f"process(es) (tensor_parallel x pipeline_parallel), one for each GPU: set gpus: {engine.workers}, or make "
                f"the product {max(1, gpus):g}"
            )


def _frozen(maker: ReferenceMaker | TeacherMaker) -> tuple[ModelConfig | None, str]:
    if isinstance(maker, ReferenceMaker) and maker.engine is None:
        return maker.model, maker.dtype
    engine = scoring_engine(maker)
    assert engine is not None, "transformers is what a reference without an engine has"
    return maker.model, engine.dtype


def _check_sampling(config: RunConfig, model: ModelInfo) -> Iterator[str]:
    for group, maker in config.makers.items():
        if isinstance(maker, RolloutMaker) and maker.sampling.n > 1 and maker.sampling.temperature == 0:
            yield (
                f"makers.{group}.sampling: temperature 0 gives {maker.sampling.n} equal samples and no advantage: "
                "raise the temperature, or use n: 1"
            )


def _check_optimizer(config: RunConfig, model: ModelInfo) -> Iterator[str]:
    steps = config.trainers[POLICY].steps
    for role, trainer in config.trainers.items():
        optimizer = trainer.optimizer
        if optimizer.warmup_steps > steps:
            yield (
                f"trainers.{role}.optimizer.warmup_steps: {optimizer.warmup_steps} is more than the {steps} steps of the run"
            )
        if optimizer.min_lr and optimizer.schedule == "constant":
            yield f"trainers.{role}.optimizer.min_lr: {optimizer.min_lr:g} is not read with `schedule: constant`"


def _check_buffer(config: RunConfig, model: ModelInfo) -> Iterator[str]:
    buffer = config.buffer
    if buffer.window and buffer.order != "window":
        yield f"buffer.window: {buffer.window} is read only with `order: window`, but order is `{buffer.order}`"
    if config.weights.every > 1 and config.trainers[POLICY].steps < config.weights.every:
        yield (
            f"weights.every: {config.weights.every} steps between versions, but trainers.policy.steps is "
            f"{config.trainers[POLICY].steps}: no version would ever be published"
        )


def _check_cluster(config: RunConfig, model: ModelInfo) -> Iterator[str]:
    if config.cluster.address is not None:
        yield from unread_sizes(config, f"cluster.address is {config.cluster.address}")


def unread_sizes(config: RunConfig, joins: str) -> Iterator[str]:
    """How large a cluster of the run's own is to be is read by nobody where the run joins another; `joins` says why it does."""
    unread = [key for key in ("cpus", "gpus") if getattr(config.cluster, key) is not None]
    if unread:
        yield f"cluster.{unread[0]}: read only for a cluster of the run's own, but {joins}: remove one of the two"


def _check_evaluation(config: RunConfig, model: ModelInfo) -> Iterator[str]:
    evaluation = config.evaluation
    if evaluation and not (evaluation.at_start or evaluation.at_end or evaluation.every):
        yield "evaluation: at_start and at_end are false and every is null, so nothing would be evaluated: remove it"


def check_own_models(config: RunConfig, own_models: Mapping[str, ModelInfo]) -> Iterator[str]:
    """A maker with a model of its own must be able to take every row that the rollout makers make."""
    for group, own in own_models.items():
        yield from _check_engine(group, config.makers[group], own)
        yield from check_scoring(config, group, own)
        yield from check_head(config, group, own)
        if scoring_engine(config.makers[group]) is not None:
            continue  # its engine says how much it takes
        for rollout, maker in config.makers.items():
            if isinstance(maker, RolloutMaker) and 0 < own.max_positions < maker.engine.max_model_len:
                yield (
                    f"makers.{group}.model.path: has {own.max_positions} positions, but rows of makers.{rollout} may have "
                    f"{maker.engine.max_model_len} tokens (engine.max_model_len): lower that, or use a model with more"
                )


def check_teacher_of_ranks(config: RunConfig, model: ModelInfo, teacher: ModelInfo | None) -> Iterator[str]:
    """A teacher on the ranks is compared with the policy logit by logit, and split as it is."""
    policy, key = config.trainers.policy, "trainers.policy.distill.teacher"
    if policy is None or policy.teacher is None or teacher is None:
        return
    if teacher.vocab != model.vocab:
        yield (
            f"{key}.model: a vocabulary of {teacher.vocab} tokens, the policy's has {model.vocab}: logits are compared one by "
            "one; use a model with as many, or a group of `kind: teacher`"
        )
    if policy.teacher.top_k is not None and policy.teacher.top_k > model.vocab:
        yield f"{key}.top_k: {policy.teacher.top_k} of a vocabulary of {model.vocab} tokens: use at most that, or null for all"
    for group, maker in config.makers.items():
        if isinstance(maker, RolloutMaker) and 0 < teacher.max_positions < maker.engine.max_model_len:
            yield (
                f"{key}.model: has {teacher.max_positions} positions, but rows of makers.{group} may have "
                f"{maker.engine.max_model_len} tokens (engine.max_model_len): lower that, or use a model with more"
            )
    if isinstance(policy.backend, MegatronBackend):
        if teacher.family not in SUPPORTED_FAMILIES:
            yield f"{key}.model: family `{teacher.family}` is not supported; supported: {', '.join(SUPPORTED_FAMILIES)}"
        for reason in _unsplittable(policy.backend, teacher):
            yield f"{key}.model: it is split as the policy is, but trainers.policy.backend.{reason}"


def _unsplittable(backend: MegatronBackend, model: ModelInfo) -> list[str]:
    return unsupported(
        backend,
        layers=model.layers,
        heads=model.heads,
        kv_heads=model.kv_heads,
        intermediate=model.expert_intermediate or model.intermediate,
        experts=model.experts,
    )


Check = Callable[[RunConfig, ModelInfo], Iterator[str]]
CHECKS: tuple[Check, ...] = (
    _check_rollouts,
    _check_groups,
    _check_engines,
    _check_sampling,
    _check_cluster,
    check_teachers,
    check_references,
    *REWARD_CHECKS,
    *PLACEMENT_CHECKS,
)
TRAINING_CHECKS: tuple[Check, ...] = (
    _check_trainers,
    _check_distill,
    _check_parallel,
    _check_idle_ranks,
    _check_columns,
    _check_datasets,
    check_mixing,
    _check_optimizer,
    _check_buffer,
    _check_evaluation,
)


def checks_of(config: RunConfig) -> tuple[Check, ...]:
    return (*(JOB_CHECKS if config.collect is not None else TRAINING_CHECKS), *CHECKS)
