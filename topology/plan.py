"""Config -> plan: which actors, with what, joined how, and whether it can work. Pure; starts nothing.

Guarantees: a plan is either complete or a `ConfigError` that lists every problem found, each with the key, the numbers
and the remedy. The same plan drives `tandem plan`, `tandem run` and the supervisor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from buffer.config import Resources
from buffer.table import worst_case_age
from makers.config import (
    DatasetMaker,
    MakerConfig,
    ReferenceMaker,
    RewardMaker,
    RewardModelMaker,
    RolloutMaker,
    TeacherMaker,
)
from topology.bundles import Bundle, BundleGroup, bundle_groups, makers_in_turns, total, trainers_in_turns
from topology.capacity import Capacity, NodeLoad, PlannedActor, lay_out
from topology.checks import check_own_models, check_teacher_of_ranks, checks_of
from topology.config import ConfigError, RunConfig
from topology.consumer import COLLECTOR, pace_of
from topology.models import ModelInfo
from topology.roles import (
    CRITIC,
    POLICY,
    maker_names,
    makers_that_pull,
    on_policy_of,
    rank_names,
    route_of,
    samples_of,
    stage_of,
)
from topology.scoring_checks import scoring_engine
from trainers.collecting.config import CollectConfig
from trainers.config import MegatronBackend

GIB = 1 << 30
RUNTIME_GIB = {
    "rollout": 1.1,
    "reward": 0.4,
    "reference": 0.7,
    "dataset": 0.5,
    "custom": 0.5,
    "rank": 0.7,
    "service": 0.25,
}  # measured resident memory
NO_MODELS: Mapping[str, ModelInfo] = {}
FLOAT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Plan:
    actors: tuple[PlannedActor, ...]
    edges: tuple[tuple[str, str, str], ...]  # (from, to, what crosses)
    arithmetic: dict[str, str]
    worst_case_staleness: int  # published versions
    warnings: tuple[str, ...]
    groups: tuple[BundleGroup, ...]  # what is reserved together
    nodes: tuple[NodeLoad, ...] = ()  # how that lies on the cluster as it was when the plan was made

    @property
    def resources(self) -> Resources:
        return total(bundle.resources for group in self.groups for bundle in group.bundles)

    @property
    def cpus(self) -> float:
        return self.resources.cpus

    @property
    def gpus(self) -> float:
        return self.resources.gpus

    @property
    def memory_gib(self) -> float:
        return sum(actor.memory_gib for actor in self.actors)

    def bundle_of(self, actor: str) -> Bundle:
        return next(bundle for group in self.groups for bundle in group.bundles if actor in bundle.actors)

    def named(self, kind: str) -> list[PlannedActor]:
        return [actor for actor in self.actors if actor.kind == kind]


def make_plan(
    config: RunConfig,
    model: ModelInfo,
    capacity: Capacity,
    own_models: Mapping[str, ModelInfo] = NO_MODELS,
    teacher: ModelInfo | None = None,
) -> Plan:
    """Raises ConfigError that lists every problem. `own_models`: by group, of makers with a model of their own; `teacher`:
    that of the policy's ranks."""
    problems = [problem for check in checks_of(config) for problem in check(config, model)]
    problems += check_own_models(config, own_models)
    problems += check_teacher_of_ranks(config, model, teacher)
    if not problems:
        plan = _build(config, model, own_models, teacher)
        nodes, problems = lay_out(config, plan.actors, plan.groups, capacity)
        if not problems:
            return replace(plan, nodes=nodes, warnings=(*plan.warnings, *_idle_gpus(plan, capacity)))
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    raise ConfigError(f"this plan cannot work: {count}\n" + "\n".join(f"  {problem}" for problem in problems))


# --- building ---------------------------------------------------------------------------------------------------------


def _build(config: RunConfig, model: ModelInfo, own_models: Mapping[str, ModelInfo], teacher: ModelInfo | None) -> Plan:
    service = Resources(cpus=0)
    actors = [
        PlannedActor("supervisor", "supervisor", service, RUNTIME_GIB["service"]),
        PlannedActor("buffer", "buffer", service, RUNTIME_GIB["service"]),
    ]
    if config.collect is None:
        actors.append(PlannedActor("weights", "weights", service, RUNTIME_GIB["service"]))
    else:
        actors.append(PlannedActor(COLLECTOR, COLLECTOR, service, RUNTIME_GIB["service"]))
    for role, trainer in config.trainers.items():
        kind = "trainer" if role == POLICY else "critic"
        actors.append(PlannedActor(f"trainer/{role}", kind, service, RUNTIME_GIB["service"]))
        for index, name in enumerate(rank_names(role, trainer)):
            memory = _rank_memory(config, role, model, index)
            if role == POLICY and teacher is not None:
                memory = _with_teacher(config, teacher, *memory)
            actors.append(PlannedActor(name, "rank", trainer.resources, *memory))
    for group, maker in config.makers.items():
        memory = _maker_memory(maker, own_models.get(group, model))
        actors += [PlannedActor(name, "maker", maker.resources, *memory) for name in maker_names(group, maker)]
    return Plan(
        actors=tuple(actors),
        edges=tuple(_edges(config)),
        arithmetic=_arithmetic(config),
        worst_case_staleness=worst_case_staleness(config),
        warnings=tuple(_warnings(config)),
        groups=bundle_groups(config),
    )


def worst_case_staleness(config: RunConfig) -> int:
    """In published versions; a job has one."""
    if config.collect is not None:
        return 0
    buffer, trainer = config.buffer, config.trainers[POLICY]
    return worst_case_age(
        buffer.order, buffer.window, buffer.max_staleness, trainer.groups_per_step, config.weights.every
    )


def past_versions(config: RunConfig) -> int:
    """How many past versions each rank of the policy keeps for comparing with the makers."""
    kept = config.trainers[POLICY].mismatch.versions
    return worst_case_staleness(config) if kept is None else kept


def _edges(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    yield "prompts", "buffer", "prompts, paced by staleness"
    for group, maker in config.makers.items():
        route = route_of(config, maker)
        yield "buffer", f"maker/{group}", f"leases{'' if route is None else f' of rows with {route}'}"
        yield f"maker/{group}", "buffer", f"{stage_of(maker, group)} columns, by reference"
        if isinstance(maker, RolloutMaker) and config.collect is None:
            yield "weights", f"maker/{group}", "newest version"
    if config.collect is not None:
        yield "buffer", COLLECTOR, "complete rows, by reference"
        return
    yield "buffer", f"trainer/{POLICY}", "complete rows, by reference"
    if makers_that_pull(config):
        yield f"trainer/{POLICY}", "weights", f"a version every {config.weights.every} step(s)"
    if config.trainers.critic is not None:
        yield f"trainer/{POLICY}", f"trainer/{CRITIC}", "rows by reference, then returns"
        yield f"trainer/{CRITIC}", f"trainer/{POLICY}", "values"


def _arithmetic(config: RunConfig) -> dict[str, str]:
    if config.collect is not None:
        return _job_arithmetic(config, config.collect)
    trainer, n = config.trainers[POLICY], samples_of(config)
    groups, every = trainer.groups_per_step, config.weights.every
    in_flight = (config.buffer.max_staleness + 1) * groups * every
    part = on_policy_of(config)
    mixed = {"rows of the dataset": f"{1 - part:.0%} of all, drawn one by one (1 - lmbda {part:g})"}
    return {
        **(mixed if part < 1 else {}),
        "samples per step": f"{groups} groups x {n} samples = {groups * n}",
        **{
            f"optimizer steps per step{'' if role == POLICY else f' ({role})'}": str(each.minibatches)
            for role, each in config.trainers.items()
        },
        "rows per version": f"{groups} groups x {every} step(s) = {groups * every}",
        "rows in flight at most": f"(max_staleness {config.buffer.max_staleness} + 1) x {groups * every} = {in_flight}",
        "rows in all": f"{trainer.steps} steps x {groups} = {trainer.steps * groups}",
    }


def _job_arithmetic(config: RunConfig, collect: CollectConfig) -> dict[str, str]:
    rows, parts, n = collect.rows_per_part, collect.parts_in_flight, samples_of(config)
    return {
        "samples per part": f"{rows} rows x {n} samples = {rows * n}",
        "rows in flight at most": f"{parts} parts x {rows} = {parts * rows}",
        "passes over the prompts": str(pace_of(config).prompts.epochs),
    }


def _warnings(config: RunConfig) -> Iterator[str]:
    if config.collect is not None:
        return
    trainer = config.trainers[POLICY]
    if trainer.steps % config.weights.every:
        last = trainer.steps - trainer.steps % config.weights.every
        yield (
            f"weights.every: the steps after {last} end without a published version: the final checkpoint has them, the "
            "last evaluation does not"
        )
    if makers_in_turns(config) and config.buffer.max_staleness:
        yield (
            f"placement.colocate: with buffer.max_staleness {config.buffer.max_staleness} makers begin rows of later steps, "
            "which they finish before each hand-over, while the trainer waits: 0 hands over at once"
        )
    if config.checkpoint.every is None and not config.checkpoint.at_end:
        yield "checkpoint: nothing will be saved"


def _idle_gpus(plan: Plan, capacity: Capacity) -> Iterator[str]:
    if capacity.gpus and not plan.gpus:
        yield (
            f"resources: {capacity.what} has {capacity.gpus:g} GPUs and nothing asks for one, so everything runs on CPUs: "
            "set makers.*.resources.gpus and trainers.*.resources.gpus"
        )


def _rank_memory(config: RunConfig, role: str, model: ModelInfo, index: int) -> tuple[float, float]:
    """Of a rank's part: parameters now and of past versions, gradients, main parameters and two moments; activations; and
    of one rank for each part the copy that a checkpoint is written from.

    In GiB, on the host and on its GPU. With GPUs the state is there, and on the host too where it makes room for makers.
    """
    trainer = config.trainers[role]
    backend, width = trainer.backend, FLOAT_BYTES[trainer.backend.dtype]
    past = past_versions(config) if role == POLICY else 0
    parts = sharers = 1
    if isinstance(backend, MegatronBackend):
        parts = backend.tensor_parallel * backend.pipeline_parallel
        sharers = backend.data_parallel if backend.distributed_optimizer else 1
    own = model.parameters / parts / GIB
    states = own * (width * (1 + past) + 4 + 12 / sharers)
    activations = backend.micro_batch_tokens * model.layers * model.hidden * 34 * width / 2 / parts / GIB
    host = RUNTIME_GIB["rank"] + (own * (width + 12) if _stages(config, role, index) else 0.0)
    if not trainer.resources.gpus:
        return host + states + activations, 0.0
    return host + (states if role in trainers_in_turns(config) else 0.0), states + activations


def _with_teacher(config: RunConfig, teacher: ModelInfo, host: float, gpu: float) -> tuple[float, float]:
    """A rank's GiB with its part of a frozen teacher, which is on its device, and with `offload` on the host too."""
    trainer = config.trainers[POLICY]
    assert trainer.teacher is not None
    backend = trainer.backend
    parts = backend.tensor_parallel * (backend.pipeline_parallel if isinstance(backend, MegatronBackend) else 1)
    own = teacher.parameters * FLOAT_BYTES[trainer.teacher.dtype] / parts / GIB
    if not trainer.resources.gpus:
        return host + own, gpu
    return host + (own if trainer.teacher.offload else 0.0), gpu + own


def _stages(config: RunConfig, role: str, index: int) -> bool:
    """Whether the rank copies state for checkpoints: of the replicas of a part only the first does."""
    backend = config.trainers[role].backend
    if config.checkpoint.every is None and not config.checkpoint.at_end:
        return False
    if not isinstance(backend, MegatronBackend):
        return True
    return index // backend.tensor_parallel % (backend.context_parallel * backend.data_parallel) == 0


def _maker_memory(maker: MakerConfig, model: ModelInfo) -> tuple[float, float]:
    """GiB on the host, and of each of its GPUs (without an engine's cache, which takes what it may)."""
    gpu = maker.resources.gpus > 0
    engine = maker.engine if isinstance(maker, RolloutMaker) else scoring_engine(maker)
    if engine is not None:
        weights = model.parameters * FLOAT_BYTES[engine.dtype] / GIB
        workers = engine.workers
        processes = 1 if workers == 1 else 1 + workers  # several are children of the maker, which holds no weights then
        runtime = processes * RUNTIME_GIB["rollout"]
        if gpu:
            return runtime + weights, weights / workers
        scored = maker.micro_batch_tokens if isinstance(maker, TeacherMaker | ReferenceMaker) else 0
        logits = 3 * 4 * scored * model.vocab / GIB  # float32, their log-softmax, and what sorts it
        return runtime + 2 * weights + engine.kv_cache_gib + logits, 0.0
    if isinstance(maker, ReferenceMaker):
        width, runtime = FLOAT_BYTES[maker.dtype], RUNTIME_GIB["reference"]
        state = (model.parameters + maker.micro_batch_tokens * model.vocab) * width / GIB
        return (runtime, state) if gpu else (runtime + state, 0.0)
    if isinstance(maker, RewardModelMaker):
        width, runtime = FLOAT_BYTES[maker.dtype], RUNTIME_GIB["reference"]
        activations = maker.micro_batch_tokens * (8 * model.hidden + 4 * model.intermediate)  # of one layer at a time
        state = (model.parameters + activations) * width / GIB
        return (runtime, state) if gpu else (runtime + state, 0.0)
    if isinstance(maker, DatasetMaker):
        return RUNTIME_GIB["dataset"], 0.0
    return RUNTIME_GIB["reward" if isinstance(maker, RewardMaker) else "custom"], 0.0
