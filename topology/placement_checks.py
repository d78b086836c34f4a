"""What makes a placement impossible, whatever the cluster: one small check for each reason. Pure.

Like those of `topology.checks`, each yields one line for each problem, with the key, the numbers and the remedy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from makers.config import JudgeMaker, ReferenceMaker, RewardMaker, RolloutMaker, TeacherMaker
from topology.bundles import device, devices_of, units
from topology.config import RunConfig
from topology.models import ModelInfo
from topology.roles import ranks_of
from trainers.config import MegatronBackend


def check_names(config: RunConfig, model: ModelInfo) -> Iterator[str]:
    known = {*config.makers, *config.trainers}
    for name in config.makers:
        if name in config.trainers:
            yield f"makers.{name}: a trainer has the same name, which `placement` could not tell apart: rename the group"
    for name in config.placement.groups:
        if name not in known:
            yield f"placement.groups.{name}: no maker group or trainer has that name; there are: {', '.join(sorted(known))}"
    seen: set[str] = set()
    for index, names in enumerate(config.placement.colocate):
        key = f"placement.colocate.{index}"
        for name in names:
            if name not in known:
                yield f"{key}: no maker group or trainer is named `{name}`; there are: {', '.join(sorted(known))}"
            elif name in seen:
                yield f"{key}: `{name}` stands twice, but a group has one set of devices: name it once"
            seen.add(name)


def check_sets(config: RunConfig, model: ModelInfo) -> Iterator[str]:
    """Who may share devices."""
    placement = config.placement
    if placement.sleep_level != 1 and not placement.colocate:
        yield f"placement.sleep_level: {placement.sleep_level} is read only with `placement.colocate`: remove it"
    for index, names in enumerate(_known_sets(config)):
        key = f"placement.colocate.{index}"
        if len(names) < 2:
            yield f"{key}: {len(names)} group(s) share nothing: name at least two, as in [rollout, policy]"
        if not any(name in config.trainers for name in names):
            yield (
                f"{key}: {', '.join(names)} all work at the same time, so there are no turns to take: name a trainer, or give "
                "them parts of a device with fractional resources.gpus"
            )
        for name in names:
            if isinstance(config.makers.get(name), RewardMaker):
                yield f"{key}: `{name}` ({config.makers[name].kind}) has nothing that could sleep: leave it out of the set"
        policies = {placement.groups[name] for name in names if name in placement.groups}
        if len(policies) > 1:
            yield f"placement.groups: {', '.join(names)} lie together, but are to be {' and '.join(sorted(policies))}: name one"


def check_devices(config: RunConfig, model: ModelInfo) -> Iterator[str]:
    """Whether those who share devices have the same of them."""
    for index, names in enumerate(_known_sets(config)):
        key, kind = f"placement.colocate.{index}", device(config, names)
        what = {"gpus": "GPUs", "cpus": "CPUs"}[kind]
        sizes = {name: getattr(units(config, name)[0].resources, kind) for name in names}
        said = ", ".join(f"{name} {len(units(config, name))} x {size:g}" for name, size in sizes.items())
        if len({devices_of(config, name, kind) for name in names}) > 1:
            yield (
                f"{key}: equal numbers of {what} are needed, got {said}: change replicas, the engine's or the backend's "
                "parallelism, or resources"
            )
            continue
        if any(size and max(sizes.values()) % size for size in sizes.values()):
            yield (
                f"{key}: the {what} of one engine or tensor-parallel group must divide those of the other, got {said}: "
                "make one a multiple of the other"
            )
        if kind == "gpus":
            yield from _check_gpu_sets(config, key, names)


def check_ranks(config: RunConfig, model: ModelInfo) -> Iterator[str]:
    for role, trainer in config.trainers.items():
        gpus, ranks = trainer.resources.gpus, ranks_of(trainer)
        if gpus > 1:
            yield (
                f"trainers.{role}.resources.gpus: {gpus:g}, but a rank uses one GPU: set gpus: 1 and let the backend's "
                "parallelism multiply the ranks"
            )
        if 0 < gpus < 1 and ranks > 1:
            yield (
                f"trainers.{role}.resources.gpus: {gpus:g} puts several of {ranks} ranks on one GPU, which their collectives "
                "(NCCL) refuse: set gpus: 1"
            )


def _check_gpu_sets(config: RunConfig, key: str, names: list[str]) -> Iterator[str]:
    for name in names:
        gpus = (config.makers.get(name) or config.trainers[name]).resources.gpus
        if gpus % 1:
            yield f"{key}: {name} asks for {gpus:g} GPUs, but turns are taken on whole ones: set gpus: {math.ceil(gpus)}"
    engines = {
        name: engine
        for name in names
        if isinstance(maker := config.makers.get(name), RolloutMaker | TeacherMaker | ReferenceMaker | JudgeMaker)
        and (engine := maker.engine) is not None
    }
    shares = sum(engine.gpu_memory_utilization for engine in engines.values())
    if shares > 1:
        yield (
            f"{key}: the makers {', '.join(engines)} are awake at the same time and want {shares:g} of each GPU's memory "
            "(engine.gpu_memory_utilization): lower it until the sum is below 1"
        )
    for name in names:
        backend = config.trainers[name].backend if name in config.trainers else None
        if isinstance(backend, MegatronBackend) and backend.dtype == "float32" and backend.distributed_optimizer:
            yield (
                f"trainers.{name}.backend.dtype: Megatron cannot move float32 parameters that its distributed optimizer "
                "shares out to CPU memory and back: use bfloat16, or distributed_optimizer: false"
            )


def _known_sets(config: RunConfig) -> list[list[str]]:
    """The sets of groups that exist; what else is wrong with the others is of no interest yet."""
    known = {*config.makers, *config.trainers}
    return [names for names in config.placement.colocate if known.issuperset(names)]


PLACEMENT_CHECKS = (check_names, check_sets, check_devices, check_ranks)
