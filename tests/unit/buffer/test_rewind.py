"""A trainer that begins again from a step before, and columns that are lost."""

from __future__ import annotations

import asyncio

import pytest

from buffer.records import MakerInfo
from buffer.table import ExperienceTable
from tests.fakes import FakeMaker, reward_maker, settle
from tests.unit.buffer.tables import complete_all, fill, lease_of, new_table, train
from tests.unit.buffer.test_buffer import new_buffer


def after_step(step: int, **settings: int) -> ExperienceTable:
    table = new_table(**settings)
    table.published(0, 0)
    for done in range(1, step + 1):
        fill(table)
        complete_all(table)
        train(table, done)
    fill(table)
    complete_all(table)
    return table


def test_rows_of_later_steps_are_dropped_and_never_trained_again():
    table = after_step(3, max_staleness=2)
    table.rewind(1)
    assert table.ledger.rows.dropped == {"rewound": 4}
    assert table.ledger.tokens.dropped == {"rewound": 4 * 30}
    assert (table.ledger.rows.trained, table.versions.step) == (2, 1)
    table.published(4, 1)
    assert table.select(2) is None  # the next two are too old now, and made again
    complete_all(table)
    assert train(table, 2, publish=False) == [6, 7]
    table.published(5, 2)
    assert (table.ledger.rows.trained, table.ledger.rows.dropped) == (4, {"rewound": 4})


def test_rows_that_the_trainer_had_wait_for_it_again():
    table = after_step(1, max_staleness=2)
    rows = [row.row_id for row in table.select(2) or []]
    table.rewind(1)
    table.published(2, 1)
    assert [row.row_id for row in table.select(2) or []] == rows


def test_total_rows_counts_again_from_the_step_that_the_trainer_went_back_to():
    table = after_step(2, total_rows=6, max_staleness=2)
    assert (table.stalled_by(), table.rows_to_come(False)) == ("total rows", 2)
    table.rewind(1)
    table.published(3, 1)
    assert table.rows_to_come(False) == 4
    assert fill(table) == [6, 7]


def test_rows_above_the_bound_after_a_rewind_are_made_again_with_newer_weights():
    table = after_step(2, max_staleness=0)
    table.rewind(2)
    assert [row.id for row in table.rows.values() if row.complete] == [4, 5]
    table.published(3, 2)  # the same weights as version 2, but nothing says so of those that were published since
    assert table.select(2) is None
    assert table.ledger.tokens.dropped == {"stale": 60}
    assert lease_of(table, "r0").min_version == 3
    complete_all(table)
    assert table.rows.keys() == {4, 5}


def test_between_two_versions_the_rows_of_the_steps_since_the_last_one_are_charged_again():
    table = new_table(max_staleness=0, every=2)
    table.published(0, 0)
    fill(table)
    complete_all(table)
    for step in (1, 2):
        train(table, step, publish=False)
    table.published(1, 2)
    assert table.steps.unpublished == 0
    table.rewind(1)
    table.published(2, 1)
    assert (table.steps.unpublished, fill(table)) == (2, [4, 5])
    complete_all(table)
    train(table, 2, publish=False)
    table.published(3, 2)
    assert table.steps.unpublished == 0


def test_the_version_after_a_rewind_is_larger_than_all_before():
    table = after_step(2)
    table.rewind(1)
    with pytest.raises(ValueError, match="version 2 was published after a rewind to step 1, but there was version 2"):
        table.published(2, 1)
    for _ in range(2):
        table.published(3, 1)
    assert (table.versions.published, table.versions.newest) == (3, 3)


def test_a_step_that_was_never_done_cannot_be_gone_back_to():
    with pytest.raises(ValueError, match="rewind to step 3: only steps 0 to 2 are known"):
        after_step(2).rewind(3)


def test_who_waits_for_rows_when_the_trainer_is_rewound_gets_none():
    async def scenario() -> None:
        buffer = new_buffer(makers=False)
        buffer.published(0, 0)
        waiting = asyncio.create_task(buffer.sample(2, timeout=5))
        await settle()
        buffer.rewind(0)
        with pytest.raises(RuntimeError, match="the trainer was rewound"):
            await waiting

    asyncio.run(scenario())


def test_lost_columns_are_made_again_with_all_that_was_made_from_them():
    table = new_table(stages=("rollout", "reward", "teacher"))
    table.attach(MakerInfo("t0", "teacher", "teacher", ("rollout",), 4))
    table.published(0, 0)
    fill(table)
    complete_all(table)
    assert set(table.rows[0].columns) == {"rollout", "reward"}
    teacher = lease_of(table, "t0")
    assert table.lost(0, ["rollout"], "the node died") == [teacher]
    assert (table.rows[0].columns, table.rows[0].leases) == ({}, {})
    assert (table.failures.counts, table.ledger.tokens.dropped) == ({"infra": 1}, {"lost": 30})
    assert table.lost(1, ["reward"], "the node died") == []
    assert table.rows[1].columns == {"rollout": "rollout-1"}
    assert lease_of(table, "r0").row_id == 0
    assert lease_of(table, "s0").row_id == 1
    table.check()


def test_a_row_that_the_trainer_could_not_fetch_is_not_its_any_more():
    table = after_step(0)
    assert [row.row_id for row in table.select(2) or []] == [0, 1]
    table.lost(0, ["rollout"], "the node died")
    with pytest.raises(ValueError, match=r"rows \[0\]: not sampled"):
        table.trained([0, 1], 1)
    table.give_back()
    complete_all(table)
    assert train(table, 1) == [0, 1]
    assert table.ledger.tokens.dropped == {"lost": 30}


def test_losses_told_twice_or_of_rows_that_are_done_with_change_nothing():
    table = after_step(1)
    table.lost(2, ["rollout"], "the node died")
    for row in (0, 2):
        assert table.lost(row, ["rollout"], "the node died") == []
    assert table.failures.counts == {"infra": 1}


def test_a_row_whose_columns_are_lost_again_and_again_ends_the_run():
    table = after_step(0, max_attempts=2)
    for _ in range(2):
        assert table.failures.cause is None
        table.lost(0, ["reward"], "the node died")
        complete_all(table)
    assert table.failures.cause == (
        "row 0 (prompt 'p0'): its columns were lost 2 times (buffer.max_attempts is 2), the last time those of reward: "
        "the node died"
    )


def test_a_trainer_that_lost_columns_gets_the_row_when_it_is_made_again():
    async def scenario() -> None:
        buffer = new_buffer(makers=False)
        rollout = FakeMaker()
        for maker in (rollout, reward_maker()):
            buffer.attach(maker)
        buffer.published(0, 0)
        rows = await buffer.sample(2, timeout=5)
        buffer.lost(rows[0].row_id, ["rollout"], "the node died")
        again = await buffer.sample(2, timeout=5)
        assert [row.row_id for row in again] == [row.row_id for row in rows]
        assert [lease.row_id for lease in rollout.leases].count(rows[0].row_id) == 2

    asyncio.run(scenario())
