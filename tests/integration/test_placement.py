"""Placement on a simulated cluster of three nodes: real placement groups, real shells of actors, faked GPUs.

The scenarios run in a process of their own, which has joined the cluster; what they saw comes back as plain values.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group_table

from buffer.config import Resources
from tests.simulated_cluster import simulated_cluster
from topology.actors import Identity, MakerActor, RankActor, Shell
from topology.bundles import Bundle, BundleGroup, bundle_groups, fit, shared_devices, sharers
from topology.config import RunConfig, load_config
from topology.names import namespace_of
from topology.placement import CannotPlace, Placement, cluster_nodes, release

pytestmark = pytest.mark.timeout(300)  # mostly the start of processes, on a busy machine
CONFIG = str(Path(__file__).resolve().parents[2] / "configs/tiny.yaml")
HEAD, SMALL, LARGE = "127.0.1.1", "127.0.1.9", "127.0.1.10"  # not in the order of their text
NODES = {
    HEAD: {"num_cpus": 4, "num_gpus": 0},
    SMALL: {"num_cpus": 4, "num_gpus": 3},
    LARGE: {"num_cpus": 8, "num_gpus": 4},
}
PATIENCE = 15.0  # seconds in which the impossible has to be told


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with simulated_cluster(NODES) as cluster:
        yield cluster.address


@pytest.fixture(scope="module")
def play(address: str) -> Iterator[Callable[..., Any]]:
    """play(scenario, ...) runs `async scenario(...)` in a driver of the cluster."""
    driver = ProcessPoolExecutor(1, get_context("spawn"), initializer=_join, initargs=(address,))
    with driver:
        yield lambda scenario, *args: driver.submit(_play, scenario, *args).result(120.0)
        driver.submit(ray.shutdown).result(30.0)


def _join(address: str) -> None:
    ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=False)


def _play(scenario: Callable[..., Any], *args: Any) -> Any:
    return asyncio.run(scenario(*args))


def config_of(name: str, *overrides: str) -> RunConfig:
    return load_config(CONFIG, overrides, name)


@asynccontextmanager
async def placed(config: RunConfig, folder: str) -> Any:
    """Every maker and rank of a config as an actor that has loaded nothing yet: {name: handle}."""
    groups, namespace = bundle_groups(config), namespace_of(config.name)
    placement, sharing = Placement(groups, namespace), sharers(config)
    handles: dict[str, Any] = {}
    try:
        await placement.reserve(lambda *waits: None)
        for bundle in (bundle for group in groups for bundle in group.bundles):
            for name in bundle.actors:
                gpus = 0.0 if name in sharing else _resources(config, name).gpus
                kind: type[Shell] = RankActor if "/rank/" in name else MakerActor
                identity = Identity(config.name, name, folder, (), 1, config, "", gpus)
                options = {"name": name, "namespace": namespace, "num_cpus": 0, "num_gpus": gpus}
                strategy = placement.strategy(name)
                handles[name] = ray.remote(kind).options(**options, scheduling_strategy=strategy).remote(identity)
        yield handles
    finally:
        for handle in handles.values():
            ray.kill(handle)
        release(namespace)


def _resources(config: RunConfig, name: str) -> Resources:
    _, group, *_ = name.split("/")
    return (config.makers.get(group) or config.trainers[group]).resources


async def places(handles: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """{actor: (address of its node, the GPUs it sees)}."""
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    answers = await asyncio.gather(*(handle.ping.remote() for handle in handles.values()))
    return {name: (addresses[answer["node"]], answer["devices"]) for name, answer in zip(handles, answers, strict=True)}


# --- scenarios --------------------------------------------------------------------------------------------------------


async def two_tensor_parallel_pairs(folder: str) -> tuple[Any, ...]:
    config = config_of(
        "pairs",
        "makers.rollout.replicas=2",
        "makers.rollout.resources.gpus=1",
        "placement.groups={policy: spread, rollout: strict_spread}",
        "trainers.policy.backend.tensor_parallel=2",
        "trainers.policy.backend.data_parallel=2",
        "trainers.policy.resources.gpus=1",
    )
    nodes = cluster_nodes()
    layout, _ = fit(bundle_groups(config), nodes)
    planned = {
        actor: nodes[place].name
        for group in bundle_groups(config)
        for place, bundle in zip(layout[group.name], group.bundles, strict=True)
        for actor in bundle.actors
    }
    async with placed(config, folder) as handles:
        meeting = await handles["trainer/policy/rank/0"].free_address.remote()
        return planned, await places(handles), meeting, taken(meeting)


def taken(address: str) -> bool:
    """Whether no other process can listen there."""
    host, port = address.split(":")
    with socket.socket() as another:
        try:
            another.bind((host, int(port)))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


async def in_turns(folder: str) -> tuple[Any, ...]:
    config = config_of(
        "turns",
        "makers.rollout={kind: rollout, replicas: 2, resources: {gpus: 2}, engine: {tensor_parallel: 2}}",
        "placement={colocate: [[rollout, policy]], groups: {policy: strict_pack}}",
        "trainers.policy.backend.tensor_parallel=4",
        "trainers.policy.resources.gpus=1",
    )
    groups = bundle_groups(config)
    (bundle,) = next(group.bundles for group in groups if group.name == "rollout+policy")
    async with placed(config, folder) as handles:
        before = await places(handles)
        devices = {name: before[name][1] for name in bundle.actors if "/rank/" in name}
        for name in sharers(config):
            await handles[name].use_devices.remote(shared_devices(bundle, name, devices))
        return before, await places(handles), ray.available_resources().get("GPU", 0.0)


async def parts_of_one_gpu(folder: str) -> Any:
    config = config_of("parts", "makers.rollout.replicas=2", "makers.rollout.resources.gpus=0.5")
    async with placed(config, folder) as handles:
        return await places(handles)


async def refused(groups: list[BundleGroup]) -> tuple[str, float]:
    begun = time.monotonic()
    try:
        await Placement(groups, "tandem/refused").reserve(lambda *waits: None)
    except CannotPlace as error:
        return str(error), time.monotonic() - begun
    finally:
        release("tandem/refused")
    raise AssertionError("placed")


async def waits_for_another() -> tuple[Any, ...]:
    told: asyncio.Queue[tuple[str, ...]] = asyncio.Queue()
    first = Placement([group("first", "strict_spread", 2, gpus=3)], "tandem/first")
    second = Placement([group("second", "pack", 1, gpus=2.5)], "tandem/second")
    try:
        await first.reserve(lambda *waits: None)
        waiting = asyncio.create_task(second.reserve(lambda *waits: told.put_nowait(waits)))
        wait = await asyncio.wait_for(told.get(), 30.0)
        came_too_early = waiting.done()
        release("tandem/first")
        await asyncio.wait_for(waiting, 30.0)
    finally:
        release("tandem/first")
        release("tandem/second")
    left = [row["name"] for row in placement_group_table().values() if row["state"] != "REMOVED"]
    return wait, told.qsize(), came_too_early, left


def group(name: str, policy: str, count: int, *, cpus: float = 1, gpus: float = 0) -> BundleGroup:
    bundles = tuple(Bundle(Resources(cpus=cpus, gpus=gpus), (f"maker/{name}/{index}",)) for index in range(count))
    return BundleGroup(name, policy, bundles)  # type: ignore[arg-type]


# --- tests ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pairs(play: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    return play(two_tensor_parallel_pairs, str(tmp_path_factory.mktemp("pairs")))


def test_tensor_parallel_neighbours_share_a_node_and_ranks_are_numbered_node_by_node(pairs: tuple[Any, ...]) -> None:
    _, seen, *_ = pairs
    assert [seen[f"trainer/policy/rank/{index}"][0] for index in range(4)] == [SMALL, SMALL, LARGE, LARGE]


def test_makers_that_are_to_be_apart_are_and_everything_is_where_the_plan_said(pairs: tuple[Any, ...]) -> None:
    planned, seen, *_ = pairs
    assert {name: node for name, (node, _) in seen.items() if "maker/reward" not in name} == {
        name: node for name, node in planned.items() if "maker/reward" not in name
    }
    assert len({seen[f"maker/rollout/{index}"][0] for index in range(2)}) == 2


def test_each_actor_sees_gpus_of_its_own_and_one_that_asked_for_none_sees_none(pairs: tuple[Any, ...]) -> None:
    _, seen, *_ = pairs
    asked = [(node, device) for name, (node, device) in seen.items() if not name.startswith("maker/reward")]
    assert all(device.isdigit() for _, device in asked)
    assert len(set(asked)) == len(asked) == 6
    assert seen["maker/reward/0"][1] == ""


def test_the_ranks_meet_on_the_node_of_the_first_at_a_port_that_it_holds_until_then(pairs: tuple[Any, ...]) -> None:
    _, seen, meeting, held = pairs
    host, port = meeting.split(":")
    assert host == seen["trainer/policy/rank/0"][0]
    assert 1024 < int(port) < 65536
    assert held


def test_colocated_engines_use_the_gpus_of_the_ranks_and_no_others(play: Callable[..., Any], tmp_path: Path) -> None:
    before, after, free = play(in_turns, str(tmp_path))
    makers, ranks = ("maker/rollout/0", "maker/rollout/1"), [f"trainer/policy/rank/{index}" for index in range(4)]
    assert {node for name, (node, _) in after.items() if not name.startswith("maker/reward")} == {LARGE}
    assert [before[name][1] for name in makers] == ["", ""]
    assert ",".join(after[name][1] for name in makers) == ",".join(after[name][1] for name in ranks)
    assert len({after[name][1] for name in ranks}) == 4
    assert free == 3, "what turns are taken on is asked for once"


def test_makers_with_half_a_gpu_each_see_the_same_one(play: Callable[..., Any], tmp_path: Path) -> None:
    seen = play(parts_of_one_gpu, str(tmp_path))
    assert seen["maker/rollout/0"] == seen["maker/rollout/1"]
    assert seen["maker/rollout/0"][1].isdigit()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (group("big", "pack", 1, gpus=5), "maker/big/0 needs 5 GPUs, the largest node has 4 GPUs"),
        (group("apart", "strict_spread", 4), "a node for each of 4 (strict_spread), the cluster has 3"),
        (group("together", "strict_pack", 3, gpus=2), "on one node (strict_pack), which needs 6 GPUs, the largest"),
    ],
)
def test_what_can_never_be_placed_is_told_in_seconds_with_what_the_nodes_have(
    play: Callable[..., Any], asked: BundleGroup, message: str
) -> None:
    text, seconds = play(refused, [asked])
    assert message in text
    assert f"{LARGE} has 8 CPUs, 4 GPUs" in text
    assert seconds < PATIENCE


def test_what_only_waits_for_others_to_finish_is_told_once_and_placed_then(play: Callable[..., Any]) -> None:
    (name, needs, free), more, came_too_early, left = play(waits_for_another)
    assert (name, needs) == ("second", "1 x 1 CPU, 2.5 GPUs (pack)")
    assert free.endswith(", 1 GPU"), "of all nodes together"
    assert (more, came_too_early) == (0, False)
    assert left == []
