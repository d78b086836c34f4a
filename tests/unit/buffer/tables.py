"""A table of two stages with a maker for each, and the common moves on it."""

from __future__ import annotations

from typing import Any

from buffer.config import BufferConfig
from buffer.records import Lease, MakerInfo, Prompt
from buffer.table import ExperienceTable
from tests.fakes import ManualClock, answer

ROLLOUT = MakerInfo("r0", "rollout", "rollout", (), 4)
REWARD = MakerInfo("s0", "reward", "reward", ("rollout",), 4)


def new_table(clock: ManualClock | None = None, stages=("rollout", "reward"), **settings: Any) -> ExperienceTable:
    arguments = {"groups_per_step": 2, "every": 1, "samples": 3, "total_rows": None, "seed": 5, "first_step": 0}
    arguments |= {name: settings.pop(name) for name in list(settings) if name in arguments}
    table = ExperienceTable(BufferConfig(**settings), stages=stages, clock=clock or ManualClock(), **arguments)
    table.attach(ROLLOUT)
    if "reward" in stages:
        table.attach(REWARD)
    return table


def fill(table: ExperienceTable) -> list[int]:
    admitted = []
    while table.stalled_by() is None:
        admitted.append(table.admit(Prompt(f"p{table.ledger.rows.admitted}", "x")))
    return admitted


def lease_of(table: ExperienceTable, maker: str) -> Lease:
    lease = table.lease(maker)
    assert lease is not None
    return lease


def complete_all(table: ExperienceTable) -> None:
    for maker in ("r0", "s0"):
        while (lease := table.lease(maker)) is not None:
            table.commit(lease.id, answer(lease), f"{lease.stage}-{lease.row_id}")


def train(table: ExperienceTable, step: int, publish: bool = True) -> list[int]:
    rows = table.select(table.groups_per_step)
    assert rows is not None
    ids = [row.row_id for row in rows]
    table.trained(ids, step)
    if publish:
        table.published(step // table.versions.every, step)
    return ids
