from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from buffer.buffer import Buffer
from buffer.config import BufferConfig
from buffer.snapshot import cut, places, restore, snapshot
from buffer.table import ExperienceTable
from tests.fakes import FakeMaker, FakePrompts, answer, reward_maker, settle
from tests.unit.buffer.tables import complete_all, fill, lease_of, new_table, train


def plain(state: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(state))


def in_the_middle() -> ExperienceTable:
    """After step 1: rows 2 and 3 are complete, 4 has its rollout, 5 nothing."""
    table = new_table(max_staleness=1)
    table.published(0, 0)
    fill(table)
    complete_all(table)
    train(table, 1)
    fill(table)
    lease = lease_of(table, "r0")
    table.commit(lease.id, answer(lease), "rollout-4")
    return table


def test_a_cut_is_plain_json_and_the_restored_table_goes_on_with_the_same_rows_and_columns():
    table = in_the_middle()
    taken = cut(table)
    assert list(zip(places(taken.state), taken.references, strict=True)) == [
        ((2, "rollout"), "rollout-2"),
        ((2, "reward"), "reward-2"),
        ((3, "rollout"), "rollout-3"),
        ((3, "reward"), "reward-3"),
        ((4, "rollout"), "rollout-4"),
    ]
    restored, prompts = new_table(max_staleness=1), FakePrompts()
    restore(restored, plain(taken.state), prompts, taken.references)
    assert cut(restored).references == taken.references
    assert (restored.live.complete, restored.live.nbytes, restored.charged) == (2, table.live.nbytes, table.charged)
    assert restored.ledger == table.ledger
    assert [row.prompt.id for row in restored.rows.values()] == ["p2", "p3", "p4", "p5"]
    assert (restored.next_row, prompts.cursor) == (6, 6)
    restored.published(1, 1)  # what a resumed trainer says first
    assert lease_of(restored, "r0").row_id == 5
    assert train(restored, 2) == [2, 3]


def test_a_cut_gives_back_the_rows_that_the_trainer_has():
    table = in_the_middle()
    table.select(2)
    taken = cut(table)
    restored = new_table(max_staleness=1)
    restore(restored, plain(taken.state), FakePrompts(), taken.references)
    assert (restored.live.complete, restored.live.sampled) == (2, {})


def test_after_a_crash_rows_are_made_again_with_the_same_seeds_and_their_tokens_count_as_lost():
    table = in_the_middle()
    state = plain(snapshot(table))
    restored = new_table(max_staleness=1)
    restore(restored, state, FakePrompts(), None)
    assert (list(restored.rows), restored.live.complete, restored.live.nbytes) == ([2, 3, 4, 5], 0, 0)
    assert restored.ledger.rows.in_flight == 4
    assert restored.ledger.tokens.dropped == {"lost": 3 * 30}
    assert restored.failures.counts["infra"] == 3
    seeds = [lease_of(each, "r0").seed for each in (table, restored)]
    assert seeds[0] != seeds[1]  # of row 5 and of row 2
    other = new_table(max_staleness=1)
    other.published(0, 0)
    fill(other)
    assert [lease_of(other, "r0").seed for _ in range(3)][2] == seeds[1]


def test_rows_that_the_trainer_had_at_a_crash_can_still_be_trained():
    table = in_the_middle()
    rows = [row.row_id for row in table.select(2) or []]
    restored = new_table(max_staleness=1)
    restore(restored, plain(snapshot(table)), FakePrompts(), None)
    assert list(restored.live.sampled) == rows
    restored.trained(rows, 2)
    restored.published(2, 2)
    assert (restored.ledger.rows.trained, restored.ledger.tokens.trained) == (4, 120)


def test_rows_that_the_trainer_had_at_a_crash_and_has_no_more_are_made_again():
    table = in_the_middle()
    table.select(2)
    restored = new_table(max_staleness=1)
    restore(restored, plain(snapshot(table)), FakePrompts(), None)
    restored.give_back()
    assert (list(restored.live.unsampled), restored.live.complete, restored.live.sampled) == ([2, 3, 4, 5], 0, {})
    assert lease_of(restored, "r0").row_id == 2
    assert restored.ledger.tokens.dropped == {"lost": 3 * 30}
    restored.check()


def test_leases_after_a_crash_have_names_that_none_before_had():
    table = in_the_middle()
    before = lease_of(table, "r0").id
    restored = new_table(max_staleness=1)
    restore(restored, plain(snapshot(table)), FakePrompts(), None)
    again = new_table(max_staleness=1)
    restore(again, plain(snapshot(restored)), FakePrompts(), None)
    assert before < lease_of(restored, "r0").id < lease_of(again, "r0").id


def test_a_snapshot_needs_a_fresh_table_the_same_number_of_columns_and_as_many_prompts():
    taken = cut(in_the_middle())
    with pytest.raises(ValueError, match="into a fresh table only; this one has 6 rows behind it"):
        restore(in_the_middle(), taken.state, FakePrompts(), taken.references)
    with pytest.raises(ValueError, match="1 columns were given for a state of 5"):
        restore(new_table(), taken.state, FakePrompts(), ["x"])
    with pytest.raises(ValueError, match="the prompts end at 5, but 6 were taken before"):
        restore(new_table(), taken.state, FakePrompts(5), taken.references)


def test_columns_of_a_prompt_that_the_source_does_not_give_any_more_are_not_used():
    taken = cut(in_the_middle())
    taken.state["filled"][0]["prompt"] = "another"
    restored = new_table(max_staleness=1)
    restore(restored, taken.state, FakePrompts(), taken.references)
    assert restored.rows[2].columns == {}
    assert restored.rows[3].columns == {"rollout": "rollout-3", "reward": "reward-3"}
    assert restored.ledger.tokens.dropped == {"lost": 30}


def new_buffer(saved: list[Any], **settings: Any) -> Buffer:
    return Buffer(
        BufferConfig(max_staleness=1, **settings),
        FakePrompts(),
        stages=("rollout", "reward"),
        groups_per_step=2,
        every=1,
        samples=4,
        total_rows=None,
        seed=1,
        save=lambda state: saved.append(plain(state)),
    )


async def crash(saved: list[Any]) -> Buffer:
    """A buffer that goes on from what the one before saved last."""
    buffer = new_buffer(saved)
    buffer.restore(saved[-1])
    buffer.attach(FakeMaker())
    buffer.attach(reward_maker())
    await settle()
    return buffer


def test_the_state_is_saved_before_the_trainer_hears_that_something_changed():
    async def scenario() -> None:
        saved: list[Any] = []
        buffer = new_buffer(saved)
        buffer.attach(FakeMaker())
        buffer.attach(reward_maker())
        buffer.published(0, 0)
        assert saved[-1]["versions"]["published"] == 0
        rows = [row.row_id for row in await buffer.sample(2, timeout=5)]
        assert saved[-1]["sampled"] == rows
        buffer.trained(rows, 1)
        assert saved[-1]["ledger"]["rows"]["trained"] == 2
        rows = [row.row_id for row in await buffer.sample(2, timeout=5)]
        buffer.dropped(rows, "filtered")
        assert saved[-1]["ledger"]["rows"]["dropped"] == {"filtered": 2}

    asyncio.run(scenario())


def test_a_loop_whose_buffer_crashes_after_every_word_trains_each_row_once():
    async def scenario() -> None:
        saved: list[Any] = []
        buffer = new_buffer(saved)
        buffer.published(0, 0)
        trained: list[int] = []
        for step in range(1, 6):
            buffer = await crash(saved)
            await buffer.sample(2, timeout=5)
            buffer = await crash(saved)  # the answer was lost
            rows = [row.row_id for row in await buffer.sample(2, timeout=5)]
            buffer = await crash(saved)
            buffer.trained(rows, step)
            buffer = await crash(saved)
            buffer.trained(rows, step)
            trained += rows
            buffer.published(step, step)
            buffer = await crash(saved)
            buffer.published(step, step)
        assert trained == list(range(10))
        ledger = buffer.status()["ledger"]
        assert (ledger["rows"]["trained"], ledger["tokens"]["trained"]) == (10, 400)

    asyncio.run(scenario())


def test_makers_that_were_unrouted_at_a_crash_are_unrouted_after_it():
    async def scenario() -> None:
        saved: list[Any] = []
        buffer = new_buffer(saved)
        buffer.published(0, 0)
        await buffer.unroute(["maker/rollout/0"])
        buffer = await crash(saved)
        assert buffer.status()["makers"]["maker/rollout/0"]["state"] == "unrouted"
        buffer.route(["maker/rollout/0"])
        assert saved[-1]["unrouted"] == []
        assert len(await buffer.sample(2, timeout=5)) == 2

    asyncio.run(scenario())


def test_the_state_of_ten_thousand_rows_is_taken_in_some_milliseconds():
    table = new_table(max_staleness=0, groups_per_step=10_000)
    table.published(0, 0)
    fill(table)
    complete_all(table)
    seconds = []
    for _ in range(5):
        begun = time.perf_counter()
        json.dumps(snapshot(table))
        seconds.append(time.perf_counter() - begun)
    assert min(seconds) < 0.1  # measured: 2 ms
