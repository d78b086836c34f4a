"""Which actors lie together, and where a cluster would put them."""

from __future__ import annotations

import pytest

from buffer.config import Resources
from topology.bundles import Bundle, BundleGroup, Node, bundle_groups, fit, shared_devices, sharers, units
from topology.config import RunConfig, load_config

BACKEND = "trainers.policy.backend"


def demo(*overrides: str) -> RunConfig:
    return load_config("configs/demo.yaml", overrides)


def named(config: RunConfig) -> dict[str, BundleGroup]:
    return {group.name: group for group in bundle_groups(config)}


def group(name: str, policy: str, count: int, cpus: float = 1, gpus: float = 0) -> BundleGroup:
    bundles = tuple(Bundle(Resources(cpus=cpus, gpus=gpus), (f"maker/{name}/{index}",)) for index in range(count))
    return BundleGroup(name, policy, bundles)  # type: ignore[arg-type]


def nodes(*cpus: float, gpus: float = 0) -> list[Node]:
    return [Node(f"n{index}", amount, gpus, 64) for index, amount in enumerate(cpus)]


def test_an_engine_is_a_bundle_and_so_is_a_tensor_parallel_group_of_neighbouring_ranks() -> None:
    config = demo(
        f"{BACKEND}.tensor_parallel=2",
        f"{BACKEND}.data_parallel=2",
        "makers.rollout.replicas=2",
        "makers.rollout.resources.cpus=3",
    )
    assert [unit.actors for unit in units(config, "policy")] == [
        ("trainer/policy/rank/0", "trainer/policy/rank/1"),
        ("trainer/policy/rank/2", "trainer/policy/rank/3"),
    ]
    assert [unit.resources.cpus for unit in units(config, "policy")] == [2, 2]
    assert [(unit.actors, unit.resources.cpus) for unit in units(config, "rollout")] == [
        (("maker/rollout/0",), 3),
        (("maker/rollout/1",), 3),
    ]


def test_each_group_is_reserved_by_its_own_policy_and_one_that_asks_for_nothing_is_not() -> None:
    config = demo("placement.groups={rollout: spread}", "makers.reward.resources.cpus=0")
    assert {name: group.policy for name, group in named(config).items()} == {"policy": "pack", "rollout": "spread"}


def test_colocated_groups_lie_in_bundles_of_the_larger_unit_and_count_their_devices_once() -> None:
    config = demo(
        f"{BACKEND}.tensor_parallel=2",
        f"{BACKEND}.data_parallel=2",
        "trainers.policy.resources.gpus=1",
        "makers.rollout={kind: rollout, replicas: 4, resources: {cpus: 2, gpus: 1}}",
        "placement.colocate=[[rollout, policy]]",
    )
    (bundles,) = [group.bundles for group in bundle_groups(config) if group.name == "rollout+policy"]
    assert [bundle.actors for bundle in bundles] == [
        ("maker/rollout/0", "maker/rollout/1", "trainer/policy/rank/0", "trainer/policy/rank/1"),
        ("maker/rollout/2", "maker/rollout/3", "trainer/policy/rank/2", "trainer/policy/rank/3"),
    ]
    assert [bundle.resources for bundle in bundles] == [Resources(cpus=4, gpus=2)] * 2
    assert sharers(config) == {f"maker/rollout/{index}" for index in range(4)}


def test_colocated_makers_share_out_the_devices_of_the_ranks_in_their_bundle() -> None:
    ranks = tuple(f"trainer/policy/rank/{index}" for index in range(4))
    devices = dict(zip(ranks, ("4", "5", "6", "7"), strict=True))
    bundle = Bundle(Resources(gpus=4), ("maker/rollout/2", "maker/rollout/3", *ranks, "maker/other/0"))
    assert shared_devices(bundle, "maker/rollout/2", devices) == "4,5"
    assert shared_devices(bundle, "maker/rollout/3", devices) == "6,7"
    assert shared_devices(bundle, "maker/other/0", devices) == "4,5,6,7"


def test_without_gpus_colocated_makers_are_given_none() -> None:
    bundle = Bundle(Resources(), ("maker/rollout/0", "trainer/policy/rank/0"))
    assert shared_devices(bundle, "maker/rollout/0", {"trainer/policy/rank/0": ""}) == ""


@pytest.mark.parametrize(
    ("policy", "cpus", "where"),
    [
        ("pack", (2, 4, 2), (1, 1, 1)),
        ("pack", (2, 2, 0), (0, 0, 1)),
        ("spread", (2, 4, 2), (0, 1, 2)),
        ("spread", (2, 2), (0, 1, 0)),
        ("strict_pack", (2, 4, 2), (1, 1, 1)),
        ("strict_spread", (1, 1, 1), (0, 1, 2)),
    ],
)
def test_a_policy_says_which_nodes_three_bundles_are_on(
    policy: str, cpus: tuple[float, ...], where: tuple[int, ...]
) -> None:
    assert fit([group("a", policy, 3)], nodes(*cpus)) == ({"a": where}, [])


def test_groups_take_room_from_each_other_and_the_one_without_any_is_told_what_is_left() -> None:
    layout, problems = fit([group("a", "pack", 1, cpus=3), group("b", "pack", 1, cpus=2)], nodes(4, 1))
    assert layout == {"a": (0,)}
    assert problems == [
        "placement: b needs 1 x 2 CPUs (pack), which finds no room beside the others; left: n0 1 CPU, 0 GPUs; n1 1 CPU, 0 GPUs"
    ]


def test_what_fits_no_idle_node_is_told_with_the_largest() -> None:
    _, problems = fit([group("a", "pack", 1, cpus=3, gpus=2)], [Node("x", 2, 8, 64), Node("y", 8, 1, 64)])
    assert problems == [
        "resources: maker/a/0 needs 3 CPUs, 2 GPUs, the largest node has 8 CPUs, 8 GPUs, but no node has all of it: "
        "lower its resources or use a larger node"
    ]
