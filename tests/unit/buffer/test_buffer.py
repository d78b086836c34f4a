from __future__ import annotations

import asyncio
import json
import pickle
import random
from typing import Any

import pytest

from buffer.buffer import Buffer, EndOfData, RunFailed
from buffer.config import BufferConfig
from buffer.records import DataFailure, InfraFailure, Lease, Produced, Prompt
from buffer.rows import derive_seed
from tests.fakes import FakeMaker, FakePrompts, answer, fail_with, hang, reward_maker, settle


def new_buffer(prompts: FakePrompts | None = None, makers: bool = True, **settings: Any) -> Buffer:
    arguments = {"stages": ("rollout", "reward"), "groups_per_step": 2, "every": 1, "samples": 4}
    arguments |= {"total_rows": None, "seed": 1}
    arguments |= {name: settings.pop(name) for name in list(settings) if name in arguments}
    buffer = Buffer(BufferConfig(**settings), prompts or FakePrompts(), **arguments)
    if makers:
        buffer.attach(FakeMaker())
        buffer.attach(reward_maker())
    return buffer


async def train(buffer: Buffer, steps: range, groups: int = 2) -> list[list[int]]:
    trained = []
    for step in steps:
        rows = await buffer.sample(groups, timeout=5)
        trained.append([row.row_id for row in rows])
        buffer.trained(trained[-1], step)
        buffer.published(step, step)
    return trained


def test_rows_flow_from_prompts_through_makers_to_the_trainer():
    async def scenario() -> None:
        buffer = new_buffer()
        buffer.published(0, 0)
        (row, _) = await buffer.sample(2, timeout=5)
        assert row.columns == {"rollout": "rollout of row 0", "reward": "reward of row 0"}
        assert (row.prompt.id, row.age, row.produced["rollout"].tokens) == ("p0", 0, 40)

    asyncio.run(scenario())


def test_nothing_is_made_before_the_first_version_is_published():
    async def scenario() -> None:
        buffer = new_buffer()
        waiting = asyncio.create_task(buffer.sample(2, timeout=5))
        await settle()
        assert (buffer.cursor, waiting.done()) == (0, False)
        buffer.published(0, 0)
        assert len(await waiting) == 2

    asyncio.run(scenario())


def test_max_staleness_zero_is_a_synchronous_loop_whatever_the_makers_timing():
    async def scenario(chance: random.Random) -> list[tuple[int, str, int, int]]:
        leases: list[Lease] = []

        async def slow(lease: Lease) -> None:
            leases.append(lease)
            await asyncio.sleep(chance.random() / 200)

        buffer = new_buffer(makers=False, max_staleness=0, groups_per_step=4)
        for index in range(3):
            buffer.attach(FakeMaker(name=f"r{index}", behave=slow))
        buffer.attach(reward_maker())
        buffer.published(0, 0)
        trained = await train(buffer, range(1, 6), groups=4)
        assert trained == [[4 * step + row for row in range(4)] for step in range(5)]
        await buffer.close()
        return sorted((lease.row_id, lease.prompt.id, lease.min_version, lease.seed) for lease in leases)[:20]

    synchronous = [(row, f"p{row}", row // 4, derive_seed(1, row, 0)) for row in range(20)]
    assert asyncio.run(scenario(random.Random(1))) == synchronous
    assert asyncio.run(scenario(random.Random(2))) == synchronous


def test_sample_times_out_with_who_waits_for_what():
    async def scenario() -> None:
        buffer = new_buffer(makers=False, max_staleness=0)
        buffer.attach(FakeMaker(name="hung", behave=hang, slots=1))
        buffer.published(0, 0)
        with pytest.raises(TimeoutError) as error:
            await buffer.sample(2, timeout=0.05)
        text = str(error.value)
        assert text.startswith(
            "no 2 rows within 0.05 s (0 are complete): row 0 (prompt 'p0') waits for rollout (on hung for 0."
        )
        assert "row 1 (prompt 'p1') waits for rollout (a free slot on one of 1 makers)" in text
        assert "reward (no maker was ever attached)" in text
        await buffer.close()

    asyncio.run(scenario())


def test_a_maker_attached_late_and_a_publication_wake_the_one_who_waits():
    async def scenario() -> None:
        buffer = new_buffer(makers=False, max_staleness=0)
        buffer.published(0, 0)
        waiting = asyncio.create_task(buffer.sample(2, timeout=5))
        await settle()
        buffer.attach(FakeMaker())
        await settle()
        assert not waiting.done()
        buffer.attach(reward_maker())
        rows = await waiting
        waiting = asyncio.create_task(buffer.sample(2, timeout=5))
        buffer.trained([row.row_id for row in rows], 1)
        await settle()
        assert not waiting.done()
        buffer.published(1, 1)
        assert [row.row_id for row in await waiting] == [2, 3]

    asyncio.run(scenario())


def test_rows_that_fail_as_data_are_replaced_by_the_next_prompts():
    async def scenario() -> None:
        buffer = new_buffer(makers=False)
        buffer.attach(FakeMaker(behave=fail_with(DataFailure("prompt too long"), lambda row: row % 2 == 0)))
        buffer.attach(reward_maker())
        buffer.published(0, 0)
        assert await train(buffer, range(1, 4)) == [[1, 3], [5, 7], [9, 11]]
        status = buffer.status()
        assert status["ledger"]["rows"]["trained"] == 6
        assert status["ledger"]["rows"]["dropped"]["data"] == status["failures"]["data"] >= 6
        assert status["fatal"] is None

    asyncio.run(scenario())


def test_too_many_data_failures_in_a_row_are_the_fatal_cause_for_everybody_who_waits():
    async def scenario() -> None:
        buffer = new_buffer(makers=False, max_data_failures=10)
        buffer.attach(FakeMaker(behave=fail_with(DataFailure("prompt too long"))))
        supervisor = asyncio.create_task(buffer.fatal.wait())
        buffer.published(0, 0)
        with pytest.raises(RunFailed, match="11 rows failed as data .*prompt too long"):
            await buffer.sample(2, timeout=5)
        assert await supervisor == buffer.status()["fatal"]
        assert buffer.cursor <= 11 + 4

    asyncio.run(scenario())


def test_a_row_no_maker_can_make_is_the_fatal_cause():
    async def scenario() -> None:
        buffer = new_buffer(makers=False, max_attempts=2)
        for name in ("a", "b"):
            buffer.attach(FakeMaker(name=name, behave=fail_with(InfraFailure("out of memory"), lambda row: row == 1)))
        buffer.attach(reward_maker())
        buffer.published(0, 0)
        with pytest.raises(RunFailed, match=r"row 1 \(prompt 'p1'\): rollout failed 2 times .*out of memory"):
            await buffer.sample(2, timeout=5)

    asyncio.run(scenario())


def test_the_end_of_the_prompts_is_an_end_with_numbers_and_not_a_deadlock():
    async def scenario() -> None:
        buffer = new_buffer(FakePrompts(5))
        buffer.published(0, 0)
        assert await train(buffer, range(1, 3)) == [[0, 1], [2, 3]]
        with pytest.raises(EndOfData) as error:
            await buffer.sample(2, timeout=5)
        assert str(error.value) == (
            "2 rows wanted, 1 can still come: 5 prompts were taken and there are no more, 4 rows trained of any number, "
            "dropped none"
        )
        assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)
        assert [row.row_id for row in await buffer.sample(1, timeout=5)] == [4]

    asyncio.run(scenario())


def test_prompts_that_fail_at_the_end_of_the_data_end_the_wait_too():
    async def scenario() -> None:
        buffer = new_buffer(FakePrompts(4), makers=False)
        buffer.attach(FakeMaker(behave=fail_with(DataFailure("too long"), lambda row: row != 1)))
        buffer.attach(reward_maker())
        buffer.published(0, 0)
        with pytest.raises(EndOfData, match=r"1 can still come: .*dropped \{'data': 3\}"):
            await buffer.sample(2, timeout=5)

    asyncio.run(scenario())


def test_after_a_seek_the_rows_are_numbered_on_so_that_no_seed_comes_twice():
    async def scenario() -> None:
        prompts = FakePrompts()
        prompts.seek(6)
        buffer = new_buffer(prompts)
        buffer.published(3, 3)
        assert [(row.row_id, row.prompt.id) for row in await buffer.sample(2, timeout=5)] == [(6, "p6"), (7, "p7")]

    asyncio.run(scenario())


def test_total_rows_ends_the_run_and_takes_no_prompt_too_many():
    async def scenario() -> None:
        buffer = new_buffer(total_rows=4, max_staleness=2)
        buffer.published(0, 0)
        await train(buffer, range(1, 3))
        assert buffer.cursor == 4
        with pytest.raises(EndOfData, match="0 can still come: 4 prompts were taken, 4 rows trained of 4"):
            await buffer.sample(2, timeout=5)

    asyncio.run(scenario())


def test_a_prompt_source_that_breaks_is_a_failure_and_not_the_end_of_the_data():
    class Broken(FakePrompts):
        def next(self) -> Prompt | None:
            if self.cursor == 1:
                raise OSError("disk gone")
            return super().next()

    async def scenario() -> None:
        buffer = new_buffer(Broken())
        buffer.published(0, 0)
        with pytest.raises(RunFailed, match="the prompt source failed after 1 prompts: OSError: disk gone"):
            await buffer.sample(2, timeout=5)

    asyncio.run(scenario())


def test_a_source_that_breaks_while_stale_rows_are_replaced_is_a_failure_too():
    class Broken(FakePrompts):
        def next(self) -> Prompt | None:
            if self.cursor == 2:
                raise OSError("disk gone")
            return super().next()

    async def scenario() -> None:
        buffer = new_buffer(Broken(), order="ready", max_staleness=1, groups_per_step=1)
        buffer.published(0, 0)
        await settle()
        for version in (1, 2):
            buffer.published(version, version)
        with pytest.raises(RunFailed, match="the prompt source failed after 2 prompts: OSError: disk gone"):
            await buffer.sample(1, timeout=5)

    asyncio.run(scenario())


def test_more_rows_than_are_ever_in_flight_are_refused():
    with pytest.raises(ValueError, match="5 rows wanted, but at most 4 are in flight"):
        asyncio.run(new_buffer().sample(5, timeout=5))


def test_stale_rows_dropped_on_the_way_are_replaced_while_the_trainer_waits():
    async def scenario() -> None:
        held = asyncio.Event()

        async def slow(lease: Lease) -> None:
            if lease.row_id in (0, 1):
                await held.wait()

        buffer = new_buffer(makers=False, order="ready", max_staleness=1)
        buffer.attach(FakeMaker(behave=slow, slots=16))
        buffer.attach(reward_maker())
        buffer.published(0, 0)
        assert await train(buffer, range(1, 4)) == [[2, 3], [4, 5], [6, 7]]
        held.set()
        await settle()
        # Nothing is being made now: only the room that the dropped rows leave brings the missing two.
        assert [row.row_id for row in await buffer.sample(4, timeout=5)] == [8, 9, 10, 11]
        assert buffer.status()["ledger"]["rows"]["dropped"] == {"stale": 2}

    asyncio.run(scenario())


def test_a_call_for_rows_takes_the_place_of_one_whose_caller_may_be_gone():
    async def scenario() -> None:
        buffer = new_buffer(makers=False, max_staleness=0)
        buffer.published(0, 0)
        waiting = [asyncio.create_task(buffer.sample(2, timeout=5)) for _ in range(2)]
        await settle()
        buffer.attach(reward_maker())
        buffer.attach(FakeMaker())
        first, second = await asyncio.gather(*waiting, return_exceptions=True)
        assert "rows were asked for again" in str(first)
        assert isinstance(second, list)
        assert [row.row_id for row in second] == [0, 1]

    asyncio.run(scenario())


def test_evaluation_averages_rows_of_its_own_and_leaves_the_ledger_alone():
    async def scenario() -> None:
        async def scores(lease: Lease) -> Produced:
            return answer(lease, stats={"reward_mean": float(lease.prompt.id.removeprefix("p")), "reward/exact": 1.0})

        seen: list[Lease] = []

        async def remember(lease: Lease) -> None:
            seen.append(lease)

        buffer = new_buffer(makers=False)
        buffer.attach(FakeMaker(behave=remember))
        buffer.attach(reward_maker(behave=scores))
        with pytest.raises(ValueError, match="evaluation of version 3, but the newest published is None"):
            await buffer.evaluate([Prompt("1", "x")], samples=2, min_version=3, seed=9, timeout=5)
        buffer.published(3, 3)
        await settle()
        before = buffer.status()["ledger"]
        prompts = [Prompt(str(number), "x") for number in range(20)]
        result = await buffer.evaluate(prompts, samples=2, min_version=3, seed=9, timeout=5)
        assert (result.rows, result.failed, result.samples) == (20, 0, 2)
        assert (result.reward_mean, result.pass_rate, result.stats["reward/exact"]) == (9.5, None, 1.0)
        assert (result.response_length, result.min_version, result.max_version) == (10.0, 3, 3)
        assert buffer.status()["ledger"] == before
        mine = [lease for lease in seen if lease.samples == 2]
        assert [lease.seed for lease in mine] == [derive_seed(9, row, 0) for row in range(20)]
        assert len({lease.id for lease in seen}) == len(seen)
        assert [row.row_id for row in await buffer.sample(2, timeout=5)] == [0, 1]

    asyncio.run(scenario())


def test_evaluation_goes_before_training_rows_and_runs_on_newer_versions_too():
    async def scenario() -> None:
        gate = asyncio.Event()
        order: list[str] = []

        async def wait(lease: Lease) -> None:
            await gate.wait()
            order.append(lease.prompt.id)

        buffer = new_buffer(makers=False, max_staleness=3)
        buffer.attach(FakeMaker(slots=1, behave=wait))
        buffer.attach(reward_maker())
        buffer.published(0, 0)
        await settle()
        evaluation = asyncio.create_task(
            buffer.evaluate([Prompt("e0", "x"), Prompt("e1", "x")], samples=1, min_version=0, seed=1, timeout=5)
        )
        await settle()
        buffer.published(1, 1)
        gate.set()
        await evaluation
        assert order[:3] == ["p0", "e0", "e1"]

    asyncio.run(scenario())


def test_evaluation_counts_data_failures_and_fails_if_nothing_is_left_or_time_is_up():
    async def scenario() -> None:
        buffer = new_buffer(makers=False, max_data_failures=1000)
        buffer.attach(FakeMaker(behave=fail_with(DataFailure("too long"), lambda row: row != 1)))
        buffer.attach(reward_maker(name="reward"))
        buffer.published(0, 0)
        arguments: dict[str, Any] = {"samples": 1, "min_version": 0, "seed": 1}
        prompts = [Prompt(f"e{number}", "x") for number in range(3)]
        result = await buffer.evaluate(prompts, timeout=5, **arguments)
        assert (result.rows, result.failed) == (1, 2)
        with pytest.raises(RunFailed, match=r"all 1 prompts failed as data: row 0 \(prompt 'e0'\), rollout .*too long"):
            await buffer.evaluate(prompts[:1], timeout=5, **arguments)
        await buffer.detach("reward", drain=False)
        with pytest.raises(
            TimeoutError, match=r"evaluation: 0 of 3 rows within 0.05 s: row 1 \(prompt 'e1'\) waits for rew"
        ):
            await buffer.evaluate(prompts, timeout=0.05, **arguments)

    asyncio.run(scenario())


def test_a_failed_evaluation_row_frees_its_makers_for_training():
    async def scenario() -> None:
        async def hangs_in_evaluation(lease: Lease) -> None:
            if lease.samples == 1:
                await hang(lease)

        buffer = new_buffer(makers=False)
        buffer.attach(FakeMaker(slots=1, behave=hangs_in_evaluation))
        buffer.attach(reward_maker())
        buffer.published(0, 0)
        await buffer.sample(2, timeout=5)
        with pytest.raises(TimeoutError):
            await buffer.evaluate([Prompt("e", "x")], samples=1, min_version=0, seed=1, timeout=0.05)
        assert len(await buffer.sample(2, timeout=5)) == 2

    asyncio.run(scenario())


def test_the_status_is_plain_json_with_busy_seconds_by_stage_and_maker():
    async def scenario() -> None:
        buffer = new_buffer()
        buffer.published(0, 0)
        await train(buffer, range(1, 3))
        status = json.loads(json.dumps(buffer.status()))
        assert status["published"] == 2
        assert status["busy_seconds"]["rollout"] == status["makers"]["maker/rollout/0"]["busy_seconds"] >= 1.0
        assert status["prompts"] == {"cursor": buffer.cursor, "finished": False, "oldest_unfinished": 4}
        assert status["makers"]["maker/reward/0"]["failures"] == 0

    asyncio.run(scenario())


def test_close_cancels_the_calls_and_tells_the_waiting():
    async def scenario() -> None:
        buffer = new_buffer(makers=False)
        maker = FakeMaker(behave=hang, slots=2)
        buffer.attach(maker)
        buffer.published(0, 0)
        waiting = asyncio.create_task(buffer.sample(2, timeout=5))
        await settle()
        await buffer.close()
        with pytest.raises(RunFailed, match="the buffer was closed"):
            await waiting
        assert maker.cancelled == [0, 1]

    asyncio.run(scenario())
