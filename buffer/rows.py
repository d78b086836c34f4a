"""One row of the experience table, and the queue of rows that wait for a maker of one stage."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from buffer.config import Route
from buffer.records import Lease, Produced, Prompt


@dataclass(slots=True)
class Row:
    """One prompt group: its columns by stage, and what is still being made."""

    id: int
    prompt: Prompt
    min_version: int  # newest published version at admission: no token may be older
    admitted_at: float  # clock seconds
    complete: bool = False
    leases: dict[str, int] = field(default_factory=dict)  # stage -> open lease
    columns: dict[str, Any] = field(default_factory=dict)
    produced: dict[str, Produced] = field(default_factory=dict)  # of columns, and of those the trainer alone may have
    makers: dict[str, str] = field(default_factory=dict)  # stage -> who filled it
    attempts: dict[str, int] = field(default_factory=dict)  # stage -> failed leases
    failed_by: dict[str, set[str]] = field(default_factory=dict)  # stage -> makers that should not get it again
    losses: int = 0  # how often columns of it were lost

    @property
    def tokens(self) -> int:
        return sum(produced.tokens for produced in self.produced.values())

    @property
    def nbytes(self) -> int:
        return sum(self.produced[stage].nbytes for stage in self.columns)

    def age(self, version: int) -> int:
        """`version` minus the oldest token version; 0 for a row that no policy made (a dataset)."""
        return version - min(
            (p.min_version for p in self.produced.values() if p.min_version is not None), default=version
        )

    def __str__(self) -> str:
        return f"row {self.id} (prompt {self.prompt.id!r})"


Takers = frozenset[Route | None]  # of the routes of a stage, those that take a row


class StageQueue:
    """Rows that wait for a lease of one stage, oldest first: push and pop cost O(log rows).

    Rows that the same routes take wait in the same lane; without routes there is one. A maker looks at the lanes of its route.
    """

    def __init__(self) -> None:
        self._lanes: dict[Takers, _Lane] = {}
        self._lane_of: dict[int, _Lane] = {}

    def __len__(self) -> int:
        return len(self._lane_of)

    def __contains__(self, row_id: int) -> bool:
        return row_id in self._lane_of

    def for_route(self, route: Route | None) -> int:
        """Rows that a maker of this route may take."""
        return sum(len(lane) for takers, lane in self._lanes.items() if route in takers)

    def push(self, row_id: int, takers: Takers, again: bool) -> None:
        lane = self._lane_of[row_id] = self._lanes.setdefault(takers, _Lane())
        lane.push(row_id, again)

    def discard(self, row_id: int) -> None:
        lane = self._lane_of.pop(row_id, None)
        if lane is not None:
            lane.discard(row_id)

    def pop(self, route: Route | None, may_take: Callable[[int], bool]) -> int | None:
        """The oldest row for a maker of this route; `may_take` is asked about rows that failed before only."""
        lanes = [lane for takers, lane in self._lanes.items() if route in takers]
        row_id = min((row_id for lane in lanes for row_id in lane.again if may_take(row_id)), default=None)
        if row_id is None:
            row_id = min((first for lane in lanes if (first := lane.first()) is not None), default=None)
        if row_id is not None:
            self.discard(row_id)
        return row_id

    def relay(self, takers_of: Callable[[int], Takers]) -> None:
        """There is a route more: every row is put into its lane again. Costs O(rows), once for each route."""
        waiting = [(row_id, row_id in lane.again) for row_id, lane in self._lane_of.items()]
        self._lanes.clear()
        for row_id, again in waiting:
            self.push(row_id, takers_of(row_id), again)


class _Lane:
    """Rows in order of age. Those that failed on some maker wait apart (`again`), as not every maker may take them."""

    def __init__(self) -> None:
        self.again: set[int] = set()
        self._heap: list[int] = []
        self._waiting: set[int] = set()  # the truth: an id in the heap but not here was discarded

    def __len__(self) -> int:
        return len(self._waiting) + len(self.again)

    def push(self, row_id: int, again: bool) -> None:
        if again:
            self.again.add(row_id)
        else:
            self._waiting.add(row_id)
            heapq.heappush(self._heap, row_id)

    def discard(self, row_id: int) -> None:
        self._waiting.discard(row_id)
        self.again.discard(row_id)

    def first(self) -> int | None:
        """The oldest, of those that have not failed."""
        while self._heap and self._heap[0] not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None


def derive_seed(run_seed: int, row_id: int, attempt: int) -> int:
    """The same for the same run seed, whatever maker works on the row and when; below 2**48."""
    digest = hashlib.blake2b(f"{run_seed}/{row_id}/{attempt}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big")


def check_produced(produced: Produced, lease: Lease, newest: int) -> None:
    """Raises ValueError for an answer that cannot be true; `newest` is the newest version there is."""
    where = f"row {lease.row_id} (prompt {lease.prompt.id!r}), {lease.stage} on {lease.maker}"
    if produced.samples != lease.samples:
        raise ValueError(f"{where}: {produced.samples} samples, but {lease.samples} were asked for")
    if produced.tokens < 0 or produced.nbytes < 0:
        raise ValueError(f"{where}: {produced.tokens} tokens, {produced.nbytes} bytes")
    first, last = produced.min_version, produced.max_version
    if first is None and last is None:
        return
    if first is None or last is None or not lease.min_version <= first <= last <= newest:
        raise ValueError(
            f"{where}: tokens of versions {first} to {last}, but they lie between {lease.min_version} (newest when the "
            f"row was admitted) and {newest} (newest now)"
        )
