"""Config -> plan: which actors, with what, joined how, and whether it can work. Pure; starts nothing.

Guarantees: a plan is either complete or a `ConfigError` that lists every problem found, each with the key, the numbers
and the remedy. The same plan drives `tandem plan`, `tandem run` and the supervisor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from buffer.config import Resources
from buffer.table import worst_case_age
from makers.config import CustomMaker, RewardMaker, RolloutMaker
from topology.config import ConfigError, RunConfig
from topology.models import SUPPORTED_FAMILIES, ModelInfo
from trainers.config import MegatronBackend, TrainerConfig

GIB = 1 << 30
POLICY = "policy"
NEEDED_STAGES = ("rollout", "reward")  # by every policy-gradient algorithm
RUNTIME_GIB = {"rollout": 1.1, "reward": 0.4, "custom": 0.5, "rank": 0.7, "service": 0.25}  # measured resident memory
FLOAT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class PlannedActor:
    name: str
    kind: str  # supervisor, buffer, weights, maker, trainer, rank
    resources: Resources
    memory_gib: float  # estimate of resident memory


@dataclass(frozen=True)
class Plan:
    actors: tuple[PlannedActor, ...]
    edges: tuple[tuple[str, str, str], ...]  # (from, to, what crosses)
    arithmetic: dict[str, str]
    worst_case_staleness: int  # published versions
    warnings: tuple[str, ...]

    @property
    def cpus(self) -> float:
        return sum(actor.resources.cpus for actor in self.actors)

    @property
    def gpus(self) -> float:
        return sum(actor.resources.gpus for actor in self.actors)

    @property
    def memory_gib(self) -> float:
        return sum(actor.memory_gib for actor in self.actors)

    def named(self, kind: str) -> list[PlannedActor]:
        return [actor for actor in self.actors if actor.kind == kind]


@dataclass(frozen=True)
class Capacity:
    """What the cluster (or this machine, for a run with a cluster of its own) offers."""

    cpus: float
    gpus: float
    memory_gib: float
    what: str
    custom: Mapping[str, float] = field(default_factory=dict)  # none on a cluster of the run's own
    node_cpus: float = math.inf  # of the largest node: an actor cannot be spread over two
    node_gpus: float = math.inf


def make_plan(config: RunConfig, model: ModelInfo, capacity: Capacity) -> Plan:
    """Raises ConfigError that lists every problem."""
    problems = [problem for check in CHECKS for problem in check(config, model)]
    if not problems:
        plan = _build(config, model)
        problems = list(_check_capacity(config, plan, capacity))
        if not problems:
            return plan
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    raise ConfigError(f"this plan cannot work: {count}\n" + "\n".join(f"  {problem}" for problem in problems))


def stage_of(maker: RolloutMaker | RewardMaker | CustomMaker, group: str) -> str:
    """The stage that a maker group fills: its kind, or for a maker of one's own the group's name."""
    return group if isinstance(maker, CustomMaker) else maker.kind


def rollout_of(config: RunConfig) -> RolloutMaker:
    return next(maker for maker in config.makers.values() if isinstance(maker, RolloutMaker))


def ranks_of(trainer: TrainerConfig) -> int:
    backend = trainer.backend
    if not isinstance(backend, MegatronBackend):
        return 1
    return backend.tensor_parallel * backend.pipeline_parallel * backend.data_parallel


def stages_of(config: RunConfig) -> tuple[str, ...]:
    return tuple(dict.fromkeys(stage_of(maker, group) for group, maker in config.makers.items()))


# --- checks -----------------------------------------------------------------------------------------------------------


def _check_trainers(config: RunConfig, model: ModelInfo) -> Iterator[str]:
    unknown = sorted(set(config.trainers) - {POLICY})
    if unknown:
        yield f"trainers.{unknown[0]}: only one trainer, named `{POLICY}`, is supported so far"
    if POLICY not in config.trainers:
        yield f"trainers: needs one named `{POLICY}`"
        return
    trainer = config.trainers[POLICY]
    if trainer.groups_per_step % trainer.minibatches:
        yield (
            f"trainers.policy.minibatches: {trainer.groups_per_step} groups_per_step cannot be split into "
            f"{trainer.minibatches} equal minibatches: use a divisor of {trainer.groups_per_step}"
        )
    if ranks_of(trainer) > 1:
        yield f"trainers.policy.backend: {ranks_of(trainer)} ranks asked for, only 1 is supported so far"
    if model.family not in SUPPORTED_FAMILIES and isinstance(trainer.backend, MegatronBackend):
        yield (
            f"model.path: family `{model.family}` is not supported by the Megatron backend; "
            f"supported: {', '.join(SUPPORTED_FAMILIES)}"
        )


def _check_columns(config: RunConfig, model: ModelInfo) -> Iterator[str]:
    provided = set(stages_of(config))
    if "rollout" in provided and not any(isinstance(maker, RolloutMaker) for maker in config.makers.values()):
        yield "makers.rollout: a rollout maker of one's own kind is not supported so far, use `kind: rollout`"
    for stage in NEEDED_STAGES:
        if stage not in provided:
            yield (
                f"makers: no group provides `{stage}`, which trainers.policy needs; "
                f"add one with `kind: {stage}` (groups: {', '.join(config.makers)})"
            )


def _check_groups(config: RunConfig, model: ModelInfo) -> Iterator[str]:
    rollouts = {group: maker for group, maker in config.makers.items() if isinstance(maker, RolloutMaker)}
    sizes = {maker.sampling.n for maker in rollouts.values()}
    if len(sizes) > 1:
        yield f"makers.*.sampling.n: all rollout groups need the same number of samples, got {sorted(sizes)}"
    budgets = {maker.sampling.max_tokens for maker in rollouts.values()}
    if len(budgets) > 1:
        yield f"makers.*.sampling.max_tokens: all rollout groups need the same budget, got {sorted(budgets)}"
    rewards = {group: maker for group, maker in config.makers.items() if isinstance(maker, RewardMaker)}
    first, *others = rewards or [""]
    different = [group for group in others if rewards[group].functions != rewards[first].functions]
    if different:
        yield (
            f"makers.{different[0]}.functions: differ from makers.{first}.functions, but a row is scored by one of the two "
            "groups, whichever is free: give both the same functions, or put all of them into one group"
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


def _check_sampling(config: RunConfig, model: ModelInfo) -> Iterator[str]:
    for group, maker in config.makers.items():
        if isinstance(maker, RolloutMaker) and maker.sampling.n > 1 and maker.sampling.temperature == 0:
            yield (
                f"makers.{group}.sampling: temperature 0 gives {maker.sampling.n} equal samples and no advantage: "
                "raise the temperature, or use n: 1"
            )


def _check_reward_time(config: RunConfig, model: ModelInfo) -> Iterator[str]:
    """The last of `slots` rows waits for all rows before it: a slow function must not look like a hung maker."""
    for group, maker in config.makers.items():
        if isinstance(maker, RewardMaker):
            longest = maker.slots / maker.workers * sum(function.timeout for function in maker.functions)
            if longest > config.buffer.lease_timeout:
                yield (
                    f"makers.{group}: {maker.slots} slots over {maker.workers} worker(s) may take {longest:g} s with these "
                    f"function timeouts, more than buffer.lease_timeout {config.buffer.lease_timeout:g}: lower slots, raise "
                    "workers, or raise buffer.lease_timeout"
                )


def _check_optimizer(config: RunConfig, model: ModelInfo) -> Iterator[str]:
    for role, trainer in config.trainers.items():
        optimizer = trainer.optimizer
        if optimizer.warmup_steps > trainer.steps:
            yield (
                f"trainers.{role}.optimizer.warmup_steps: {optimizer.warmup_steps} is more than the {trainer.steps} steps "
                "of the run"
            )
        if optimizer.min_lr and optimizer.schedule == "constant":
            yield f"trainers.{role}.optimizer.min_lr: {optimizer.min_lr:g} is not read with `schedule: constant`"


def _check_buffer(config: RunConfig, model: ModelInfo) -> Iterator[str]:
    buffer = config.buffer
    if buffer.window and buffer.order != "window":
        yield f"buffer.window: {buffer.window} is read only with `order: window`, but order is `{buffer.order}`"
    if (
        config.weights.every > 1
        and config.trainers.get(POLICY)
        and config.trainers[POLICY].steps < config.weights.every
    ):
        yield (
            f"weights.every: {config.weights.every} steps between versions, but trainers.policy.steps is "
            f"{config.trainers[POLICY].steps}: no version would ever be published"
        )


def _check_cluster(config: RunConfig, model: ModelInfo) -> Iterator[str]:
    cluster = config.cluster
    unread = [key for key in ("cpus", "gpus") if getattr(cluster, key) is not None]
    if cluster.address is not None and unread:
        yield (
            f"cluster.{unread[0]}: read only for a cluster of the run's own, but cluster.address is {cluster.address}: "
            "remove one of the two"
        )


def _check_evaluation(config: RunConfig, model: ModelInfo) -> Iterator[str]:
    evaluation = config.evaluation
    if evaluation and not (evaluation.at_start or evaluation.at_end or evaluation.every):
        yield "evaluation: at_start and at_end are false and every is null, so nothing would be evaluated: remove it"


CHECKS: tuple[Callable[[RunConfig, ModelInfo], Iterator[str]], ...] = (
    _check_trainers,
    _check_columns,
    _check_groups,
    _check_sampling,
    _check_reward_time,
    _check_optimizer,
    _check_buffer,
    _check_cluster,
    _check_evaluation,
)


def _check_capacity(config: RunConfig, plan: Plan, capacity: Capacity) -> Iterator[str]:
    makers = ", ".join(f"{maker.replicas} x {group}" for group, maker in config.makers.items())
    remedy = "lower makers.*.replicas or resources, or use a larger cluster"
    for what, needed, offered in (("CPUs", plan.cpus, capacity.cpus), ("GPUs", plan.gpus, capacity.gpus)):
        if needed > offered + 1e-9:
            yield f"resources: the plan needs {needed:g} {what} ({makers}, trainer), {capacity.what} has {offered:g}: {remedy}"
    for actor in plan.actors:
        for what, needed, largest in (
            ("CPUs", actor.resources.cpus, capacity.node_cpus),
            ("GPUs", actor.resources.gpus, capacity.node_gpus),
        ):
            if needed > largest + 1e-9:
                yield f"resources: {actor.name} needs {needed:g} {what}, the largest node has {largest:g}: lower its resources"
    for name in sorted({name for actor in plan.actors for name in actor.resources.custom}):
        needed, offered = sum(a.resources.custom.get(name, 0.0) for a in plan.actors), capacity.custom.get(name, 0.0)
        if needed > offered + 1e-9:
            yield f"resources.custom: the plan needs {needed:g} {name}, {capacity.what} has {offered:g}: {remedy}"
    if plan.memory_gib > capacity.memory_gib:
        yield (
            f"memory: the plan needs about {plan.memory_gib:.1f} GiB ({makers}, trainer), "
            f"{capacity.what} has {capacity.memory_gib:.1f}: {remedy}"
        )


# --- building ---------------------------------------------------------------------------------------------------------


def _build(config: RunConfig, model: ModelInfo) -> Plan:
    trainer = config.trainers[POLICY]
    service = Resources(cpus=0)
    actors = [
        PlannedActor("supervisor", "supervisor", service, RUNTIME_GIB["service"]),
        PlannedActor("buffer", "buffer", service, RUNTIME_GIB["service"]),
        PlannedActor("weights", "weights", service, RUNTIME_GIB["service"]),
        PlannedActor(f"trainer/{POLICY}", "trainer", service, RUNTIME_GIB["service"]),
    ]
    actors += [
        PlannedActor(f"trainer/{POLICY}/rank/{index}", "rank", trainer.resources, _rank_memory(trainer, model))
        for index in range(ranks_of(trainer))
    ]
    for group, maker in config.makers.items():
        memory = _maker_memory(maker, model)
        actors += [
            PlannedActor(f"maker/{group}/{index}", "maker", maker.resources, memory) for index in range(maker.replicas)
        ]
    return Plan(
        actors=tuple(actors),
        edges=tuple(_edges(config)),
        arithmetic=_arithmetic(config),
        worst_case_staleness=worst_case_staleness(config),
        warnings=tuple(_warnings(config)),
    )


def worst_case_staleness(config: RunConfig) -> int:
    buffer, trainer = config.buffer, config.trainers[POLICY]
    return worst_case_age(
        buffer.order, buffer.window, buffer.max_staleness, trainer.groups_per_step, config.weights.every
    )


def _edges(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    yield "prompts", "buffer", "prompts, paced by staleness"
    for group, maker in config.makers.items():
        yield "buffer", f"maker/{group}", "leases"
        yield f"maker/{group}", "buffer", f"{stage_of(maker, group)} columns, by reference"
        if isinstance(maker, RolloutMaker):
            yield "weights", f"maker/{group}", "newest version"
    yield "buffer", f"trainer/{POLICY}", "complete rows, by reference"
    yield f"trainer/{POLICY}", "weights", f"a version every {config.weights.every} step(s)"


def _arithmetic(config: RunConfig) -> dict[str, str]:
    trainer, n = config.trainers[POLICY], rollout_of(config).sampling.n
    groups, every = trainer.groups_per_step, config.weights.every
    in_flight = (config.buffer.max_staleness + 1) * groups * every
    return {
        "samples per step": f"{groups} groups x {n} samples = {groups * n}",
        "optimizer steps per step": str(trainer.minibatches),
        "rows per version": f"{groups} groups x {every} step(s) = {groups * every}",
        "rows in flight at most": f"(max_staleness {config.buffer.max_staleness} + 1) x {groups * every} = {in_flight}",
        "rows in all": f"{trainer.steps} steps x {groups} = {trainer.steps * groups}",
    }


def _warnings(config: RunConfig) -> Iterator[str]:
    trainer = config.trainers[POLICY]
    if trainer.steps % config.weights.every:
        last = trainer.steps - trainer.steps % config.weights.every
        yield (
            f"weights.every: the steps after {last} end without a published version: the final checkpoint has them, the "
            "last evaluation does not"
        )
    if config.checkpoint.every is None and not config.checkpoint.at_end:
        yield "checkpoint: nothing will be saved"


def _rank_memory(trainer: TrainerConfig, model: ModelInfo) -> float:
    """Parameters, gradients, float32 main parameters and two Adam moments, plus the largest chunk of logits."""
    width = FLOAT_BYTES[trainer.backend.dtype]
    states = model.parameters * (width + 4 + 12) / GIB
    activations = trainer.backend.micro_batch_tokens * model.layers * model.hidden * 34 * width / 2 / GIB
    return RUNTIME_GIB["rank"] + states + activations


def _maker_memory(maker: RolloutMaker | RewardMaker | CustomMaker, model: ModelInfo) -> float:
    if isinstance(maker, RolloutMaker):
        weights = model.parameters * FLOAT_BYTES[maker.engine.dtype] / GIB
        return RUNTIME_GIB["rollout"] + 2 * weights + maker.engine.kv_cache_gib
    return RUNTIME_GIB["reward" if isinstance(maker, RewardMaker) else "custom"]
