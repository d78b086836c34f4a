"""The price of each selection order, proved by adversarial play and reported from a simulation in virtual time."""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer.config import BufferConfig
from buffer.records import Lease, MakerInfo, Prompt
from buffer.table import ExperienceTable, worst_case_age
from tests.fakes import ManualClock, answer

MAKER = MakerInfo("maker", "rollout", "rollout", (), 64)


def new_table(order: str, window: int, max_staleness: int, groups: int, every: int, clock=None) -> ExperienceTable:
    config = BufferConfig(order=order, window=window, max_staleness=max_staleness)
    table = ExperienceTable(
        config,
        stages=("rollout",),
        groups_per_step=groups,
        every=every,
        samples=1,
        total_rows=None,
        seed=0,
        clock=clock or ManualClock(),
    )
    table.attach(MAKER)
    table.published(0, 0)
    return table


def fill(table: ExperienceTable) -> None:
    while table.stalled_by() is None:
        table.admit(Prompt(f"p{table.ledger.rows.admitted}", "x"))


@dataclass
class Trainer:
    """Samples, trains and publishes; remembers the ages it saw."""

    table: ExperienceTable
    step: int = 0
    ages: dict[int, int] = field(default_factory=dict)

    def try_step(self) -> bool:
        rows = self.table.select(self.table.groups_per_step)
        if rows is None:
            return False
        self.ages.update({row.row_id: row.age for row in rows})
        self.step += 1
        self.table.trained([row.row_id for row in rows], self.step)
        if self.step % self.table.versions.every == 0:
            self.table.published(self.step // self.table.versions.every, self.step)
        return True


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 3])
@pytest.mark.parametrize(("groups", "every"), [(1, 1), (2, 1), (3, 1), (4, 2), (8, 1)])
@pytest.mark.parametrize("window", [0, 1, 3, 7, 20])
def test_the_worst_case_age_is_reached_by_the_slowest_last_row(
    max_staleness: int, groups: int, every: int, window: int
):
    table = new_table("window", window, max_staleness, groups, every)
    fill(table)
    victim = table.capacity - 1
    trainer, held = Trainer(table), None
    while victim not in trainer.ages:
        fill(table)
        while (lease := table.lease("maker")) is not None:
            if lease.row_id == victim:
                held = lease
            else:
                table.commit(lease.id, answer(lease, table.versions.newest), None)
        if not trainer.try_step():
            assert held is not None
            table.commit(held.id, answer(held), None)
            trainer.try_step()
    assert trainer.ages[victim] == worst_case_age("window", window, max_staleness, groups, every)


@settings(max_examples=60, deadline=None)
@given(
    order=st.sampled_from(["fifo", "window", "ready"]),
    window=st.integers(0, 12),
    max_staleness=st.integers(0, 3),
    groups=st.integers(1, 4),
    every=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_no_play_of_slow_and_failing_rows_goes_above_the_worst_case_age(
    order, window, max_staleness, groups, every, seed
):
    chance = random.Random(seed)
    table = new_table(order, window, max_staleness, groups, every)
    trainer, leases = Trainer(table), list[Lease]()
    for _ in range(300):
        fill(table)
        while (lease := table.lease("maker")) is not None:
            leases.append(lease)
        action = chance.random()
        if action < 0.6 and leases:
            lease = leases.pop(int(chance.random() ** 2 * len(leases)))
            table.commit(lease.id, answer(lease), None)
        elif action < 0.65 and leases:
            table.fail(leases.pop(chance.randrange(len(leases))).id, "data", "too long")
        else:
            trainer.try_step()
    bound = worst_case_age(order, window, max_staleness, groups, every)
    assert max(trainer.ages.values(), default=0) <= bound == table.max_age


@dataclass
class Outcome:
    max_age: int
    trainer_idle: float
    stale: int


def simulate(order: str, window: int = 0, steps: int = 300) -> Outcome:
    """8 rows a step, max_staleness 2, 64 slots, capped lognormal durations (median 1), a trainer step of 0.5."""
    chance, clock = random.Random(3), ManualClock()
    table = new_table(order, window, max_staleness=2, groups=8, every=1, clock=clock)
    trainer, order_of_events = Trainer(table), itertools.count()
    events: list[tuple[float, int, Lease | None]] = [(0.0, next(order_of_events), None)]
    trainer_free_at = busy = 0.0
    while trainer.step < steps:
        clock.now, _, lease = heapq.heappop(events)
        if lease is not None:
            table.commit(lease.id, answer(lease), None)
        if clock.now >= trainer_free_at and trainer.try_step():
            trainer_free_at, busy = clock.now + 0.5, busy + 0.5
            heapq.heappush(events, (trainer_free_at, next(order_of_events), None))
        fill(table)
        while len(table.work.leases) < 64 and (new := table.lease("maker")) is not None:
            seconds = min(chance.lognormvariate(0.0, 1.0), 20.0)
            heapq.heappush(events, (clock.now + seconds, next(order_of_events), new))
    return Outcome(max(trainer.ages.values()), 1 - busy / clock.now, table.ledger.rows.dropped.get("stale", 0))


def test_in_virtual_time_a_looser_order_buys_a_busier_trainer_and_pays_in_age_or_in_dropped_rows():
    fifo, window, ready = simulate("fifo"), simulate("window", 7), simulate("ready")
    assert (fifo.max_age, fifo.stale) == (2, 0)
    assert 2 <= window.max_age <= worst_case_age("window", 7, 2, 8, 1) == 3
    assert window.stale == 0
    assert ready.max_age <= 2
    assert ready.stale > 0
    assert fifo.trainer_idle > window.trainer_idle > ready.trainer_idle
