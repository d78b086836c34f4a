"""Which actors lie together, and where: a config's placement as bundles, and bundles laid out on nodes. Pure.

A **bundle** is what is never split over two nodes: one engine, the ranks of one tensor-parallel group, or all actors that
share the same devices in turns. The bundles of a maker group, of a trainer or of a colocated set are reserved together
and laid out by one policy. `fit` does what the cluster's scheduler does, on paper: the plan shows its layout, and refuses
what it finds no room for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from buffer.config import Resources
from topology.config import PlacementPolicy, RunConfig
from topology.roles import maker_names, rank_names, tensor_parallel_of

EPSILON = 1e-9


@dataclass(frozen=True)
class Bundle:
    resources: Resources
    actors: tuple[str, ...]


@dataclass(frozen=True)
class BundleGroup:
    """Bundles that are reserved together. `name`: the group or trainer, or those that share devices joined by +."""

    name: str
    policy: PlacementPolicy
    bundles: tuple[Bundle, ...]


@dataclass(frozen=True)
class Node:
    """A machine of the cluster, and what it offers (or, in `fit`, what is left of it)."""

    name: str
    cpus: float
    gpus: float
    memory_gib: float
    custom: Mapping[str, float] = field(default_factory=dict)


# --- from a config ----------------------------------------------------------------------------------------------------


def bundle_groups(config: RunConfig) -> tuple[BundleGroup, ...]:
    """Every group that asks for something, in the order in which they are reserved. The config has passed the checks."""
    shared = {name for names in config.placement.colocate for name in names}
    alone = [name for name in (*config.trainers, *config.makers) if name not in shared]
    found = [_together(config, names) for names in config.placement.colocate]
    found += [BundleGroup(name, policy_of(config, [name]), tuple(units(config, name))) for name in alone]
    asking = [group for group in found if any(asked(bundle.resources) for bundle in group.bundles)]
    # The largest first, and those with a strict policy before all: what is left over is easier for small ones.
    return tuple(sorted(asking, key=_order))


def units(config: RunConfig, name: str) -> list[Bundle]:
    """What of a maker group or a trainer must be on one node: engines, or tensor-parallel groups of ranks."""
    if name in config.makers:
        maker = config.makers[name]
        return [Bundle(maker.resources, (actor,)) for actor in maker_names(name, maker)]
    trainer = config.trainers[name]
    size = tensor_parallel_of(trainer)
    ranks = rank_names(name, trainer)
    parts = [tuple(ranks[start : start + size]) for start in range(0, len(ranks), size)]
    return [Bundle(total([trainer.resources] * len(part)), part) for part in parts]


def policy_of(config: RunConfig, names: Sequence[str]) -> PlacementPolicy:
    return next((config.placement.groups[name] for name in names if name in config.placement.groups), "pack")


def device(config: RunConfig, names: Sequence[str]) -> str:
    """What these groups share in turns: GPUs, or where none of them asks for one CPUs."""
    gpus = any(unit.resources.gpus for name in names for unit in units(config, name))
    return "gpus" if gpus else "cpus"


def devices_of(config: RunConfig, name: str, kind: str) -> float:
    return sum(getattr(unit.resources, kind) for unit in units(config, name))


def makers_in_turns(config: RunConfig) -> tuple[str, ...]:
    """The makers that sleep while trainers which share their devices work."""
    groups = [name for names in _turns(config) for name in names if name in config.makers]
    return tuple(actor for group in groups for unit in units(config, group) for actor in unit.actors)


def trainers_in_turns(config: RunConfig) -> tuple[str, ...]:
    """The trainers whose ranks make room for makers between two steps."""
    return tuple(name for names in _turns(config) for name in names if name in config.trainers)


def sharers(config: RunConfig) -> frozenset[str]:
    """Actors on devices that others of their bundle ask the cluster for: the ranks of the set's first trainer."""
    sharing: list[str] = []
    for names in config.placement.colocate:
        owner = _owner(config, names)
        sharing += [actor for name in names if name != owner for unit in units(config, name) for actor in unit.actors]
    return frozenset(sharing)


def _turns(config: RunConfig) -> list[list[str]]:
    return [names for names in config.placement.colocate if any(name in config.makers for name in names)]


def _owner(config: RunConfig, names: Sequence[str]) -> str:
    return next(name for name in names if name in config.trainers)


def shared_devices(bundle: Bundle, actor: str, devices: Mapping[str, str]) -> str:
    """The ids, comma-separated, of the devices that an actor is to use: those of a group share them out in order.

    `devices`: the ids by actor, of the actors of the bundle that asked the cluster for them.
    """
    ids = [one for owner in bundle.actors if owner in devices for one in devices[owner].split(",") if one]
    mates = [other for other in bundle.actors if other.rpartition("/")[0] == actor.rpartition("/")[0]]
    each = len(ids) // len(mates)
    first = mates.index(actor) * each
    return ",".join(ids[first : first + each])


def _together(config: RunConfig, names: Sequence[str]) -> BundleGroup:
    """Each bundle holds the same devices of every group: as many as the largest unit of one of them."""
    kind = device(config, names)
    parts = {name: units(config, name) for name in names}
    count = min(len(part) for part in parts.values())
    bundles = []
    for index in range(count):
        mine = [_share(part, index, count) for part in parts.values()]
        bundles.append(Bundle(_largest([total([u.resources for u in us]) for us in mine], kind), _actors(mine)))
    return BundleGroup("+".join(names), policy_of(config, names), tuple(bundles))


def _order(group: BundleGroup) -> tuple[bool, float, float]:
    resources = group.bundles[0].resources
    return not group.policy.startswith("strict"), -resources.gpus, -resources.cpus


def _share(part: list[Bundle], index: int, count: int) -> list[Bundle]:
    size = len(part) // count
    return part[index * size : (index + 1) * size]


def _actors(shares: Sequence[Sequence[Bundle]]) -> tuple[str, ...]:
    return tuple(actor for share in shares for unit in share for actor in unit.actors)


def total(resources: Iterable[Resources]) -> Resources:
    cpus, gpus, custom = 0.0, 0.0, Counter[str]()
    for one in resources:
        cpus, gpus = cpus + one.cpus, gpus + one.gpus
        custom.update(one.custom)
    return Resources(cpus=cpus, gpus=gpus, custom=dict(custom))


def _largest(resources: Sequence[Resources], kind: str) -> Resources:
    """In turns: what the one needs the other gives back."""
    custom: dict[str, float] = {}
    for one in resources:
        custom |= {name: max(amount, custom.get(name, 0.0)) for name, amount in one.custom.items()}
    return Resources(cpus=max(r.cpus for r in resources), gpus=max(r.gpus for r in resources), custom=custom)


# --- on nodes ---------------------------------------------------------------------------------------------------------


def fit(groups: Sequence[BundleGroup], nodes: Sequence[Node]) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """The node of every bundle, by group; and one line for each group that there is no room for, with the numbers."""
    free = [_amounts(node) for node in nodes]
    layout: dict[str, tuple[int, ...]] = {}
    problems = []
    for group in groups:
        problem = never_fits(group, nodes)
        places = None if problem else _lay_out(group, free)
        if places is not None:
            layout[group.name] = places
            continue
        rest = "; ".join(f"{node.name} {say(left)}" for node, left in zip(nodes, free, strict=True))
        needs = f"{len(group.bundles)} x {say(asked(group.bundles[0].resources))}"
        problems.append(
            problem
            or f"placement: {group.name} needs {needs} ({group.policy}), which finds no room beside the others; left: {rest}"
        )
    return layout, problems


def never_fits(group: BundleGroup, nodes: Sequence[Node]) -> str | None:
    """Why these bundles can never be placed, however idle the nodes are; None if they can."""
    offers = [_amounts(node) for node in nodes]
    for bundle in group.bundles:
        if not any(_holds(offer, bundle) for offer in offers):
            what = (
                bundle.actors[0]
                if len(bundle.actors) == 1
                else f"{bundle.actors[0]} to {bundle.actors[-1]}, on one node,"
            )
            return (
                f"resources: {what} needs {_short(bundle.resources, offers)}: lower its resources or use a larger node"
            )
    whole = Bundle(total([bundle.resources for bundle in group.bundles]), ())
    if group.policy == "strict_pack" and not any(_holds(offer, whole) for offer in offers):
        return (
            f"placement.groups: {group.name} is to be on one node (strict_pack), which needs "
            f"{_short(whole.resources, offers)}: use `pack`, or fewer actors"
        )
    able = sum(all(_holds(offer, bundle) for bundle in group.bundles) for offer in offers)
    if group.policy == "strict_spread" and able < len(group.bundles):
        return (
            f"placement.groups: {group.name} is to have a node for each of {len(group.bundles)} (strict_spread), "
            f"the cluster has {able} that can hold one: use `spread`, or fewer actors"
        )
    return None


def say(amounts: Mapping[str, float]) -> str:
    """`2 CPUs, 1 GPU`."""
    one = {"CPUs": "CPU", "GPUs": "GPU"}
    return ", ".join(f"{n:g} {one.get(what, what) if n == 1 else what}" for what, n in amounts.items()) or "nothing"


def _lay_out(group: BundleGroup, free: list[dict[str, float]]) -> tuple[int, ...] | None:
    """Takes the room from `free`, unless it is not enough."""
    left = [dict(one) for one in free]
    used: Counter[int] = Counter()
    places: list[int] = []
    for number, bundle in enumerate(group.bundles):
        able = [node for node in range(len(left)) if _holds(left[node], bundle)]
        if group.policy == "strict_pack" and used:
            able = [node for node in able if used[node]]
        if group.policy == "strict_spread":
            able = [node for node in able if not used[node]]
        if not able:
            return None
        rest = len(group.bundles) - number
        if group.policy.endswith("spread"):
            node = min(able, key=lambda node: used[node])
        else:  # beside the others of its group, else where the most of them find room
            node = max(able, key=lambda node: (used[node] > 0, min(rest, _room(left[node], bundle))))
        used[node] += 1
        for name, amount in asked(bundle.resources).items():
            left[node][name] -= amount
        places.append(node)
    free[:] = left
    return tuple(places)


def _amounts(node: Node) -> dict[str, float]:
    return {"CPUs": node.cpus, "GPUs": node.gpus, **node.custom}


def asked(resources: Resources) -> dict[str, float]:
    every = {"CPUs": resources.cpus, "GPUs": resources.gpus, **resources.custom}
    return {name: amount for name, amount in every.items() if amount}


def _holds(offer: Mapping[str, float], bundle: Bundle) -> bool:
    return all(amount <= offer.get(name, 0.0) + EPSILON for name, amount in asked(bundle.resources).items())


def _room(offer: Mapping[str, float], bundle: Bundle) -> float:
    """How many of these bundles it holds."""
    return min((offer.get(name, 0.0) / amount for name, amount in asked(bundle.resources).items()), default=0.0)


def _short(resources: Resources, offers: Sequence[Mapping[str, float]]) -> str:
    """What is asked for, and the most of it that one node has."""
    wanted = asked(resources)
    most = {name: max((offer.get(name, 0.0) for offer in offers), default=0.0) for name in wanted}
    lacking = {name: amount for name, amount in wanted.items() if amount > most[name] + EPSILON}
    largest = say({name: most[name] for name in lacking or wanted})
    return f"{say(lacking or wanted)}, the largest node has {largest}{'' if lacking else ', but no node has all of it'}"
