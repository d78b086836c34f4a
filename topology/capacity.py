"""What a cluster offers, what a plan puts on each of its nodes, and whether that fits. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from buffer.config import Resources
from topology.bundles import EPSILON, BundleGroup, Node, fit, total
from topology.config import RunConfig
from topology.roles import ranks_of


@dataclass(frozen=True)
class PlannedActor:
    name: str
    kind: str  # supervisor, buffer, weights, maker, trainer, rank
    resources: Resources
    memory_gib: float  # estimate of resident memory
    gpu_memory_gib: float = 0.0  # the least it needs of each of its GPUs; an engine's cache takes more


@dataclass(frozen=True)
class Capacity:
    """The nodes of the cluster (or this machine, for a run with a cluster of its own, which has no custom resources)."""

    what: str
    nodes: tuple[Node, ...]

    @property
    def cpus(self) -> float:
        return sum(node.cpus for node in self.nodes)

    @property
    def gpus(self) -> float:
        return sum(node.gpus for node in self.nodes)

    def custom(self, name: str) -> float:
        return sum(node.custom.get(name, 0.0) for node in self.nodes)


@dataclass(frozen=True)
class NodeLoad:
    """What a plan puts on one node."""

    name: str
    resources: Resources
    memory_gib: float
    actors: tuple[str, ...]


def lay_out(
    config: RunConfig, actors: Sequence[PlannedActor], groups: Sequence[BundleGroup], capacity: Capacity
) -> tuple[tuple[NodeLoad, ...], list[str]]:
    """The load of each node, or what there is no room for: one line for each reason, with the numbers and the remedy."""
    problems = list(_totals(config, groups, capacity))
    if problems:
        return (), problems
    layout, problems = fit(groups, capacity.nodes)
    if problems:
        return (), problems
    loads = tuple(_loads(actors, groups, capacity, layout))
    return loads, list(_memory(loads, capacity))


def _totals(config: RunConfig, groups: Sequence[BundleGroup], capacity: Capacity) -> Iterator[str]:
    asked = [bundle.resources for group in groups for bundle in group.bundles]
    makers = [f"{maker.replicas} x {group}" for group, maker in config.makers.items()]
    who = ", ".join([*makers, *(f"{ranks_of(trainer)} x {role} rank" for role, trainer in config.trainers.items())])
    remedy = "lower makers.*.replicas or resources, or use a larger cluster"
    for what, needed, offered in (
        ("CPUs", sum(r.cpus for r in asked), capacity.cpus),
        ("GPUs", sum(r.gpus for r in asked), capacity.gpus),
    ):
        if needed > offered + EPSILON:
            yield f"resources: the plan needs {needed:g} {what} ({who}), {capacity.what} has {offered:g}: {remedy}"
    for name in sorted({name for resources in asked for name in resources.custom}):
        needed, offered = sum(r.custom.get(name, 0.0) for r in asked), capacity.custom(name)
        if needed > offered + EPSILON:
            yield f"resources.custom: the plan needs {needed:g} {name}, {capacity.what} has {offered:g}: {remedy}"


def _loads(
    actors: Sequence[PlannedActor],
    groups: Sequence[BundleGroup],
    capacity: Capacity,
    layout: Mapping[str, tuple[int, ...]],
) -> Iterator[NodeLoad]:
    """What asks for nothing runs where the command is given, which counts as the first node."""
    placed = [
        (node, bundle) for group in groups for node, bundle in zip(layout[group.name], group.bundles, strict=True)
    ]
    node_of = {actor: node for node, bundle in placed for actor in bundle.actors}
    for index, node in enumerate(capacity.nodes):
        here = [actor for actor in actors if node_of.get(actor.name, 0) == index]
        yield NodeLoad(
            name=node.name,
            resources=total(bundle.resources for place, bundle in placed if place == index),
            memory_gib=sum(actor.memory_gib for actor in here),
            actors=tuple(actor.name for actor in here),
        )


def _memory(loads: Sequence[NodeLoad], capacity: Capacity) -> Iterator[str]:
    for load, node in zip(loads, capacity.nodes, strict=True):
        if load.memory_gib > node.memory_gib:
            where = capacity.what if len(loads) == 1 else f"node {node.name} of {capacity.what}"
            yield (
                f"memory: the plan needs about {load.memory_gib:.1f} GiB ({len(load.actors)} actors), {where} has "
                f"{node.memory_gib:.1f}: lower makers.*.replicas, spread them (placement.groups), or use a larger machine"
            )
