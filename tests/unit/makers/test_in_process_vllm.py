"""The thread around vLLM, with a core that only counts: no vLLM here."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
import torch

from buffer.records import InfraFailure
from makers.config import VllmEngine
from makers.engines.engine import GroupRequest, Sample
from makers.engines.vllm import InProcessVllm
from weights.packing import pack

pytestmark = pytest.mark.timeout(30)


class FakeCore:
    """A group ends after as many steps as it asks tokens for. `fail` makes the next step or load raise."""

    def __init__(self, config, model_path, **settings) -> None:
        self.expected = {"w": (2,)}
        self.version = settings["version"]
        self.quarantined = None
        self.fail: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.left: dict[int, int] = {}
        self.log: list[str] = []
        self.closed = False

    @property
    def running(self) -> int:
        return len(self.left)

    def add(self, group, request):
        if request.temperature < 0:
            raise ValueError("temperature")
        self.left[group] = request.max_tokens
        self.log.append(f"add {group}")

    def step(self):
        assert self.gate.wait(10)
        if self.fail:
            raise self.fail
        self.left = {group: left - 1 for group, left in self.left.items()}
        done = [group for group, left in self.left.items() if left == 0]
        for group in done:
            del self.left[group]
            self.log.append(f"end {group}")
        tokens = np.zeros(3, np.int32)
        return [(group, [Sample(tokens, np.zeros(3, np.float32), tokens + self.version, False)]) for group in done]

    def abort(self, group):
        self.left.pop(group, None)
        self.log.append(f"abort {group}")

    def abort_all(self):
        groups = list(self.left)
        self.left.clear()
        return groups

    def load(self, version, tensors):
        if self.fail:
            raise self.fail
        self.version = version
        self.log.append(f"load {version}")

    def sleep(self, level):
        if level > 2:
            raise ValueError("level")
        assert not self.left
        self.log.append(f"sleep {level}")

    def wake(self):
        self.log.append("wake")

    def close(self):
        self.closed = True


def run(scenario) -> FakeCore:
    cores: list[FakeCore] = []

    def make_core(config, model_path, **settings):
        cores.append(FakeCore(config, model_path, **settings))
        return cores[0]

    async def main():
        engine = InProcessVllm(VllmEngine(), "/nowhere", threads=1, seed=0, recompute=True, version=0, core=make_core)
        await engine.start()
        try:
            await asyncio.wait_for(scenario(engine, cores[0]), 20)
        finally:
            cores[0].gate.set()
            await engine.close()

    asyncio.run(main())
    assert cores[0].closed
    return cores[0]


def request(tokens: int = 3, temperature: float = 1.0) -> GroupRequest:
    return GroupRequest(prompt_ids=[1], seeds=[1], temperature=temperature, max_tokens=tokens)


def version(number: int):
    return pack(number, [("w", torch.zeros(2))], 1024)


async def until(condition) -> None:
    for _ in range(20000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("the condition did not come true")


def test_an_exception_inside_a_step_fails_every_waiting_and_every_later_call():
    async def scenario(engine, core):
        core.gate.clear()
        waiting = [asyncio.ensure_future(engine.generate(request())) for _ in range(3)]
        await until(lambda: core.running > 0)
        core.fail = RuntimeError("offset")
        core.gate.set()
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(result, InfraFailure)
            assert "vLLM failed: RuntimeError('offset')" in str(result)
        with pytest.raises(InfraFailure, match=r"broken: vLLM failed: RuntimeError\('offset'\)"):
            await engine.generate(request())
        with pytest.raises(InfraFailure, match="broken"):
            await engine.load_weights(*version(1), between_groups=False)
        assert engine.status()["state"] == "broken"

    run(scenario)


def test_an_update_between_groups_waits_for_the_running_ones_and_goes_before_new_ones():
    async def scenario(engine, core):
        core.gate.clear()
        old = asyncio.ensure_future(engine.generate(request(2)))
        await until(lambda: core.running == 1)
        update = asyncio.ensure_future(engine.load_weights(*version(1), between_groups=True))
        await until(lambda: not engine._inbox.empty())
        new = asyncio.ensure_future(engine.generate(request(2)))
        await asyncio.sleep(0.01)
        assert not update.done()
        core.gate.set()
        await update
        assert set((await old)[0].versions) == {0}
        assert set((await new)[0].versions) == {1}

    assert run(scenario).log == ["add 0", "end 0", "load 1", "add 1", "end 1"]


async def asked_to_sleep_at_work(engine, core) -> tuple[asyncio.Future, asyncio.Future]:
    """A group that is being generated, until the core's gate is opened, and a sleep that has to wait for it."""
    core.gate.clear()
    running = asyncio.ensure_future(engine.generate(request(2)))
    await until(lambda: core.running == 1)
    return running, asyncio.ensure_future(engine.sleep(1))


def test_the_engine_sleeps_when_the_running_groups_have_ended_and_refuses_work_until_it_is_woken():
    async def scenario(engine, core):
        running, sleeping = await asked_to_sleep_at_work(engine, core)
        await asyncio.sleep(0.01)
        assert not sleeping.done()
        core.gate.set()
        await sleeping
        assert len(await running) == 1
        assert engine.status()["state"] == "asleep"
        for refused in (engine.generate(request()), engine.load_weights(*version(1), between_groups=False)):
            with pytest.raises(InfraFailure, match="asleep"):
                await refused
        with pytest.raises(InfraFailure, match="asleep already"):
            await engine.sleep(1)
        await engine.wake()
        await engine.wake()
        assert engine.status()["state"] == "ready"
        assert len(await engine.generate(request())) == 1

    assert run(scenario).log == ["add 0", "end 0", "sleep 1", "wake", "add 2", "end 2"]


def test_a_sleep_that_is_cancelled_or_refused_leaves_the_engine_awake():
    async def scenario(engine, core):
        running, sleeping = await asked_to_sleep_at_work(engine, core)
        await asyncio.sleep(0.01)
        sleeping.cancel()
        await asyncio.gather(sleeping, return_exceptions=True)
        core.gate.set()
        await running
        with pytest.raises(ValueError, match="level"):
            await engine.sleep(3)
        assert len(await engine.generate(request())) == 1

    assert run(scenario).log == ["add 0", "end 0", "add 1", "end 1"]


def test_whoever_waits_for_sleep_when_vllm_fails_is_told():
    async def scenario(engine, core):
        running, sleeping = await asked_to_sleep_at_work(engine, core)
        await until(lambda: not engine._inbox.empty())
        core.fail = RuntimeError("device lost")
        core.gate.set()
        for result in await asyncio.gather(running, sleeping, return_exceptions=True):
            assert isinstance(result, InfraFailure)
            assert "device lost" in str(result)

    run(scenario)


def test_an_exception_while_a_group_enters_is_as_final_as_one_inside_a_step():
    async def scenario(engine, core):
        core.add = lambda *_: (_ for _ in ()).throw(RuntimeError("a process is gone"))
        with pytest.raises(InfraFailure, match=r"broken: vLLM failed: RuntimeError\('a process is gone'\)"):
            await engine.generate(request())
        assert engine.status()["state"] == "broken"

    run(scenario)


def test_a_cancelled_call_takes_its_group_out():
    async def scenario(engine, core):
        core.gate.clear()
        call = asyncio.ensure_future(engine.generate(request(1000000)))
        await until(lambda: core.running == 1)
        call.cancel()
        core.gate.set()
        await until(lambda: core.running == 0)

    assert run(scenario).log == ["add 0", "abort 0"]


def test_a_refused_request_raises_to_its_caller_alone():
    async def scenario(engine, core):
        good, bad = await asyncio.gather(
            engine.generate(request()), engine.generate(request(temperature=-1)), return_exceptions=True
        )
        assert len(good) == 1
        assert isinstance(bad, ValueError)
        assert engine.status()["state"] == "ready"
        assert engine.status()["tokens_generated"] == 3

    run(scenario)


def test_calls_that_wait_when_the_engine_is_closed_fail():
    async def scenario(engine, core):
        call = asyncio.ensure_future(engine.generate(request(1000000)))
        await until(lambda: core.running == 1)
        await engine.close()
        with pytest.raises(InfraFailure, match="closed"):
            await call

    run(scenario)


def test_an_engine_that_does_not_start_says_why():
    def refuse(config, model_path, **settings):
        raise ValueError("no such dtype")

    async def scenario():
        engine = InProcessVllm(VllmEngine(), "/m", threads=1, seed=0, recompute=True, core=refuse)
        with pytest.raises(InfraFailure, match=r"did not start on /m: ValueError\('no such dtype'\)"):
            await engine.start()
        with pytest.raises(InfraFailure, match="broken: start failed"):
            await engine.generate(request())
        await engine.close()

    asyncio.run(scenario())
