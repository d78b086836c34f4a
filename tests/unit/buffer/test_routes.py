"""Routes: a row goes to those makers of a stage whose route takes its prompt, and to no others."""

from __future__ import annotations

import json

from buffer.config import BufferConfig, Route
from buffer.records import MakerInfo, Prompt
from buffer.report import who_waits
from buffer.snapshot import restore, snapshot
from buffer.table import ExperienceTable
from tests.fakes import FakePrompts, ManualClock, answer
from tests.unit.buffer.tables import lease_of

MATH, CODE = Route(column="domain", values=("math", "logic")), Route(column="domain", values=("code",))


def teacher(name: str, route: Route | None) -> MakerInfo:
    return MakerInfo(name, "teacher", "teacher", (), 4, route)


def new_table(*makers: MakerInfo, routes: tuple[Route | None, ...] = (MATH, CODE), **settings) -> ExperienceTable:
    config = BufferConfig(max_staleness=9, **settings)
    table = ExperienceTable(
        config, stages=("teacher",), groups_per_step=4, every=1, samples=1, total_rows=None, seed=5,
        clock=ManualClock(), routes={"teacher": routes},
    )  # fmt: skip
    for info in makers:
        table.attach(info)
    table.published(0, 0)
    return table


def admit(table: ExperienceTable, *domains: str | None) -> list[int]:
    return [table.admit(Prompt(f"p{domain}", "x", {} if domain is None else {"domain": domain})) for domain in domains]


def leased(table: ExperienceTable, maker: str) -> list[int]:
    rows = []
    while (lease := table.lease(maker)) is not None:
        rows.append(lease.row_id)
    return rows


def test_a_row_is_leased_oldest_first_by_makers_whose_route_takes_its_prompt_only():
    table = new_table(teacher("m", MATH), teacher("c", CODE))
    admit(table, "math", "code", "logic", "code", "math")
    assert (table.ready("teacher", MATH), table.ready("teacher", CODE)) == (3, 2)
    assert (leased(table, "c"), leased(table, "m")) == ([1, 3], [0, 2, 4])


def test_a_maker_without_a_route_takes_every_row_and_shares_those_of_a_route():
    table = new_table(teacher("m", MATH), teacher("all", None), routes=(MATH, None))
    admit(table, "code", "math", "law", "math")
    assert lease_of(table, "m").row_id == 1
    assert leased(table, "all") == [0, 2, 3]


def test_a_missing_column_is_null_and_a_number_is_no_truth_value():
    route = Route(column="domain", values=(None, 1))
    assert [route.takes(fields) for fields in ({}, {"domain": None}, {"domain": 1}, {"domain": True}, {"domain": "1"})] == [
        True, True, True, False, False,
    ]  # fmt: skip


def test_routes_meet_when_some_row_could_be_taken_by_both():
    assert not MATH.meets(CODE)
    assert MATH.meets(None)
    assert MATH.meets(Route(column="domain", values=("code", "logic")))
    assert MATH.meets(Route(column="source", values=("code",)))


def test_a_row_that_no_group_takes_fails_as_data_with_the_routes_and_its_value_and_is_replaced():
    table = new_table(teacher("m", MATH), max_data_failures=1)
    admit(table, "law", "math")
    assert list(table.rows) == [1]
    assert table.ledger.rows.dropped == {"data": 1}
    assert table.failures.last_of_data == (
        "row 0 (prompt 'plaw'): no group of makers fills `teacher` of it: its domain is 'law', and the routes are domain in "
        "['code']; domain in ['math', 'logic']. Add a group with that value in its `route`, or one without a route"
    )
    admit(table, "law")
    assert table.failures.cause is not None
    assert "2 rows failed as data" in table.failures.cause
    table.check()


def test_a_row_of_a_declared_route_waits_for_its_makers_and_says_so():
    table = new_table(teacher("m", MATH))
    admit(table, "code")
    assert leased(table, "m") == []
    assert "row 0 (prompt 'pcode') waits for teacher (no maker that takes it is there)" in who_waits(table, table.clock)
    table.attach(teacher("c", CODE))
    assert leased(table, "c") == [0]


def test_a_route_that_comes_later_takes_rows_that_wait_already():
    table = new_table(teacher("all", None), routes=(None,))
    admit(table, "math", "code", "math")
    table.attach(teacher("m", MATH))
    assert leased(table, "m") == [0, 2]
    assert leased(table, "all") == [1]


def test_a_row_that_failed_on_every_maker_of_its_route_may_be_tried_by_them_again():
    table = new_table(teacher("m", MATH), teacher("n", MATH), teacher("c", CODE))
    admit(table, "math")
    table.fail(lease_of(table, "m").id, "infra", "broken")
    assert leased(table, "m") == []
    table.fail(lease_of(table, "n").id, "infra", "broken")
    assert leased(table, "c") == []
    assert leased(table, "m") == [0]


class Domains(FakePrompts):
    """math, code, math, ..."""

    def next(self) -> Prompt | None:
        prompt = super().next()
        return prompt and Prompt(prompt.id, prompt.content, {"domain": ("math", "code")[(self.cursor - 1) % 2]})


def test_a_restored_table_keeps_its_routes_also_before_any_maker_is_attached():
    prompts, table = Domains(), new_table(teacher("m", MATH), teacher("c", CODE))
    for _ in range(4):
        table.admit(prompts.next())
    lease = lease_of(table, "m")
    table.commit(lease.id, answer(lease), "columns")
    state = json.loads(json.dumps(snapshot(table)))
    again = ExperienceTable(
        table.config, stages=("teacher",), groups_per_step=4, every=1, samples=1, total_rows=None, seed=5,
        clock=ManualClock(), routes={"teacher": (MATH, CODE)},
    )  # fmt: skip
    restore(again, state, Domains(), None)
    again.attach(teacher("m", MATH))
    again.attach(teacher("c", CODE))
    assert (leased(again, "c"), leased(again, "m")) == ([1, 3], [0, 2])
