from __future__ import annotations

import asyncio
import sys
from collections import Counter
from typing import Any

import pytest

from buffer.config import BufferConfig
from buffer.dispatcher import Dispatcher
from buffer.records import ColumnsLost, DataFailure, InfraFailure, Lease, Produced, Prompt
from buffer.table import ExperienceTable
from tests.fakes import FakeMaker, answer, fail_with, hang, reward_maker, settle


class Harness:
    """A table with `rows` rows admitted at version 0, and a dispatcher for it."""

    def __init__(self, rows: int = 8, stages: tuple[str, ...] = ("rollout",), **settings: Any) -> None:
        self.table = ExperienceTable(
            BufferConfig(**settings), stages=stages, groups_per_step=400, every=1, samples=2, total_rows=None, seed=1
        )
        self.bugs: list[Exception] = []
        self.dispatcher = Dispatcher(self.pump, self.bugs.append)
        self.dispatcher.add_table(self.table)
        self.table.published(0, 0)
        self.admit(rows)

    def admit(self, rows: int) -> None:
        for row in range(rows):
            self.table.admit(Prompt(f"p{row}", "x"))

    def pump(self) -> None:
        self.dispatcher.pump()


class Gate:
    """A behaviour that waits until it is opened."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def __call__(self, lease: Lease) -> None:
        await self.open.wait()


def test_a_maker_gets_as_many_calls_as_it_has_slots_and_the_next_when_one_ends():
    async def scenario() -> None:
        harness, gate = Harness(rows=8), Gate()
        maker = FakeMaker(slots=3, behave=gate)
        harness.dispatcher.attach(maker)
        await settle()
        assert [lease.row_id for lease in maker.leases] == [0, 1, 2]
        gate.open.set()
        await settle()
        assert (harness.table.live.complete, maker.most_running) == (8, 3)
        assert harness.table.work.leases == {}

    asyncio.run(scenario())


def test_a_stage_gets_the_references_of_the_stages_it_needs():
    async def scenario() -> None:
        harness = Harness(rows=2, stages=("rollout", "reward"))
        reward = reward_maker()
        harness.dispatcher.attach(reward)
        await settle()
        assert reward.leases == []
        harness.dispatcher.attach(FakeMaker())
        await settle()
        assert reward.inputs == [["rollout of row 0"], ["rollout of row 1"]]
        assert harness.table.live.complete == 2

    asyncio.run(scenario())


def test_a_row_is_scored_as_soon_as_its_samples_are_there_while_others_are_being_generated():
    async def scenario() -> None:
        slow = asyncio.Event()

        async def behave(lease: Lease) -> None:
            if lease.row_id == 0:
                await slow.wait()

        harness = Harness(rows=2, stages=("rollout", "reward/judge", "reward"))
        judge = FakeMaker("reward/judge", ("rollout",))
        reward = FakeMaker("reward", ("rollout", "reward/judge"))
        for maker in (FakeMaker(behave=behave), judge, reward):
            harness.dispatcher.attach(maker)
        await settle()
        assert [lease.row_id for lease in judge.leases] == [1]
        assert reward.inputs == [["rollout of row 1", "reward/judge of row 1"]]
        assert harness.table.live.complete == 1
        slow.set()
        await settle()
        assert [lease.row_id for lease in reward.leases] == [1, 0]

    asyncio.run(scenario())


def test_rows_go_round_the_makers_with_a_free_slot():
    async def scenario() -> None:
        harness = Harness(rows=0)
        makers = [FakeMaker(name=f"r{index}", slots=slots, behave=hang) for index, slots in enumerate((100, 2, 100))]
        for maker in makers:
            harness.dispatcher.attach(maker)
        harness.admit(8)
        harness.dispatcher.pump()
        await settle()
        assert [len(maker.leases) for maker in makers] == [3, 2, 3]
        harness.dispatcher.close()

    asyncio.run(scenario())


def test_a_missed_deadline_ends_the_lease_by_name_and_another_maker_gets_the_row():
    async def scenario() -> None:
        harness = Harness(rows=1, lease_timeout=0.05)
        hung = FakeMaker(name="hung", behave=hang)
        harness.dispatcher.attach(hung)
        await settle()
        harness.dispatcher.attach(healthy := FakeMaker(name="healthy"))
        await asyncio.sleep(0.1)
        assert hung.cancelled == [0]
        assert [lease.row_id for lease in healthy.leases] == [0]
        assert harness.table.live.complete == 1
        assert harness.table.failures.counts == {"timeout": 1}
        assert harness.dispatcher.status()["makers"]["hung"]["state"] == "paused"
        harness.dispatcher.close()

    asyncio.run(scenario())


def test_the_last_missed_deadline_ends_the_run_with_row_stage_maker_and_seconds():
    async def scenario() -> None:
        harness = Harness(rows=1, lease_timeout=0.05, max_attempts=1)
        harness.dispatcher.attach(FakeMaker(name="hung", behave=hang))
        await asyncio.sleep(0.1)
        assert harness.table.failures.cause is not None
        assert "row 0 (prompt 'p0'): rollout failed 1 times" in harness.table.failures.cause
        assert harness.table.failures.cause.endswith("the last time on hung: no answer within 0.05 s")
        harness.dispatcher.close()

    asyncio.run(scenario())


def test_a_late_answer_of_an_ended_lease_is_ignored_even_from_a_maker_that_cannot_be_cancelled():
    async def scenario() -> None:
        late = asyncio.Event()

        async def stubborn(lease: Lease) -> Produced:
            while not late.is_set():
                try:
                    await late.wait()
                except asyncio.CancelledError:
                    continue
            return answer(lease, tokens=999)

        harness = Harness(rows=1, lease_timeout=0.05)
        harness.dispatcher.attach(FakeMaker(name="stubborn", behave=stubborn))
        await settle()
        harness.dispatcher.attach(FakeMaker(name="healthy"))
        await asyncio.sleep(0.1)
        assert harness.table.rows[0].tokens == 20
        late.set()
        await settle()
        assert (harness.table.rows[0].tokens, harness.table.ledger.tokens.admitted) == (20, 20)
        assert harness.bugs == []
        harness.dispatcher.close()

    asyncio.run(scenario())


def test_a_dead_maker_loses_its_leases_at_once_and_the_rows_are_made_elsewhere():
    async def scenario() -> None:
        harness = Harness(rows=4)
        dead = FakeMaker(name="dead", behave=hang)
        harness.dispatcher.attach(dead)
        await settle()
        assert len(dead.leases) == 4
        harness.dispatcher.attach(healthy := FakeMaker(name="healthy"))
        harness.dispatcher.died("dead", "killed by signal 9")
        harness.dispatcher.died("dead", "killed by signal 9")
        await settle()
        assert [lease.row_id for lease in healthy.leases] == [0, 1, 2, 3]
        assert (harness.table.live.complete, harness.table.failures.counts["died"]) == (4, 4)
        assert list(harness.dispatcher.status()["makers"]) == ["healthy"]
        harness.dispatcher.attach(FakeMaker(name="dead"))  # a restarted maker may have the same name

    asyncio.run(scenario())


def test_a_broken_maker_pauses_and_does_not_burn_the_attempts_of_rows_while_another_is_busy():
    async def scenario() -> None:
        harness, gate = Harness(rows=6), Gate()
        broken = FakeMaker(name="broken", slots=2, behave=fail_with(InfraFailure("engine broken")))
        harness.dispatcher.attach(broken)
        harness.dispatcher.attach(busy := FakeMaker(name="busy", slots=1, behave=gate))
        await settle()
        assert len(broken.leases) == 2
        gate.open.set()
        await settle(200)
        assert (harness.table.live.complete, harness.table.failures.cause) == (6, None)
        assert len(busy.leases) == 6
        harness.dispatcher.close()

    asyncio.run(scenario())


def test_the_only_maker_tries_again_after_its_pause():
    async def scenario() -> None:
        seen: Counter[int] = Counter()

        async def fails_once(lease: Lease) -> None:
            seen[lease.row_id] += 1
            if seen[lease.row_id] == 1:
                raise InfraFailure("weights out of reach")

        harness = Harness(rows=1)
        harness.dispatcher.attach(FakeMaker(behave=fails_once))
        await settle()
        assert harness.table.live.complete == 0
        await asyncio.sleep(0.6)
        assert harness.table.live.complete == 1

    asyncio.run(scenario())


def test_a_row_that_failed_on_a_maker_waits_for_another_even_if_the_first_is_idle():
    async def scenario() -> None:
        harness, gate = Harness(rows=2), Gate()
        harness.dispatcher.attach(first := FakeMaker(name="first", slots=1, behave=fail_with(InfraFailure("broken"))))
        harness.dispatcher.attach(second := FakeMaker(name="second", slots=1, behave=gate))
        await asyncio.sleep(0.6)  # longer than the pause of the first
        assert harness.dispatcher.status()["makers"]["first"]["state"] == "ready"
        assert ([lease.row_id for lease in first.leases], harness.table.ready("rollout")) == ([0], 1)
        gate.open.set()
        await settle()
        assert ([lease.row_id for lease in second.leases], harness.table.live.complete) == ([1, 0], 2)

    asyncio.run(scenario())


def test_any_other_exception_counts_as_an_infrastructure_failure_with_its_text():
    async def scenario() -> None:
        harness = Harness(rows=1, max_attempts=1)
        harness.dispatcher.attach(FakeMaker(behave=fail_with(KeyError("weights"))))
        await settle()
        assert harness.table.failures.cause is not None
        assert harness.table.failures.cause.endswith("the last time on maker/rollout/0: KeyError: 'weights'")
        harness.dispatcher.close()

    asyncio.run(scenario())


def test_an_answer_that_cannot_be_true_is_an_infrastructure_failure():
    async def lies(lease: Lease) -> Produced:
        return answer(lease, samples=1)

    async def scenario() -> None:
        harness = Harness(rows=1, max_attempts=1)
        harness.dispatcher.attach(FakeMaker(behave=lies))
        await settle()
        assert harness.table.failures.cause is not None
        assert "invalid answer: row 0" in harness.table.failures.cause
        assert "1 samples, but 2 were asked for" in harness.table.failures.cause
        harness.dispatcher.close()

    asyncio.run(scenario())


def test_a_data_failure_drops_the_row_and_cancels_the_calls_of_its_other_stages():
    async def scenario() -> None:
        harness = Harness(rows=1, stages=("rollout", "reward", "teacher"))
        teacher = FakeMaker("teacher", ("rollout",), behave=hang)
        harness.dispatcher.attach(teacher)
        harness.dispatcher.attach(reward_maker(behave=fail_with(DataFailure("no answer field"))))
        harness.dispatcher.attach(FakeMaker())
        await settle()
        assert teacher.cancelled == [0]
        assert harness.table.ledger.rows.dropped == {"data": 1}
        assert harness.table.work.leases == {}

    asyncio.run(scenario())


def test_detach_with_drain_waits_for_the_calls_and_gives_no_new_ones():
    async def scenario() -> None:
        harness, gate = Harness(rows=4), Gate()
        maker = FakeMaker(slots=2, behave=gate)
        harness.dispatcher.attach(maker)
        await settle()
        leaving = asyncio.create_task(harness.dispatcher.detach(maker.info.name, drain=True))
        await settle()
        assert not leaving.done()
        gate.open.set()
        await leaving
        assert (len(maker.leases), harness.table.live.complete) == (2, 2)
        assert harness.dispatcher.status()["makers"] == {}
        with pytest.raises(ValueError, match="no maker maker/rollout/0 is attached; there are: none"):
            await harness.dispatcher.detach(maker.info.name, drain=True)

    asyncio.run(scenario())


def test_detach_without_drain_revokes_and_a_death_ends_a_drain():
    async def scenario() -> None:
        harness = Harness(rows=4)
        first, second = FakeMaker(name="first", behave=hang), FakeMaker(name="second", behave=hang)
        harness.dispatcher.attach(first)
        await harness.dispatcher.detach("first", drain=False)
        harness.dispatcher.attach(second)
        await settle()
        assert [lease.row_id for lease in second.leases] == [0, 1, 2, 3]
        leaving = asyncio.create_task(harness.dispatcher.detach("second", drain=True))
        await settle()
        assert not leaving.done()
        harness.dispatcher.died("second", "killed")
        await settle()
        assert leaving.done()
        assert harness.table.failures.counts == {"died": 4}

    asyncio.run(scenario())


def test_an_unrouted_maker_finishes_what_it_has_and_gets_nothing_until_it_is_routed_again():
    async def scenario() -> None:
        harness, gate = Harness(rows=4), Gate()
        maker = FakeMaker(slots=2, behave=gate)
        harness.dispatcher.attach(maker)
        await settle()
        unrouting = asyncio.create_task(harness.dispatcher.unroute(maker.info.name))
        await settle()
        assert not unrouting.done()
        assert harness.dispatcher.status()["makers"][maker.info.name]["state"] == "unrouted"
        gate.open.set()
        await settle()
        assert unrouting.done()
        assert (len(maker.leases), harness.table.live.complete, harness.table.work.leases) == (2, 2, {})
        harness.dispatcher.route(maker.info.name)
        await settle()
        assert (len(maker.leases), harness.table.live.complete) == (4, 4)

    asyncio.run(scenario())


def test_an_unrouted_maker_that_fails_or_dies_is_no_longer_waited_for():
    async def scenario() -> None:
        harness = Harness(rows=1)
        maker = FakeMaker(slots=1, behave=hang)
        harness.dispatcher.attach(maker)
        await settle()
        unrouting = asyncio.create_task(harness.dispatcher.unroute(maker.info.name))
        await settle()
        harness.dispatcher.died(maker.info.name, "killed")
        await asyncio.wait_for(unrouting, 1)

    asyncio.run(scenario())


def test_a_maker_that_is_made_anew_while_it_is_unrouted_gets_nothing_until_it_is_routed():
    async def scenario() -> None:
        harness, maker = Harness(rows=1), FakeMaker()
        await harness.dispatcher.unroute(maker.info.name)
        harness.dispatcher.attach(maker)
        await settle()
        assert (maker.leases, harness.dispatcher.status()["makers"][maker.info.name]["state"]) == ([], "unrouted")
        harness.dispatcher.route(maker.info.name)
        await settle()
        assert harness.table.live.complete == 1

    asyncio.run(scenario())


def test_a_lost_input_is_made_again_and_is_no_failure_of_the_maker_that_needed_it():
    async def scenario() -> None:
        harness = Harness(rows=1, stages=("rollout", "reward"))
        lost = ColumnsLost("the node died", ["rollout"])
        reward = reward_maker(behave=fail_with(lost, lambda row: len(reward.leases) == 1))
        rollout = FakeMaker()
        harness.dispatcher.attach(rollout)
        harness.dispatcher.attach(reward)
        await settle()
        assert [lease.seed for lease in rollout.leases] == [rollout.leases[0].seed] * 2
        assert (harness.table.live.complete, harness.table.failures.counts) == (1, {"infra": 1})
        assert harness.dispatcher.status()["makers"][reward.info.name]["failures"] == 0
        assert harness.table.ledger.tokens.dropped == {"lost": 20}
        harness.table.check()

    asyncio.run(scenario())


def test_whoever_else_works_on_columns_that_are_lost_is_called_off():
    async def scenario() -> None:
        harness = Harness(rows=1, stages=("rollout", "reward", "teacher"))
        teacher = FakeMaker("teacher", ("rollout",), behave=hang)
        for maker in (FakeMaker(), teacher):
            harness.dispatcher.attach(maker)
        await settle()
        assert (teacher.running, teacher.cancelled) == (1, [])
        harness.dispatcher.lost(harness.table, 0, ["rollout"], "the node died")
        await settle()
        assert (teacher.cancelled, len(teacher.leases)) == ([0], 2)
        harness.dispatcher.close()

    asyncio.run(scenario())


def test_calls_that_fail_together_pause_a_maker_once():
    async def scenario() -> None:
        harness = Harness(rows=3, max_attempts=2)
        maker = FakeMaker(behave=fail_with(InfraFailure("weights out of reach"), lambda row: len(maker.leases) <= 3))
        harness.dispatcher.attach(maker)
        await asyncio.sleep(0.7)
        assert (harness.table.live.complete, harness.table.failures.counts) == (3, {"infra": 3})

    asyncio.run(scenario())


def test_an_error_in_the_buffer_itself_is_told_and_not_only_logged():
    async def scenario() -> None:
        harness = Harness(rows=1)
        del harness.table.ledger
        harness.dispatcher.attach(FakeMaker())
        await settle()
        assert [type(error) for error in harness.bugs] == [AttributeError]

    asyncio.run(scenario())


def calls_of_python(makers: int, slots: int) -> int:
    """Function calls it takes to make 400 rows with so many makers, whatever the speed of the machine."""

    async def scenario() -> int:
        harness = Harness(rows=400)
        for index in range(makers):
            harness.dispatcher.attach(FakeMaker(name=f"r{index}", slots=slots))
        count = 0

        def profile(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event == "call"

        sys.setprofile(profile)
        await settle()
        sys.setprofile(None)
        assert harness.table.live.complete == 400
        return count

    return asyncio.run(scenario())


def test_the_cost_of_a_lease_does_not_grow_with_the_number_of_makers():
    few, many = calls_of_python(makers=2, slots=20), calls_of_python(makers=40, slots=1)
    assert many < few * 1.2
