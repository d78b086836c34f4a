from __future__ import annotations

from typing import Any

import pytest

from buffer.config import BufferConfig
from buffer.records import MakerInfo, Prompt
from buffer.table import ExperienceTable
from tests.fakes import answer
from tests.unit.buffer.tables import ROLLOUT, complete_all, fill, lease_of, new_table, train


def test_nothing_is_admitted_before_a_version_is_published_and_then_up_to_the_staleness_bound():
    table = new_table(max_staleness=1)
    assert table.stalled_by() == "no published version"
    with pytest.raises(ValueError, match="cannot be admitted now: no published version"):
        table.admit(Prompt("p", "x"))
    table.published(0, 0)
    assert fill(table) == [0, 1, 2, 3]
    assert table.stalled_by() == "staleness"


def test_a_row_is_charged_from_admission_until_the_version_it_helped_to_make_is_published():
    table = new_table(max_staleness=0, every=2)
    table.published(0, 0)
    assert fill(table) == [0, 1, 2, 3]
    complete_all(table)
    assert train(table, 1, publish=False) == [0, 1]
    assert (table.charged, table.steps.unpublished, fill(table)) == (4, 2, [])
    assert train(table, 2, publish=False) == [2, 3]
    assert (table.charged, fill(table)) == (4, [])
    table.published(1, 2)
    assert fill(table) == [4, 5, 6, 7]
    assert all(table.rows[row].min_version == 1 for row in (4, 5, 6, 7))


def test_a_dropped_row_is_freed_and_replaced_at_once():
    table = new_table(max_staleness=0)
    table.published(0, 0)
    fill(table)
    complete_all(table)
    assert [row.row_id for row in table.select(2) or []] == [0, 1]
    table.dropped([1], "filtered")
    assert fill(table) == [2]
    assert table.ledger.rows.dropped == {"filtered": 1}
    assert table.ledger.tokens.dropped == {"filtered": 30}


def test_a_stage_is_leased_only_when_what_it_needs_is_filled_and_gets_it_as_input():
    table = new_table()
    table.published(0, 0)
    fill(table)
    assert table.lease("s0") is None
    rollout = lease_of(table, "r0")
    table.commit(rollout.id, answer(rollout), "tokens")
    reward = lease_of(table, "s0")
    assert (reward.row_id, reward.stage, table.inputs(reward)) == (0, "reward", ["tokens"])


def test_leases_go_oldest_row_first_with_seeds_that_depend_on_run_row_and_attempt_only():
    first, second, other = new_table(), new_table(), new_table(seed=6)
    for table in (first, second, other):
        table.published(0, 0)
        fill(table)
    a, b, c = (lease_of(table, "r0") for table in (first, second, other))
    assert (a.row_id, a.seed) == (b.row_id, b.seed)
    assert a.seed != c.seed
    assert lease_of(first, "r0").row_id == 1
    first.fail(a.id, "infra", "broken")
    again = lease_of(first, "r0")
    assert (again.row_id, again.seed != a.seed) == (0, True)


def test_a_data_failure_drops_the_row_with_its_other_leases_and_is_budgeted():
    table = new_table(stages=("rollout", "reward", "teacher"), max_data_failures=1)
    table.attach(MakerInfo("t0", "teacher", "teacher", ("rollout",), 4))
    table.published(0, 0)
    fill(table)
    rollout = lease_of(table, "r0")
    table.commit(rollout.id, answer(rollout), "tokens")
    reward, teacher = lease_of(table, "s0"), lease_of(table, "t0")
    assert table.fail(reward.id, "data", "no answer field") == [teacher]
    assert 0 not in table.rows
    assert table.ledger.tokens.dropped == {"data": 30}
    assert table.failures.cause is None
    table.fail(lease_of(table, "r0").id, "data", "prompt too long")
    assert table.failures.cause is not None
    assert "2 rows failed as data" in table.failures.cause
    assert "row 1 (prompt 'p1'), rollout on r0: prompt too long" in table.failures.cause
    assert table.stalled_by() == "failure"


def test_a_dropped_row_waits_for_no_other_stage_any_more():
    table = new_table(stages=("rollout", "reward", "teacher"))
    table.attach(MakerInfo("t0", "teacher", "teacher", ("rollout",), 4))
    table.published(0, 0)
    fill(table)
    rollout = lease_of(table, "r0")
    table.commit(rollout.id, answer(rollout), "tokens")
    table.fail(lease_of(table, "s0").id, "data", "no answer field")
    assert (table.ready("teacher"), table.lease("t0")) == (0, None)


def test_a_complete_row_resets_the_count_of_data_failures():
    table = new_table(max_data_failures=1)
    table.published(0, 0)
    for _ in range(3):
        fill(table)
        table.fail(lease_of(table, "r0").id, "data", "too long")
        for maker in ("r0", "s0"):
            lease = lease_of(table, maker)
            table.commit(lease.id, answer(lease), lease.stage)
    assert table.failures.cause is None
    assert table.failures.counts["data"] == 3


def test_an_infrastructure_failure_is_tried_on_another_maker_first():
    table = new_table()
    table.attach(MakerInfo("r1", "rollout", "rollout", (), 4))
    table.published(0, 0)
    fill(table)
    table.fail(lease_of(table, "r0").id, "infra", "engine broken")
    assert lease_of(table, "r0").row_id == 1
    assert lease_of(table, "r1").row_id == 0


def test_a_sampled_row_says_which_maker_filled_each_stage_not_who_failed_it():
    table = new_table()
    table.attach(MakerInfo("r1", "rollout", "rollout", (), 4))
    table.published(0, 0)
    fill(table)
    table.fail(lease_of(table, "r0").id, "infra", "engine broken")
    lease = lease_of(table, "r1")
    table.commit(lease.id, answer(lease), "columns")
    complete_all(table)
    rows = table.select(2)
    assert rows is not None
    assert [row.makers for row in rows] == [{"rollout": "r1", "reward": "s0"}, {"rollout": "r0", "reward": "s0"}]


def test_a_row_that_every_maker_failed_is_tried_again_by_any_and_ends_the_run_after_max_attempts():
    table = new_table(max_attempts=3)
    table.published(0, 0)
    fill(table)
    for kind in ("infra", "timeout"):
        table.fail(lease_of(table, "r0").id, kind, "no answer")
        assert table.failures.cause is None
    table.fail(lease_of(table, "r0").id, "infra", "engine broken")
    assert table.failures.cause == (
        "row 0 (prompt 'p0'): rollout failed 3 times (buffer.max_attempts is 3), the last time on r0: engine broken"
    )
    assert 0 in table.rows  # not dropped in silence


def test_a_death_counts_as_an_attempt_and_a_detachment_does_not():
    table = new_table(max_attempts=2)
    table.published(0, 0)
    fill(table)
    lease = lease_of(table, "r0")
    assert table.detach("r0") == [lease]
    assert table.rows[0].attempts == {}
    table.attach(ROLLOUT)
    for _ in range(2):
        assert lease_of(table, "r0").row_id == 0
        table.detach("r0", death="killed")
        table.attach(ROLLOUT)
    assert table.failures.cause is not None
    assert table.failures.cause.endswith("the last time on r0: the maker died: killed")


def test_an_ended_lease_cannot_end_again():
    table = new_table()
    table.published(0, 0)
    fill(table)
    lease = lease_of(table, "r0")
    table.commit(lease.id, answer(lease), "tokens")
    with pytest.raises(KeyError):
        table.commit(lease.id, answer(lease), "tokens")
    with pytest.raises(KeyError):
        table.fail(lease.id, "infra", "late")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 2}, "2 samples, but 3 were asked for"),
        ({"min_version": 0}, "tokens of versions 0 to 1, but they lie between 1"),
        ({"max_version": 2}, "tokens of versions 1 to 2, but they lie between 1 .* and 1 "),
        ({"min_version": None}, "tokens of versions None to 1"),
        ({"nbytes": -1}, "-1 bytes"),
    ],
)
def test_an_answer_that_cannot_be_true_is_refused_and_the_lease_stays_open(changes: dict[str, Any], message: str):
    table = new_table()
    table.published(1, 1)
    fill(table)
    lease = lease_of(table, "r0")
    with pytest.raises(ValueError, match=message):
        table.commit(lease.id, answer(lease, **changes), "tokens")
    table.fail(lease.id, "infra", "refused")


def test_a_token_may_come_from_a_version_whose_publication_is_still_under_way():
    table = new_table()
    table.published(0, 0)
    fill(table)
    complete_all(table)
    train(table, 1, publish=False)
    table.dropped([row.row_id for row in table.select(2) or []], "filtered")
    fill(table)
    lease = lease_of(table, "r0")
    table.commit(lease.id, answer(lease, 0, max_version=1), "tokens")


def test_total_rows_stops_admission_so_that_nothing_is_made_for_nobody():
    table = new_table(total_rows=5, max_staleness=3)
    table.published(0, 0)
    assert fill(table) == [0, 1, 2, 3, 4]
    assert table.stalled_by() == "total rows"
    complete_all(table)
    train(table, 1)
    assert (fill(table), table.rows_to_come(False)) == ([], 3)
    sampled = [row.row_id for row in table.select(2) or []]
    table.dropped(sampled, "filtered")
    assert (table.rows_to_come(False), table.rows_to_come(True)) == (3, 1)
    assert fill(table) == [5, 6]


def test_admission_stalls_while_the_bytes_exceed_the_bound():
    table = new_table(max_bytes=1300, max_staleness=2)
    table.published(0, 0)
    assert len(fill(table)) == 6
    complete_all(table)  # 310 bytes a row
    train(table, 1)
    assert (table.live.nbytes, fill(table)) == (4 * 310, [6, 7])
    complete_all(table)
    assert (table.live.nbytes, table.stalled_by()) == (6 * 310, "staleness")
    train(table, 2, publish=False)
    table.published(2, 2)
    assert (table.live.nbytes, len(fill(table))) == (4 * 310, 2)
    complete_all(table)
    table.dropped([row.row_id for row in table.select(1) or []], "filtered")
    assert table.stalled_by() == "bytes"


def test_a_bound_in_bytes_that_one_step_exceeds_ends_the_run_with_the_remedy():
    table = new_table(max_bytes=299)
    table.published(0, 0)
    fill(table)
    lease = lease_of(table, "r0")
    table.commit(lease.id, answer(lease), "tokens")
    assert table.failures.cause is not None
    assert (
        "buffer.max_bytes is 299, but 1 rows already refer to 300 bytes and one step needs 2 rows"
        in table.failures.cause
    )
    assert "Set buffer.max_bytes to 1200 or more" in table.failures.cause


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (ROLLOUT, "attached already"),
        (MakerInfo("x", "x", "rollout", (), 0), "0 slots"),
        (MakerInfo("x", "x", "judge", (), 1), r"rows have no stage judge in this run, only \['rollout', 'reward'\]"),
        (MakerInfo("x", "x", "reward", ("teacher",), 1), "rows have no stage teacher"),
        (MakerInfo("x", "x", "reward", (), 1), r"stage reward needs \['rollout'\] in this run, not \[\]"),
    ],
)
def test_a_maker_that_does_not_fit_is_refused(info: MakerInfo, message: str):
    with pytest.raises(ValueError, match=message):
        new_table().attach(info)


def test_stages_that_need_each_other_are_refused():
    table = ExperienceTable(
        BufferConfig(), stages=("a", "b"), groups_per_step=1, every=1, samples=1, total_rows=None, seed=0
    )
    table.attach(MakerInfo("a0", "a", "a", ("b",), 1))
    with pytest.raises(ValueError, match="stage b would need itself"):
        table.attach(MakerInfo("b0", "b", "b", ("a",), 1))
