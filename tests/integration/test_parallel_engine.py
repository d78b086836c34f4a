"""vLLM over several processes, against plain transformers and against one process. A tied model: its output layer shares
the embedding, which each process holds a part of."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from buffer.records import InfraFailure
from makers.engines.shared import SharedWeights
from makers.engines.vllm import InProcessVllm
from tests.integration import test_rollout_maker as single
from weights.manifest import CoverageError

pytestmark = pytest.mark.timeout(240)
FAMILY = "tiny-qwen3"
ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-4  # float32 on both sides


def make_engine(**parallel) -> InProcessVllm:
    engine = single.config().engine.model_copy(update=parallel)
    return InProcessVllm(engine, single.model_path(FAMILY), threads=1, seed=0, recompute=True)


@pytest.fixture(scope="module", params=["tensor_parallel", "pipeline_parallel"])
def engine(request):
    others = psutil.Process().children(recursive=True)  # of tests before
    engine = make_engine(**{request.param: 2})
    asyncio.run(engine.start())
    yield engine
    workers = [child for child in psutil.Process().children(recursive=True) if child not in others]
    asyncio.run(engine.close())
    _, alive = psutil.wait_procs([worker for worker in workers if not is_tracker(worker)], timeout=10)
    assert not alive


def is_tracker(process: psutil.Process) -> bool:
    """Python's own helper of spawned processes, which lives as long as their parent."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return "resource_tracker" in " ".join(process.cmdline())
    return False


async def load(engine) -> int:
    version = engine.version + 1
    await engine.load_weights(*single.packed(version, FAMILY), between_groups=False)
    return version


def assert_true(samples, versions) -> None:
    """Each token's log-prob is what plain transformers says under the version that the token carries."""
    for sample in samples:
        assert set(sample.versions) <= set(versions)
        for version in set(sample.versions):
            mine = sample.versions == version
            truth = single.true_logprobs(version, single.PROMPT, sample.token_ids, family=FAMILY)[mine]
            np.testing.assert_allclose(sample.logprobs[mine], truth, atol=TOLERANCE)


def test_every_version_in_turn_is_in_every_process(engine):
    async def scenario():
        for _ in range(2):
            version = await load(engine)
            samples = await engine.generate(single.request())
            assert all(set(sample.versions) == {version} for sample in samples)
            assert_true(samples, [version])

    asyncio.run(scenario())


def test_tokens_around_updates_in_flight_carry_their_version_and_its_own_logprobs(engine):
    """Several updates: some come while the stages of a pipeline are at work, some between two batches."""

    async def scenario():
        versions = [await load(engine)]
        generating = asyncio.ensure_future(engine.generate(single.request(seeds=range(8), max_tokens=400)))
        for _ in range(4):
            seconds = engine.status()["seconds_generating"]
            await single.until(lambda then=seconds: engine.status()["seconds_generating"] > then + 0.03)
            versions.append(await load(engine))
        return versions, await generating

    versions, samples = asyncio.run(scenario())
    assert any(len(set(sample.versions)) == len(versions) for sample in samples)
    assert_true(samples, versions)


def test_a_version_that_does_not_cover_the_model_is_refused_and_the_old_goes_on(engine):
    async def scenario():
        version = await load(engine)
        with pytest.raises(CoverageError, match="1 missing"):
            await engine.load_weights(*single.broken_version("missing", version + 1, FAMILY), between_groups=False)
        assert_true(await engine.generate(single.request()), [version])

    asyncio.run(scenario())


def test_a_load_that_breaks_in_the_processes_quarantines_until_a_whole_version_is_in(engine, monkeypatch):
    async def scenario():
        with monkeypatch.context() as patch:
            patch.setattr(SharedWeights, "__getstate__", lambda _: {"_path": "/nowhere"})
            with pytest.raises(InfraFailure, match=r"0: FileNotFoundError.*; 1: FileNotFoundError"):
                await load(engine)
        with pytest.raises(InfraFailure, match="quarantined"):
            await engine.generate(single.request())
        version = engine.version + 1
        await engine.load_weights(*single.packed(version, FAMILY), between_groups=False)
        assert_true(await engine.generate(single.request()), [version])

    asyncio.run(scenario())


def test_a_cancelled_group_leaves_the_engine_free(engine):
    async def scenario():
        version = await load(engine)
        long = asyncio.ensure_future(engine.generate(single.request(max_tokens=400)))
        await single.until(lambda: engine.status()["running"] == 1)
        long.cancel()
        await single.until(lambda: engine.status()["running"] == 0)
        assert_true(await engine.generate(single.request()), [version])

    asyncio.run(scenario())


def test_one_process_and_several_draw_the_same_samples(engine):
    async def scenario():
        version = await load(engine)
        many = await engine.generate(single.request())
        alone = make_engine()
        await alone.start()
        try:
            await alone.load_weights(*single.packed(version, FAMILY), between_groups=False)
            return many, await alone.generate(single.request())
        finally:
            await alone.close()

    for several, one in zip(*asyncio.run(scenario()), strict=True):
        assert np.array_equal(several.token_ids, one.token_ids)
        np.testing.assert_allclose(several.logprobs, one.logprobs, atol=TOLERANCE)


SCRIPT = """
import asyncio, sys, psutil
from tests.integration import test_parallel_engine as tests

async def main():
    engine = tests.make_engine(tensor_parallel=2)
    await engine.start()
    print(*[child.pid for child in psutil.Process().children(recursive=True)], flush=True)
    sys.stdin.readline()
    try:
        await engine.generate(tests.single.request())
    except tests.InfraFailure as failure:
        print("failure:", failure, flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_a_dead_process_breaks_the_engine_and_nothing_outlives_the_makers_process(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    maker = subprocess.Popen(
        [sys.executable, tmp_path / "script.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    children: list[psutil.Process] = []
    try:
        children = [psutil.Process(int(pid)) for pid in maker.stdout.readline().split()]
        workers = [child for child in children if not is_tracker(child)]
        assert len(workers) == 2
        workers[-1].send_signal(signal.SIGKILL)
        maker.stdin.write("go\n")
        maker.stdin.flush()
        assert any("failure: vLLM engine is broken" in line for line in maker.stdout)
    finally:
        maker.kill()
        maker.wait(10)
        _, left = psutil.wait_procs(children, timeout=20)
        for child in left:
            child.kill()
    assert left == []
