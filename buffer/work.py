"""The open work of a table: which rows wait for which stage, and who has a lease on what."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from buffer.records import Lease
from buffer.roster import Roster
from buffer.rows import Row, StageQueue


@dataclass(frozen=True, slots=True)
class OpenLease:
    lease: Lease
    since: float  # clock seconds


class OpenWork:
    """A stage of a row that is not filled waits for a lease, or has one, or needs a stage that is not filled either."""

    def __init__(self, stages: Sequence[str], rows: Mapping[int, Row], roster: Roster) -> None:
        self.waiting = {stage: StageQueue() for stage in stages}
        self.leases: dict[int, OpenLease] = {}
        self._of_maker: dict[str, set[int]] = {}
        self._rows = rows
        self._roster = roster

    def add_maker(self, name: str) -> None:
        self._of_maker[name] = set()

    def relay(self, stage: str) -> None:
        """The stage has a route more."""
        self.waiting[stage].relay(lambda row_id: self._roster.takers(stage, self._rows[row_id].prompt))

    def remove_maker(self, name: str) -> list[Lease]:
        """Its leases, which have ended."""
        ended = [self.end(lease_id) for lease_id in sorted(self._of_maker[name])]
        del self._of_maker[name]
        return ended

    def enqueue(self, row: Row, again: str | None = None) -> None:
        """Lets the row wait for each stage that can be made now; stage `again` apart, since it failed before."""
        needs = self._roster.needs
        for stage, queue in self.waiting.items():
            if stage in row.columns or stage in row.leases or stage not in needs or row.id in queue:
                continue
            if all(need in row.columns for need in needs[stage]):
                queue.push(row.id, self._roster.takers(stage, row.prompt), again=stage == again)

    def next_for(self, maker: str) -> tuple[Row, str] | None:
        """The oldest row that waits for the maker's stage, and may be given to this maker, and the stage."""
        info = self._roster.makers[maker]
        stage = info.stage
        row_id = self.waiting[stage].pop(info.route, lambda waiting: self._may_retry(self._rows[waiting], stage, maker))
        return None if row_id is None else (self._rows[row_id], stage)

    def open(self, lease: Lease, now: float) -> None:
        self._rows[lease.row_id].leases[lease.stage] = lease.id
        self.leases[lease.id] = OpenLease(lease, now)
        self._of_maker[lease.maker].add(lease.id)

    def end(self, lease_id: int) -> Lease:
        lease = self.leases.pop(lease_id).lease
        del self._rows[lease.row_id].leases[lease.stage]
        self._of_maker[lease.maker].remove(lease_id)
        return lease

    def call_off(self, row: Row, stages: Collection[str]) -> list[Lease]:
        """The row waits for none of these stages; those of its leases that have ended with that."""
        for stage in stages:
            self.waiting[stage].discard(row.id)
        return [self.end(lease_id) for stage, lease_id in list(row.leases.items()) if stage in stages]

    def _may_retry(self, row: Row, stage: str, maker: str) -> bool:
        failed_by = row.failed_by.get(stage, set())
        return maker not in failed_by or failed_by >= self._roster.takers_by_name(stage, row.prompt)
