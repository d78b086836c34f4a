"""A buffer that is killed, and columns whose owner or node is gone, on real Ray: shells of actors, makers of this file.

The scenarios run in a process of their own, which has joined a simulated cluster of two nodes. The trainer is the real one,
with a rank that only counts.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from buffer.columns import Columns, nbytes
from buffer.records import ColumnsLost, InfraFailure, Lease, MakerInfo, Produced, Prompt, SampledRow
from tests.fakes_trainer import FakeRank, FakeRecorder
from tests.rollouts import rollout_columns
from tests.simulated_cluster import SimulatedCluster, simulated_cluster
from topology.actors import BufferActor, Identity, MakerActor
from topology.config import RunConfig, parse_config
from topology.handles import Peer, RayMaker, RayRows
from topology.names import namespace_of
from topology.roles import POLICY
from topology.runs import RunFolder
from trainers.checkpoints import Checkpointer
from trainers.metrics import MetricsBuilder
from trainers.planner import StepPlanner
from trainers.ports import Deadlines, Schedule
from trainers.rank_group import LocalWorker, RankGroup
from trainers.trainer import Trainer

pytestmark = pytest.mark.timeout(300)  # mostly imports, on a busy machine
REPOSITORY = Path(__file__).resolve().parents[2]
HEAD, FAR = "127.0.2.1", "127.0.2.2"
NODES = {HEAD: {"num_cpus": 2, "resources": {"head": 1}}, FAR: {"num_cpus": 2, "resources": {"far": 1}}}
SAMPLES, GROUPS, STEPS = 2, 4, 6
TOKENS = 60_000  # of a row: its columns are too large to travel with a reference
SECONDS = 60.0  # for any one answer


# --- makers -----------------------------------------------------------------------------------------------------------


class Rollouts:
    stage, needs, slots = "rollout", (), 4

    async def start(self) -> None: ...

    async def make(self, lease: Lease, inputs: Mapping[str, Columns]) -> tuple[Produced, Columns]:
        await asyncio.sleep(0.02)
        lengths, version = [TOKENS // SAMPLES] * SAMPLES, lease.min_version
        columns = rollout_columns(np.random.default_rng(lease.seed), 5, lengths, version=version)
        return Produced(SAMPLES, TOKENS, nbytes(columns), version, version), columns

    def status(self) -> dict[str, Any]:
        return {}

    async def close(self) -> None: ...


class Rewards(Rollouts):
    stage, needs = "reward", ("rollout",)

    async def make(self, lease: Lease, inputs: Mapping[str, Columns]) -> tuple[Produced, Columns]:
        assert inputs["rollout"]["response_ids"].size == TOKENS
        columns = {"rewards": np.arange(SAMPLES, dtype=np.float32)}
        return Produced(SAMPLES, 0, nbytes(columns)), columns


class LosesItsOwn(Rewards):
    """What is lost is not an input: the maker's own affair."""

    async def make(self, lease: Lease, inputs: Mapping[str, Columns]) -> tuple[Produced, Columns]:
        raise ray.exceptions.ObjectLostError("ab" * 28, None, "")


# --- the cluster, and the process that plays the scenarios ------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[SimulatedCluster]:
    with simulated_cluster(NODES) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def play(cluster: SimulatedCluster) -> Iterator[Callable[..., Any]]:
    """play(scenario, ...) runs `async scenario(...)` in a driver of the cluster, which is on the head."""
    driver = ProcessPoolExecutor(1, get_context("spawn"), initializer=_join, initargs=(cluster.address,))
    with driver:
        yield lambda scenario, *args: driver.submit(_play, scenario, *args).result(150.0)
        driver.submit(ray.shutdown).result(30.0)


def _join(address: str) -> None:
    ray.init(
        address=address, _node_ip_address=HEAD, log_to_driver=False, logging_level="ERROR", configure_logging=False
    )


def _play(scenario: Callable[..., Any], *args: Any) -> Any:
    return asyncio.run(scenario(*args))


@dataclass
class Scene:
    """The actors of one small run without a supervisor: the scenario makes them, and makes them anew."""

    folder: Path
    config: RunConfig
    actors: dict[str, Any] = field(default_factory=dict)
    infos: list[MakerInfo] = field(default_factory=list)

    @property
    def namespace(self) -> str:
        return namespace_of(self.config.name)

    @property
    def buffer(self) -> Any:
        return self.actors["buffer"]

    async def create(self, actor: type, name: str, node: str = "head") -> Any:
        identity = Identity(self.config.name, name, str(self.folder), (str(REPOSITORY),), 1, self.config, "")
        options = {"name": name, "namespace": self.namespace, "num_cpus": 0, "max_concurrency": 100}
        async with asyncio.timeout(SECONDS):
            while True:
                try:
                    made = ray.remote(actor).options(**options, resources={node: 0.001}).remote(identity)
                    break
                except ValueError:  # the name of a dead actor is free a moment after its death
                    await asyncio.sleep(0.05)
        self.actors[name] = made
        return made

    async def attach(self, name: str, node: str = "head") -> None:
        info = await (await self.create(MakerActor, name, node)).start.remote()
        self.infos.append(info)
        await self.buffer.attach.remote(info)

    async def kill(self, name: str) -> None:
        os.kill((await self.actors[name].ping.remote())["pid"], signal.SIGKILL)

    async def make_buffer_anew(self) -> None:
        ray.kill(self.buffer)  # it is dead; this frees its name
        buffer = await self.create(BufferActor, "buffer")
        await buffer.start.remote(0, None, True)
        for info in self.infos:
            await buffer.attach.remote(info)


@asynccontextmanager
async def scene(folder: Path, name: str, rewards: type = Rewards) -> AsyncIterator[Scene]:
    """With a buffer and no maker; all actors are ended by id afterwards."""
    RunFolder(folder).create()
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i}"}) + "\n" for i in range(100)))
    config = parse_config(
        {
            "name": name,
            "model": {"path": "tiny-llama"},
            "prompts": {"type": "file", "path": str(prompts), "shuffle": False},
            "makers": {
                "rollout": {"kind": f"{__name__}:Rollouts"},
                "reward": {"kind": f"{__name__}:{rewards.__name__}"},
                "size": {"kind": "rollout", "sampling": {"n": SAMPLES}},  # never started: says how large a group is
            },
            "trainers": {
                "policy": {
                    "algorithm": {"type": "grpo"},
                    "backend": {"type": "torch"},
                    "groups_per_step": GROUPS,
                    "steps": STEPS,
                }
            },
            "buffer": {"max_staleness": 1},
        }
    )
    play = Scene(folder, config)
    try:
        await (await play.create(BufferActor, "buffer")).start.remote(0, None)
        yield play
    finally:
        for actor in play.actors.values():
            ray.kill(actor)


async def gone(reference: Any) -> None:
    """Until Ray knows that the object is lost."""
    async with asyncio.timeout(SECONDS):
        while True:
            try:
                await reference
            except ray.exceptions.ObjectLostError:
                return
            await asyncio.sleep(0.1)


# --- a buffer that is killed ------------------------------------------------------------------------------------------


@dataclass
class KillingRows(RayRows):
    """Kills the buffer at a few moments, and lets it be made anew while the trainer waits for its next answer."""

    run: Scene

    def __post_init__(self) -> None:
        super().__init__(Peer("buffer", self.run.namespace), SECONDS)
        self.samples = 0
        self.trained_rows: dict[int, list[int]] = {}
        self._anew: asyncio.Task[None] | None = None

    async def _kill(self) -> None:
        await self.run.kill("buffer")
        self._anew = asyncio.create_task(self.run.make_buffer_anew())

    async def sample(self, groups: int, timeout: float) -> list[SampledRow]:
        self.samples += 1
        if self.samples == 2:  # while the trainer waits
            waiting = asyncio.create_task(super().sample(groups, timeout))
            await self._kill()
            return await waiting
        rows = await super().sample(groups, timeout)
        if self.samples == 3:  # before the trainer has fetched its rows
            await self._kill()
            await gone(rows[0].columns["rollout"])
        return rows

    async def trained(self, row_ids: Sequence[int], step: int) -> None:
        self.trained_rows[step] = list(row_ids)
        if step == 4:  # the trainer alone knows of its step
            await self._kill()
        await super().trained(row_ids, step)
        if step == 5:  # the answer is lost
            await self._kill()
            await super().trained(row_ids, step)


class Weights:
    async def publish(self, version: int) -> None: ...


async def kill_the_buffer(folder: Path) -> dict[str, Any]:
    async with scene(folder, "killed") as run:
        for name in ("maker/rollout/0", "maker/rollout/1", "maker/reward/0"):
            await run.attach(name)
        rows, recorder = KillingRows(run), FakeRecorder()
        settings = run.config.trainers[POLICY]

        async def no_makers() -> dict[str, Any]:
            return {}

        trainer = Trainer(
            settings,
            planner=StepPlanner(settings, TOKENS),
            ranks=RankGroup([LocalWorker(FakeRank([]))], timeout=SECONDS),
            rows=rows,
            weights=Weights(),
            makers=no_makers,
            recorder=recorder,
            metrics=MetricsBuilder(),
            checkpointer=Checkpointer(folder / "checkpoints", keep=1),
            schedule=Schedule(1, None, checkpoint_at_end=False),
            deadlines=Deadlines(batch=SECONDS, step=SECONDS),
            max_age=1,
        )
        outcome = await trainer.run()
        return {
            "outcome": outcome,
            "steps": [row["step"] for row in recorder.objects],
            "oldest": max(row["staleness/max"] for row in recorder.objects),
            "lost": recorder.of_kind("columns_lost"),
            "trained": rows.trained_rows,
            "status": await run.buffer.status.remote(),
        }


@pytest.fixture(scope="module")
def killed(play: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return play(kill_the_buffer, tmp_path_factory.mktemp("runs") / "killed")


def test_a_run_whose_buffer_is_killed_again_and_again_reaches_its_last_step(killed: dict[str, Any]) -> None:
    assert killed["outcome"] == "done"
    assert killed["steps"] == list(range(1, STEPS + 1))
    assert killed["oldest"] <= 1


def test_rows_that_the_trainer_could_not_fetch_are_asked_for_again(killed: dict[str, Any]) -> None:
    assert [event["step"] for event in killed["lost"]] == [3]


def test_no_row_is_trained_twice_over_the_deaths_of_the_buffer_and_none_is_left_out(killed: dict[str, Any]) -> None:
    trained = [row for rows in killed["trained"].values() for row in rows]
    assert trained == list(range(STEPS * GROUPS))


def test_the_ledger_closes_over_the_deaths_of_the_buffer(killed: dict[str, Any]) -> None:
    ledger, failures = killed["status"]["ledger"], killed["status"]["failures"]
    assert ledger["rows"] == {"admitted": STEPS * GROUPS, "trained": STEPS * GROUPS, "dropped": {}, "in_flight": 0}
    tokens = ledger["tokens"]
    assert tokens["trained"] == STEPS * GROUPS * TOKENS
    assert tokens["admitted"] == tokens["trained"] + tokens["dropped"]["lost"] + tokens["in_flight"]
    assert tokens["in_flight"] == 0
    assert failures["infra"] >= GROUPS


# --- columns that are lost --------------------------------------------------------------------------------------------


@ray.remote(num_cpus=0)
class Owner:
    def put(self) -> list[Any]:
        return [ray.put({"response_ids": np.zeros(TOKENS, np.int32)})]


async def make_from_lost_columns(folder: Path) -> list[str]:
    async with scene(folder, "lost", LosesItsOwn) as run:
        maker = await run.create(MakerActor, "maker/reward/0")
        handle = RayMaker(await maker.start.remote(), maker)
        owner = Owner.remote()
        [lost], [there] = await owner.put.remote(), [ray.put({"response_ids": np.zeros(TOKENS, np.int32)})]
        ray.kill(owner)
        await gone(lost)
        lease = Lease(1, 7, "reward", "maker/reward/0", Prompt("p7", "?"), 0, 1, SAMPLES, SECONDS)
        seen = []
        for columns in (lost, there):
            try:
                await asyncio.wait_for(handle.make(lease, [columns]), SECONDS)
            except ColumnsLost as error:
                seen.append(f"lost {error.stages}: {error}")
            except InfraFailure as error:
                seen.append(f"failed: {str(error).splitlines()[0]}")
        return seen


def test_a_lost_input_is_told_apart_from_what_a_maker_has_lost_itself(play: Callable[..., Any], tmp_path: Path) -> None:
    lost, failed = play(make_from_lost_columns, tmp_path / "lost")
    assert lost.startswith("lost ('rollout',): OwnerDiedError")
    assert failed.startswith("failed: maker/reward/0: ObjectLostError")


async def kill_a_node(folder: Path, raylet: int) -> dict[str, Any]:
    async with scene(folder, "node") as run:
        await run.buffer.published.remote(0, 0)
        await run.attach("maker/rollout/0", "far")

        async def rollouts_made() -> bool:
            return (await run.buffer.status.remote())["makers"]["maker/rollout/0"]["committed"] == 2 * GROUPS

        async with asyncio.timeout(SECONDS):
            while not await rollouts_made():  # noqa: ASYNC110  (what it waits for is in another process)
                await asyncio.sleep(0.05)
        os.kill(raylet, signal.SIGKILL)
        await run.buffer.maker_died.remote("maker/rollout/0", "its node is gone")
        for name in ("maker/rollout/1", "maker/reward/0"):
            await run.attach(name)
        rows = await run.buffer.sample.remote(GROUPS, SECONDS)
        sizes = [(await row.columns["rollout"])["response_ids"].size for row in rows]
        await run.buffer.trained.remote([row.row_id for row in rows], 1)
        status = await run.buffer.status.remote()
        return {
            "rows": [(row.row_id, row.makers["rollout"]) for row in rows],
            "sizes": sizes,
            "failures": status["failures"],
            "tokens": status["ledger"]["tokens"],
        }


def test_rows_whose_columns_lay_on_a_lost_node_are_made_again_and_trained_once(
    play: Callable[..., Any], cluster: SimulatedCluster, tmp_path: Path
) -> None:
    raylet = cluster.raylet(FAR)
    threading.Thread(target=os.waitpid, args=(raylet, 0), daemon=True).start()  # its workers end once it is reaped
    seen = play(kill_a_node, tmp_path / "node", raylet)
    assert seen["rows"] == [(row, "maker/rollout/1") for row in range(GROUPS)]
    assert seen["sizes"] == [TOKENS] * GROUPS
    assert seen["failures"] == {"infra": 2 * GROUPS, "data": 0, "timeout": 0, "died": 0}
    assert seen["tokens"]["trained"] == GROUPS * TOKENS
    assert seen["tokens"]["dropped"] == {"lost": 2 * GROUPS * TOKENS}
