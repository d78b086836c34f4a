"""The bundles of a plan as placement groups of the cluster: detached, named `tandem/RUN/GROUP`, ended with the run.

Guarantees: bundles that can never be placed are told of within seconds, with what is missing; those that only wait for
others to finish are told of once, and waited for; units are numbered node by node, so that neighbouring ranks are on the
same node, and whoever is started again comes back to where it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from buffer.config import Resources
from topology.bundles import BundleGroup, Node, asked, never_fits, say
from topology.plan import GIB

RAY_NAMES = {"CPUs": "CPU", "GPUs": "GPU"}
PATIENCE = 2.0  # seconds after which bundles that are not placed yet are looked into

OnWait = Callable[[str, str, str], None]  # (group, what it needs, what is free)


class CannotPlace(Exception):
    """Some bundles can never be placed; the message has the numbers and the remedy."""


class Placement:
    """Where the actors of a run go. `strategy` answers once `reserve` has returned."""

    def __init__(self, groups: Sequence[BundleGroup], namespace: str) -> None:
        self.waiting = {group.name: _needs(group) for group in groups}  # not placed yet -> what they need
        self._groups = groups
        self._namespace = namespace
        self._where: dict[str, PlacementGroupSchedulingStrategy] = {}
        self._reserved: dict[str, tuple[str, ...]] = {}  # by group: for whom

    async def reserve(self, on_wait: OnWait) -> None:
        """Returns when every bundle is placed; `on_wait` is told of each group that has to wait. Raises CannotPlace."""
        handles = [self._request(group) for group in self._groups]
        await asyncio.gather(
            *(self._place(group, handle, on_wait) for group, handle in zip(self._groups, handles, strict=True))
        )

    async def add(self, group: BundleGroup) -> None:
        """Reserve for actors that come later, at once or not at all. Raises CannotPlace with what is free."""
        handle = self._request(group)
        if not await asyncio.to_thread(handle.wait, PATIENCE):
            free = say(_free(group))
            try:
                _refuse_if_never(group, handle)
                raise CannotPlace(f"placement: {group.name} needs {_needs(group)}, free now: {free}")
            finally:
                remove_placement_group(handle)
        self._settle(group, handle)

    def adopt(self, groups: Sequence[BundleGroup]) -> None:
        """What an earlier life of the supervisor has reserved, by the names of the groups. All else of it is given back."""
        there = _there(self._namespace)
        for group in groups:
            handle = there.pop(self._name(group), None)
            if handle is not None:
                self._settle(group, handle)
        for handle in there.values():
            remove_placement_group(handle)

    def free(self, actor: str) -> None:
        """Give back what was reserved for this actor alone."""
        alone = [name for name, actors in self._reserved.items() if actors == (actor,)]
        for name in alone:
            del self._reserved[name]
            remove_placement_group(self._where.pop(actor).placement_group)

    def strategy(self, actor: str) -> PlacementGroupSchedulingStrategy | None:
        """None for an actor that asks for nothing."""
        return self._where.get(actor)

    def _request(self, group: BundleGroup) -> Any:
        return placement_group(
            [_demand(bundle.resources) for bundle in group.bundles],
            strategy=group.policy.upper(),
            name=self._name(group),
            lifetime="detached",
        )

    async def _place(self, group: BundleGroup, handle: Any, on_wait: OnWait) -> None:
        told = False
        while not await asyncio.to_thread(handle.wait, PATIENCE):
            _refuse_if_never(group, handle)
            if not told:
                on_wait(group.name, self.waiting[group.name], say(_free(group)))
                told = True
        del self.waiting[group.name]
        self._settle(group, handle)

    def _settle(self, group: BundleGroup, handle: Any) -> None:
        self._reserved[group.name] = tuple(actor for bundle in group.bundles for actor in bundle.actors)
        for bundle, index in zip(group.bundles, _node_by_node(handle), strict=True):
            for actor in bundle.actors:
                self._where[actor] = PlacementGroupSchedulingStrategy(handle, placement_group_bundle_index=index)

    def _name(self, group: BundleGroup) -> str:
        return f"{self._namespace}/{group.name}"


def release(namespace: str) -> None:
    """Remove every placement group of a run, whoever made it."""
    for handle in _there(namespace).values():
        remove_placement_group(handle)


def _there(namespace: str) -> dict[str, PlacementGroup]:
    """Those of a run, by name."""
    rows = [row for row in placement_group_table().values() if row["state"] != "REMOVED"]
    mine = [row for row in rows if row["name"].startswith(f"{namespace}/")]
    return {row["name"]: PlacementGroup(ray.PlacementGroupID.from_hex(row["placement_group_id"])) for row in mine}


def cluster_nodes() -> tuple[Node, ...]:
    """The nodes that are up: this one, then the others by address."""
    here = ray.get_runtime_context().get_node_id()
    alive = sorted(
        (node for node in ray.nodes() if node["Alive"]), key=lambda node: (node["NodeID"] != here, _address(node))
    )
    return tuple(
        Node(
            name=node["NodeManagerAddress"],
            cpus=node["Resources"].get("CPU", 0.0),
            gpus=node["Resources"].get("GPU", 0.0),
            memory_gib=node["Resources"].get("memory", 0.0) / GIB,
            custom=node["Resources"],
        )
        for node in alive
    )


def _node_by_node(handle: Any) -> list[int]:
    """Ray's indices of the bundles (all alike), sorted by the node they are on."""
    address = {node["NodeID"]: _address(node) for node in ray.nodes()}
    node_of: Mapping[int, str] = placement_group_table(handle)["bundles_to_node_id"]
    return sorted(node_of, key=lambda index: (address[node_of[index]], index))


def _address(node: Mapping[str, Any]) -> tuple[Any, ...]:
    """10.0.0.9 before 10.0.0.10; nodes on one address are told apart by id."""
    parts = node["NodeManagerAddress"].split(".")
    return [int(part) if part.isdigit() else 0 for part in parts], node["NodeManagerAddress"], node["NodeID"]


def _refuse_if_never(group: BundleGroup, handle: Any) -> None:
    nodes = cluster_nodes()
    never = never_fits(group, nodes)
    state = placement_group_table(handle)["stats"]["scheduling_state"]
    if never is None and state == "INFEASIBLE":
        never = f"placement: {group.name} needs {_needs(group)}, which this cluster can never hold"
    if never is not None:
        have = "; ".join(f"{node.name} has {node.cpus:g} CPUs, {node.gpus:g} GPUs" for node in nodes)
        raise CannotPlace(f"{never} ({have})")


def _needs(group: BundleGroup) -> str:
    return f"{len(group.bundles)} x {say(asked(group.bundles[0].resources))} ({group.policy})"


def _free(group: BundleGroup) -> dict[str, float]:
    free = ray.available_resources()
    return {name: free.get(RAY_NAMES.get(name, name), 0.0) for name in asked(group.bundles[0].resources)}


def _demand(resources: Resources) -> dict[str, float]:
    return {RAY_NAMES.get(name, name): amount for name, amount in asked(resources).items()}
