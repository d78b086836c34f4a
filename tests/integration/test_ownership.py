"""Who owns a row, on real Ray: the actors of a run, with makers of this file in place of engines.

The scenarios run in a process of their own, which has joined a cluster of its own; what they saw comes back as plain values.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray

from buffer.columns import Columns, nbytes
from buffer.records import InfraFailure, Lease, MakerInfo, Produced, Prompt
from tests.rollouts import rollout_columns
from topology.actors import BufferActor, Identity, MakerActor, WeightsActor
from topology.config import parse_config
from topology.handles import RayMaker
from topology.keeper import cluster_environment, start_keeper
from topology.names import namespace_of
from topology.runs import RunFolder, wait_for_file

pytestmark = pytest.mark.timeout(240)  # mostly imports, on a busy machine
REPOSITORY = Path(__file__).resolve().parents[2]
MIB = 1 << 20
BIG = 3 << 20  # tokens of a big row: 36 MiB of columns
SAMPLES, ROWS = 2, 4
SECONDS = 30.0  # for any one answer


# --- makers -----------------------------------------------------------------------------------------------------------


def columns_of(row_id: int, tokens: int) -> Columns:
    """The same in every process."""
    return rollout_columns(np.random.default_rng(row_id), 5, [tokens // SAMPLES] * SAMPLES)


@dataclass
class Fixed:
    """Makes rows of `tokens` tokens. Its status has an object that it owns itself, for comparison."""

    tokens: int
    stage = "rollout"
    needs = ()
    slots = 2

    async def start(self) -> None:
        self._own = ray.put(np.zeros(MIB, np.uint8))

    async def make(self, lease: Lease, inputs: Mapping[str, Columns]) -> tuple[Produced, Columns]:
        columns = columns_of(lease.row_id, self.tokens)
        return Produced(SAMPLES, self.tokens, nbytes(columns), 0, 0), columns

    def status(self) -> dict[str, Any]:
        return {"own": [self._own]}

    async def close(self) -> None: ...


class HangsAtFirst(Fixed):
    """The first maker of the group never answers."""

    async def make(self, lease: Lease, inputs: Mapping[str, Columns]) -> tuple[Produced, Columns]:
        if lease.maker.endswith("/0"):
            await asyncio.Event().wait()
        return await super().make(lease, inputs)


class Wrong(Fixed):
    """A different mistake in each row; one row at a time, so that it is known whose comes first."""

    slots = 1

    async def make(self, lease: Lease, inputs: Mapping[str, Columns]) -> tuple[Produced, Columns]:
        produced, columns = await super().make(lease, inputs)
        if lease.row_id == 0:
            columns["behaviour_logprobs"][6] = 0.5
        elif lease.row_id == 1:
            columns["response_offsets"] = columns["response_offsets"][:-1]
        elif lease.row_id == 2:
            produced = Produced(SAMPLES, self.tokens, nbytes(columns), 1, 1)
        return produced, columns


# --- the cluster, and the process that plays the scenarios ------------------------------------------------------------


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """play(scenario, ...) runs `async scenario(folder, ...)` in a driver of the cluster."""
    folder = RunFolder(tmp_path_factory.mktemp("runs") / "own")
    folder.create()
    folder.write_token()
    keeper = start_keeper(folder, cpus=2, gpus=0, object_store_bytes=512 * MIB)
    try:
        cluster = wait_for_file(folder.cluster_file, 60.0, lambda: keeper.poll() is None, "the cluster")
        with pytest.MonkeyPatch.context() as patch:  # the driver is born with what a cluster's processes need
            for name, value in cluster_environment(folder).items():
                patch.setenv(name, value)
            driver = ProcessPoolExecutor(1, get_context("spawn"), initializer=_join, initargs=(cluster["address"],))
            driver.submit(os.getpid).result(60.0)
        with driver:
            yield lambda scenario, *args: driver.submit(_play, scenario, folder.path, *args).result(90.0)
            driver.submit(ray.shutdown).result(30.0)
    finally:
        below = psutil.Process(keeper.pid).children(recursive=True)
        keeper.terminate()
        keeper.wait(30.0)
        left = [process for process in below if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
        for process in left:
            process.kill()
    assert left == []


def _join(address: str) -> None:
    ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=False)


def _play(scenario: Callable[..., Any], *args: Any) -> Any:
    return asyncio.run(scenario(*args))


@dataclass
class Cast:
    """The actors of one small run. Nobody trains: the scenario is the trainer."""

    buffer: Any
    makers: list[Any]
    infos: list[MakerInfo]

    async def attach(self, index: int) -> None:
        await self.buffer.attach.remote(self.infos[index])

    async def process_of(self, actor: Any) -> psutil.Process:
        return psutil.Process((await actor.ping.remote())["pid"])


@asynccontextmanager
async def cast(folder: Path, name: str, kind: type, *, makers: int = 1, tokens: int = 64, **buffer: Any):
    """Started, version 0 published to the buffer, no maker attached yet; all ended by id afterwards."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i}"}) + "\n" for i in range(ROWS)))
    config = parse_config(
        {
            "name": name,
            "model": {"path": "tiny-llama"},
            "prompts": {"type": "file", "path": str(prompts), "shuffle": False},
            "makers": {
                "rollout": {"kind": f"{__name__}:{kind.__name__}", "options": {"tokens": tokens}},
                "size": {"kind": "rollout", "sampling": {"n": SAMPLES}},  # never started: says how large a group is
            },
            "trainers": {
                "policy": {
                    "algorithm": {"type": "grpo"},
                    "backend": {"type": "torch"},
                    "groups_per_step": ROWS,
                    "steps": 1,
                }
            },
            "buffer": {"max_staleness": 0, **buffer},
        }
    )

    def create(actor: type, label: str) -> Any:
        identity = Identity(name, label, str(folder), (str(REPOSITORY),), 1, config, "")
        options = {"name": label, "namespace": namespace_of(name), "num_cpus": 0, "max_concurrency": 100}
        return ray.remote(actor).options(**options).remote(identity)

    store, table = create(WeightsActor, "weights"), create(BufferActor, "buffer")
    actors = [create(MakerActor, f"maker/rollout/{index}") for index in range(makers)]
    try:
        await asyncio.gather(table.start.remote(0, None), store.ping.remote())
        infos = await asyncio.gather(*(actor.start.remote() for actor in actors))
        await table.published.remote(0, 0)
        yield Cast(table, actors, infos)
    finally:
        for actor in (*actors, table, store):
            ray.kill(actor)


async def wait_until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(SECONDS):
        while not await condition():  # noqa: ASYNC110  (what it waits for is in another process)
            await asyncio.sleep(0.02)


async def error_of(reference: Any) -> str | None:
    """The name of the error that fetching gives, None if there is none."""
    try:
        await asyncio.wait_for(reference, SECONDS)
    except ray.exceptions.RayError as error:
        return type(error).__name__
    return None


# --- scenarios and tests ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def committed(play: Callable[..., Any]) -> dict[str, Any]:
    return play(commit_then_kill_the_maker)


async def commit_then_kill_the_maker(folder: Path) -> dict[str, Any]:
    async with cast(folder, "commit", Fixed, tokens=BIG) as run:
        buffer, maker, me = await run.process_of(run.buffer), await run.process_of(run.makers[0]), psutil.Process()
        before = buffer.memory_info().rss
        await run.attach(0)
        rows = await run.buffer.sample.remote(ROWS, SECONDS)
        grown = buffer.memory_info().rss - before
        referred = (await run.buffer.status.remote())["bytes"]

        (makers_own,) = (await run.makers[0].status.remote())["own"]
        assert await error_of(makers_own) is None
        maker.send_signal(signal.SIGKILL)
        await wait_until(lambda: error_of(makers_own))  # the kill is through: what the maker owned is gone

        before = me.memory_info().rss
        fetched = {row.row_id: await asyncio.wait_for(row.columns["rollout"], SECONDS) for row in rows}
        equal = {row: _equal(found, columns_of(row, BIG)) for row, found in fetched.items()}
        return {
            "makers_own": await error_of(makers_own),
            "equal": equal,
            "referred": referred,
            "grown": grown,
            "grown_here": me.memory_info().rss - before,
        }


def _equal(found: Columns, expected: Columns) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == values.dtype and np.array_equal(found[name], values) for name, values in expected.items()
    )


def test_committed_rows_survive_the_sigkill_of_their_maker(committed: dict[str, Any]) -> None:
    assert committed["makers_own"] == "OwnerDiedError"  # what the maker owned itself did not
    assert committed["equal"] == dict.fromkeys(range(ROWS), True)


def test_the_buffers_process_never_holds_the_tokens_it_refers_to(committed: dict[str, Any]) -> None:
    assert committed["referred"] > ROWS * BIG * 12  # ids, log-probs and versions, and a little more
    assert committed["grown"] < 0.1 * committed["referred"]
    assert committed["grown_here"] > 0.9 * committed["referred"]  # a process that fetches them does grow


async def kill_a_maker_that_hangs(folder: Path) -> dict[str, Any]:
    async with cast(folder, "death", HangsAtFirst, makers=2) as run:
        await run.attach(0)
        direct = asyncio.create_task(RayMaker(run.infos[0], run.makers[0]).make(_lease(run.infos[0].name, 0), []))

        async def in_flight() -> bool:
            return (await run.buffer.status.remote())["makers"]["maker/rollout/0"]["in_flight"] == 2

        await wait_until(in_flight)
        await run.attach(1)
        maker = await run.process_of(run.makers[0])
        killed = time.monotonic()
        maker.send_signal(signal.SIGKILL)
        try:
            await asyncio.wait_for(direct, SECONDS)
        except InfraFailure as error:
            text, seconds = str(error), time.monotonic() - killed
        rows = await run.buffer.sample.remote(ROWS, SECONDS)
        all_made = time.monotonic() - killed
        status = await run.buffer.status.remote()
        await run.buffer.maker_died.remote("maker/rollout/0", "told by the supervisor")
        return {
            "text": text,
            "seconds": seconds,
            "all_made": all_made,
            "rows": [row.row_id for row in rows],
            "equal": all([_equal(await row.columns["rollout"], columns_of(row.row_id, 64)) for row in rows]),
            "failures": status["failures"],
            "committed": {name: maker["committed"] for name, maker in status["makers"].items()},
            "left": list((await run.buffer.status.remote())["makers"]),
        }


def test_the_calls_of_a_killed_maker_end_within_a_second_and_its_rows_go_to_another_maker(
    play: Callable[..., Any],
) -> None:
    seen = play(kill_a_maker_that_hangs)
    assert seen["text"] == "maker/rollout/0: its process died without a word (killed, or out of memory)"
    assert seen["seconds"] < 1.0
    assert seen["all_made"] < 2.0
    assert seen["rows"] == list(range(ROWS))
    assert seen["equal"]
    assert seen["failures"] == {"infra": 2, "data": 0, "timeout": 0, "died": 0}
    assert seen["committed"] == {"maker/rollout/0": 0, "maker/rollout/1": ROWS}
    assert seen["left"] == ["maker/rollout/1"]


async def answer_wrongly(folder: Path) -> dict[str, Any]:
    async with cast(folder, "wrong", Wrong, max_attempts=1) as run:
        maker = RayMaker(run.infos[0], run.makers[0])
        leases = [_lease(maker.info.name, row) for row in range(ROWS)]
        answers = await asyncio.gather(*(maker.make(lease, []) for lease in leases), return_exceptions=True)
        await run.attach(0)
        cause = await asyncio.wait_for(run.buffer.fatal.remote(), SECONDS)
        status = await run.buffer.status.remote()
        refused = [f"{type(answer).__name__}: {answer}" for answer in answers[:3]]
        return {"refused": refused, "good": answers[3][0].tokens, "cause": cause, "bytes": status["bytes"]}


def _lease(maker: str, row_id: int) -> Lease:
    return Lease(1000 + row_id, row_id, "rollout", maker, Prompt(f"p{row_id}", "?"), 0, 1, SAMPLES, SECONDS)


def test_columns_that_do_not_fit_their_lease_are_refused_at_the_maker_with_the_row(play: Callable[..., Any]) -> None:
    seen = play(answer_wrongly)
    by_row = [f"InfraFailure: maker/rollout/0: row {row} (prompt 'p{row}'), rollout: " for row in range(3)]
    assert seen["refused"][0].startswith(by_row[0] + "behaviour_logprobs of sample 0, token 6, is 0.5: ")
    assert seen["refused"][1] == by_row[1] + "response_offsets has 2 entries, not 3 (one for each sample boundary)"
    beside = "the answer beside the columns says min_version 1, not 0; max_version 1, not 0"
    assert seen["refused"][2] == by_row[2] + beside
    assert seen["good"] == 64
    assert "row 0 (prompt 'prompts/0'): rollout failed 1 times" in seen["cause"]
    assert "row 0 (prompt 'prompts/0'), rollout: behaviour_logprobs of sample 0, token 6, is 0.5: " in seen["cause"]
