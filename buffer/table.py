"""The experience table: a pure, synchronous state machine over rows, columns and leases. It never waits and knows no maker.

Life of a row: admitted -> a lease for each stage, as the stages it needs are filled -> complete -> sampled -> trained or
dropped (with a reason). Invariants, asserted by the property tests:

1. Rows in flight (admitted, and neither dropped nor part of a published version) never exceed
   (max_staleness + 1) * groups_per_step * every. Admission paces; only `order: ready` discards finished work.
2. No row is sampled older than `worst_case_age`, and max_staleness 0 is exactly on-policy.
3. Every lease ends exactly once: committed, failed, expired or revoked. None outlives its maker or its row.
4. The ledger closes at all times, in rows and in tokens.
5. Nothing is admitted while the referred bytes exceed max_bytes, and a bound that would block for ever is a failure.
6. A snapshot restored (`buffer.snapshot`) is the same table: no row lost, none twice, the samples of a prompt together.

An event costs O(log rows), whatever the number of makers. A mistake of the caller raises ValueError (an ended lease or an
unknown maker: KeyError); what ends the run is put into `failure`, in words.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from buffer.config import BufferConfig
from buffer.ledger import Ledger
from buffer.records import Lease, MakerInfo, Produced, Prompt, SampledRow
from buffer.roster import Roster
from buffer.rows import Row, StageQueue, check_produced, derive_seed
from buffer.selection import choose, worst_case_age
from buffer.versions import Versions

__all__ = ["ExperienceTable", "FailureKind", "OpenLease", "worst_case_age"]

FailureKind = Literal["data", "infra", "timeout", "died"]


@dataclass(frozen=True, slots=True)
class OpenLease:
    lease: Lease
    since: float  # clock seconds


class ExperienceTable:
    """`stages` are the columns of a complete row; what a stage needs is told by the makers that fill it.

    `versions` and `lease_ids` are shared by tables that share makers. `first_step`: optimizer steps done before (resume);
    rows of those that are part of no version yet stay charged, or the next version would be made of fewer rows than the
    staleness bound counts on.
    """

    def __init__(
        self,
        config: BufferConfig,
        *,
        stages: Sequence[str],
        groups_per_step: int,
        every: int,
        samples: int,
        total_rows: int | None,
        seed: int,
        clock: Callable[[], float] = time.monotonic,
        versions: Versions | None = None,
        lease_ids: Iterator[int] | None = None,
        first_row: int = 0,
        first_step: int = 0,
    ) -> None:
        if not stages or len(set(stages)) != len(stages):
            raise ValueError(f"stages {list(stages)}: a row needs at least one stage, each named once")
        for name, value in (("groups_per_step", groups_per_step), ("every", every), ("samples", samples)):
            if value < 1:
                raise ValueError(f"{name} is {value}: it must be at least 1")
        self.config = config
        self.stages = tuple(stages)
        self.groups_per_step = groups_per_step
        self.samples = samples
        self.total_rows = total_rows
        self.capacity = (config.max_staleness + 1) * groups_per_step * every
        self.max_age = worst_case_age(config.order, config.window, config.max_staleness, groups_per_step, every)
        self.versions = versions or Versions(every)
        self.ledger = Ledger()
        self.rows: dict[int, Row] = {}  # live: neither trained nor dropped
        self.leases: dict[int, OpenLease] = {}
        self.roster = Roster(stages)
        self.waiting = {stage: StageQueue() for stage in stages}
        self.unsampled: OrderedDict[int, Row] = OrderedDict()
        self.complete = 0  # complete rows among the unsampled
        self.nbytes = 0
        self.failures: Counter[str] = Counter()
        self.failure: str | None = None
        self.last_data_failure: str | None = None
        self.data_failures_in_a_row = 0
        self.clock = clock
        self.next_row = first_row
        self._seed = seed
        self._lease_ids = lease_ids or itertools.count(1)
        self._leases_of: dict[str, set[int]] = {}
        self._rows_with_columns = 0
        self.unpublished_steps: deque[tuple[int, int]] = deque()  # (step, rows trained in it): still charged
        if first_step % every:
            self.unpublished_steps.append((first_step, first_step % every * groups_per_step))

    # Makers

    def attach(self, info: MakerInfo) -> None:
        """Raises ValueError for a maker whose name, stage or needs do not fit."""
        first = info.stage not in self.roster.needs
        self.roster.add(info)
        self._leases_of[info.name] = set()
        if first:
            for row in self.unsampled.values():
                self._enqueue(row)

    def detach(self, name: str, death: str | None = None) -> list[Lease]:
        """Forgets the maker and revokes its leases. With a cause of death each of its rows has failed an attempt."""
        self.roster.remove(name)
        revoked = [self._end(lease_id) for lease_id in sorted(self._leases_of[name])]
        del self._leases_of[name]
        for lease in revoked:
            row = self.rows[lease.row_id]
            if death is not None:
                self._count_attempt(row, lease, "died", f"the maker died: {death}")
            self._enqueue(row)
        return revoked

    # Admission

    @property
    def charged(self) -> int:
        """Rows in flight: live, or trained for a version that is not published yet."""
        return len(self.rows) + self.unpublished

    @property
    def unpublished(self) -> int:
        return sum(rows for _, rows in self.unpublished_steps)

    def stalled_by(self) -> str | None:
        """Why no row may be admitted now; None if one may."""
        if self.failure is not None:
            return "failure"
        if self.versions.published is None:
            return "no published version"
        if self.total_rows is not None and self.ledger.rows.trained + len(self.rows) >= self.total_rows:
            return "total rows"
        if self.charged >= self.capacity:
            return "staleness"
        if self.nbytes > self.config.max_bytes:
            return "bytes"
        return None

    def admit(self, prompt: Prompt, min_version: int | None = None) -> int:
        """The new row's id. Its tokens must not be older than `min_version` (default: the newest published version)."""
        reason = self.stalled_by()
        published = self.versions.published
        if reason is not None or published is None:
            raise ValueError(f"prompt {prompt.id!r} cannot be admitted now: {reason}")
        row = Row(self.next_row, prompt, published if min_version is None else min_version, self.clock())
        self.next_row += 1
        self.rows[row.id] = self.unsampled[row.id] = row
        self.ledger.rows.admit(1)
        self._enqueue(row)
        return row.id

    def put_back(self, row: Row) -> None:
        """A row of a snapshot; its columns and its place in the ledger come with it."""
        self.rows[row.id] = self.unsampled[row.id] = row
        self.nbytes += row.nbytes
        self._rows_with_columns += bool(row.columns)
        self._enqueue(row)

    def rows_to_come(self, prompts_finished: bool) -> int | None:
        """How many rows can still be sampled, if nothing fails; None while there is no end in sight."""
        if prompts_finished:
            return len(self.unsampled)
        if self.total_rows is None:
            return None
        return len(self.unsampled) + max(0, self.total_rows - self.ledger.rows.trained - len(self.rows))

    @property
    def oldest_unfinished(self) -> int:
        """The oldest row that is neither trained nor dropped, else the next one. Costs O(rows)."""
        return min(self.rows, default=self.next_row)

    # Leases

    def ready(self, stage: str) -> int:
        """Rows that wait for a lease of the stage; none once the run has failed."""
        return 0 if self.failure is not None else len(self.waiting[stage])

    def lease(self, maker: str) -> Lease | None:
        """The oldest row that waits for the maker's stage; None if there is none for this maker."""
        stage = self.roster.makers[maker].stage
        row_id = self.waiting[stage].pop(lambda waiting: self._may_retry(self.rows[waiting], stage, maker))
        if row_id is None:
            return None
        row = self.rows[row_id]
        lease = Lease(
            id=next(self._lease_ids),
            row_id=row_id,
            stage=stage,
            maker=maker,
            prompt=row.prompt,
            min_version=row.min_version,
            seed=derive_seed(self._seed, row_id, row.attempts.get(stage, 0)),
            samples=self.samples,
            timeout=self.config.lease_timeout,
        )
        row.leases[stage] = lease.id
        self.leases[lease.id] = OpenLease(lease, self.clock())
        self._leases_of[maker].add(lease.id)
        return lease

    def inputs(self, lease: Lease) -> list[Any]:
        """The columns the lease's stage needs, in the order of its needs."""
        columns = self.rows[lease.row_id].columns
        return [columns[stage] for stage in self.roster.needs[lease.stage]]

    def commit(self, lease_id: int, produced: Produced, columns: Any) -> None:
        """Fills the stage. An answer that cannot be true raises ValueError and leaves the lease open."""
        lease = self.leases[lease_id].lease
        check_produced(produced, lease, self.versions.newest)
        self._end(lease_id)
        row = self.rows[lease.row_id]
        self._rows_with_columns += not row.columns
        row.columns[lease.stage] = columns
        row.produced[lease.stage] = produced
        row.makers[lease.stage] = lease.maker
        self.nbytes += produced.nbytes
        self.ledger.tokens.admit(produced.tokens)
        self._enqueue(row)
        if self.nbytes > self.config.max_bytes and self._rows_with_columns < self.groups_per_step:
            self._fail_run(
                f"buffer.max_bytes is {self.config.max_bytes}, but {self._rows_with_columns} rows already refer to "
                f"{self.nbytes} bytes and one step needs {self.groups_per_step} rows: it would never be admitted. Set "
                f"buffer.max_bytes to {self.nbytes * self.groups_per_step // self._rows_with_columns * 2} or more"
            )

    def fail(self, lease_id: int, kind: FailureKind, text: str) -> list[Lease]:
        """Ends a lease without columns. Data failures drop the row; the others are tried again, elsewhere if possible.

        Returns the leases of other stages of the row that were revoked with it.
        """
        lease = self._end(lease_id)
        row = self.rows[lease.row_id]
        if kind != "data":
            row.failed_by.setdefault(lease.stage, set()).add(lease.maker)
            self._count_attempt(row, lease, kind, text)
            self._enqueue(row, again=lease.stage)
            return []
        self.failures[kind] += 1
        self.data_failures_in_a_row += 1
        self.last_data_failure = f"{row}, {lease.stage} on {lease.maker}: {text}"
        if self.data_failures_in_a_row > self.config.max_data_failures:
            self._fail_run(
                f"{self.data_failures_in_a_row} rows failed as data with no complete row between them "
                f"(buffer.max_data_failures is {self.config.max_data_failures}); the last: {self.last_data_failure}"
            )
        return self._remove(row, "data")

    def _end(self, lease_id: int) -> Lease:
        lease = self.leases.pop(lease_id).lease
        del self.rows[lease.row_id].leases[lease.stage]
        self._leases_of[lease.maker].remove(lease_id)
        return lease

    def _count_attempt(self, row: Row, lease: Lease, kind: FailureKind, text: str) -> None:
        self.failures[kind] += 1
        attempts = row.attempts[lease.stage] = row.attempts.get(lease.stage, 0) + 1
        if attempts >= self.config.max_attempts:
            self._fail_run(
                f"{row}: {lease.stage} failed {attempts} times (buffer.max_attempts is {self.config.max_attempts}), "
                f"the last time on {lease.maker}: {text}"
            )

    def _fail_run(self, text: str) -> None:
        self.failure = self.failure or text  # the first cause is the one to tell

    def _may_retry(self, row: Row, stage: str, maker: str) -> bool:
        failed_by = row.failed_by.get(stage, set())
        return maker not in failed_by or failed_by >= self.roster.names[stage]

    def _enqueue(self, row: Row, again: str | None = None) -> None:
        """Lets the row wait for each stage that can be made now; stage `again` apart, since it failed before."""
        for stage, queue in self.waiting.items():
            if stage in row.columns or stage in row.leases or stage not in self.roster.needs or row.id in queue:
                continue
            if all(need in row.columns for need in self.roster.needs[stage]):
                queue.push(row.id, again=stage == again)
        if not row.complete and len(row.columns) == len(self.stages):
            row.complete = True
            self.complete += 1
            self.data_failures_in_a_row = 0

    # The trainer's side

    def select(self, groups: int) -> list[SampledRow] | None:
        """The next `groups` rows, oldest first, or None if not so many may be taken now.

        With `order: ready` complete rows older than max_staleness are dropped as `stale` on the way.
        """
        if self.complete < groups:
            return None
        version = self.versions.newest
        if self.config.order == "ready":
            for row in [row for row in self.unsampled.values() if row.complete and row.age(version) > self.max_age]:
                self._remove(row, "stale")
        chosen = choose(self.unsampled.values(), groups, self.config.order, self.config.window)
        if len(chosen) < groups:
            return None
        return [self._take(row, version) for row in chosen]

    def _take(self, row: Row, version: int) -> SampledRow:
        age = row.age(version)
        if age > self.max_age:
            raise RuntimeError(
                f"{row} has age {age}, above the bound {self.max_age} of order {self.config.order}: a version was published "
                f"with fewer than {self.groups_per_step} rows a step"
            )
        del self.unsampled[row.id]
        self.complete -= 1
        return SampledRow(row.id, row.prompt, dict(row.columns), dict(row.produced), age, dict(row.makers))

    def trained(self, row_ids: Sequence[int], step: int) -> None:
        """Sampled rows were used in optimizer step `step` (from 1). They stay charged until its version is published."""
        rows = self._sampled(row_ids)
        self.versions.train(step)
        for row in rows:
            self._forget(row)
            self.ledger.train(row.tokens)
        self.unpublished_steps.append((step, len(rows)))

    def dropped(self, row_ids: Sequence[int], reason: str) -> None:
        """Sampled rows that will not be trained (filtered, a skipped step): free at once, and replaced."""
        for row in self._sampled(row_ids):
            self._remove(row, reason)

    def published(self, version: int) -> None:
        """Frees the rows this version was made of."""
        self.versions.publish(version)
        while self.unpublished_steps and self.unpublished_steps[0][0] <= version * self.versions.every:
            self.unpublished_steps.popleft()
        self.check()

    def check(self) -> None:
        """Raises RuntimeError if a row or a token was lost."""
        self.ledger.check(len(self.rows), sum(row.tokens for row in self.rows.values()))

    def _sampled(self, row_ids: Sequence[int]) -> list[Row]:
        wrong = [row_id for row_id in row_ids if row_id not in self.rows or row_id in self.unsampled]
        if wrong or len(set(row_ids)) != len(row_ids):
            raise ValueError(f"rows {wrong or list(row_ids)}: not sampled, done with already, or named twice")
        return [self.rows[row_id] for row_id in row_ids]

    def _remove(self, row: Row, reason: str) -> list[Lease]:
        revoked = [self._end(lease_id) for lease_id in list(row.leases.values())]
        self._forget(row)
        self.ledger.drop(row.tokens, reason)
        return revoked

    def _forget(self, row: Row) -> None:
        del self.rows[row.id]
        if self.unsampled.pop(row.id, None) is not None:
            self.complete -= row.complete
        for queue in self.waiting.values():
            queue.discard(row.id)
        self.nbytes -= row.nbytes
        self._rows_with_columns -= bool(row.columns)
