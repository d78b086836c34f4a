from __future__ import annotations

import json

import pytest

from buffer.report import table_status, who_waits
from buffer.snapshot import snapshot
from tests.fakes import ManualClock, answer
from tests.unit.buffer.tables import complete_all, fill, lease_of, new_table, train


def test_fifo_waits_for_the_oldest_row_and_ready_does_not():
    for order, expected in (("fifo", None), ("ready", [1, 2])):
        table = new_table(order=order)
        table.published(0, 0)
        fill(table)
        slow = lease_of(table, "r0")
        complete_all(table)
        rows = table.select(2)
        assert (rows and [row.row_id for row in rows]) == expected
        table.commit(slow.id, answer(slow), "tokens")


def test_window_takes_rows_up_to_so_many_ids_beyond_the_oldest():
    table = new_table(order="window", window=2, max_staleness=2)
    table.published(0, 0)
    fill(table)
    slow = lease_of(table, "r0")
    complete_all(table)
    assert [row.row_id for row in table.select(2) or []] == [1, 2]
    assert table.select(2) is None
    assert table.live.complete == 3
    table.commit(slow.id, answer(slow), "tokens")


def test_ready_drops_rows_that_grew_too_old_as_stale():
    table = new_table(order="ready", max_staleness=1)
    table.published(0, 0)
    fill(table)
    slow = lease_of(table, "r0")
    for step in (1, 2):
        complete_all(table)
        train(table, step)
        fill(table)
    table.commit(slow.id, answer(slow), "tokens")
    complete_all(table)
    rows = table.select(2)
    assert [(row.row_id, row.age) for row in rows or []] == [(5, 1), (6, 0)]
    assert table.ledger.rows.dropped == {"stale": 1}
    assert (0 in table.rows, table.live.complete, len(table.live.unsampled)) == (False, 1, 1)


def test_the_trainer_is_told_about_wrong_rows_steps_and_versions():
    table = new_table()
    table.published(0, 0)
    fill(table)
    complete_all(table)
    with pytest.raises(ValueError, match=r"rows \[0\]: not sampled"):
        table.trained([0], 1)
    rows = [row.row_id for row in table.select(2) or []]
    with pytest.raises(ValueError, match="steps count from 1"):
        table.trained(rows, 0)
    with pytest.raises(ValueError, match="named twice"):
        table.trained([0, 0], 1)
    table.trained(rows, 1)
    with pytest.raises(ValueError, match=r"rows \[0, 1\]: .*done with already"):
        table.trained(rows, 2)
    with pytest.raises(ValueError, match="version -1 of step 1 was published"):
        table.published(-1, 1)


def test_what_the_trainer_says_twice_changes_nothing_the_second_time():
    table = new_table()
    table.published(0, 0)
    fill(table)
    complete_all(table)
    trained = train(table, 1)
    dropped = [row.row_id for row in table.select(2) or []]
    table.dropped(dropped, "filtered")
    fill(table)
    before = snapshot(table)
    table.trained(trained, 1)
    table.published(1, 1)
    table.published(0, 0)
    table.dropped(dropped, "filtered")
    assert snapshot(table) == before


def test_a_version_published_for_too_few_rows_is_found_when_a_row_is_too_old():
    table = new_table(max_staleness=1)
    table.published(0, 0)
    fill(table)
    complete_all(table)
    table.published(5, 5)
    with pytest.raises(RuntimeError, match="row 0 .* has age 5, above the bound 1 of order fifo"):
        table.select(2)


def test_who_waits_names_row_stage_maker_and_seconds():
    clock = ManualClock()
    table = new_table(clock, stages=("rollout", "reward", "judge"), max_staleness=0)
    table.published(0, 0)
    fill(table)
    rollout = lease_of(table, "r0")
    table.commit(rollout.id, answer(rollout), "tokens")
    lease_of(table, "s0")
    clock.now = 3.0
    assert who_waits(table, clock) == (
        "row 0 (prompt 'p0') waits for reward (on s0 for 3.0 s), judge (no maker was ever attached); "
        "row 1 (prompt 'p1') waits for rollout (a free slot on one of 1 makers), judge (no maker was ever attached); "
        "no row is admitted because of: staleness (2 of 2 rows in flight, 0 of them trained for a version that is not "
        "published; 300 of 2147483648 bytes; published version 0)"
    )


def test_the_status_counts_rows_by_stage():
    table = new_table(max_staleness=1)
    table.published(0, 0)
    fill(table)
    complete_all(table)
    train(table, 1)
    fill(table)
    lease_of(table, "r0")
    status = json.loads(json.dumps(table_status(table)))
    assert status["rows"] == {
        "rollout/waiting": 1,
        "reward/waiting": 0,
        "rollout/leased": 1,
        "reward/leased": 0,
        "complete": 2,
        "sampled": 0,
        "unpublished": 0,
    }
    assert status["ledger"]["rows"] == {"admitted": 6, "trained": 2, "dropped": {}, "in_flight": 4}
    assert status["ledger"]["tokens"] == {"admitted": 120, "trained": 60, "dropped": {}, "in_flight": 60}
    assert status["age"] == {"mean": 1.0, "max": 1, "bound": 1}
    assert status["admission_stalled_by"] == "staleness"


@pytest.mark.parametrize(("max_staleness", "every"), [(0, 2), (1, 2), (1, 3), (2, 3)])
def test_a_run_that_goes_on_between_two_versions_keeps_the_staleness_bound(max_staleness: int, every: int):
    for first_step in range(every, 2 * every):
        table = new_table(max_staleness=max_staleness, every=every, first_step=first_step)
        table.published(first_step // every, first_step)
        for step in range(first_step + 1, first_step + 6 * every):
            fill(table)
            complete_all(table)
            train(table, step, publish=step % every == 0)  # raises if a row is too old
        assert table.steps.unpublished == step % every * table.groups_per_step
