"""The experience table: a pure, synchronous state machine over rows, columns and leases. It never waits and knows no maker.

Life of a row: admitted -> a lease for each stage, as the stages it needs are filled -> complete -> sampled -> trained or
dropped (with a reason). Invariants, asserted by the property tests:

1. No row is admitted while rows in flight (neither dropped nor part of a published version) are as many as
   (max_staleness + 1) * groups_per_step * every. Admission paces; only `order: ready` discards finished work.
2. No row is sampled older than `worst_case_age`, and max_staleness 0 is exactly on-policy.
3. Every lease ends exactly once: committed, failed, expired or revoked. None outlives its maker or its row.
4. The ledger closes at all times, in rows and in tokens.
5. Nothing is admitted while the referred bytes exceed max_bytes, and a bound that would block for ever is a failure.
6. A snapshot restored (`buffer.snapshot`) is the same table: no row lost, none twice, the samples of a prompt together.
7. A row is trained once at most. One whose columns are lost is made again, and so is one that a rewind of the trainer left
   above the staleness bound.

An event costs O(log rows), whatever the number of makers. A mistake of the caller raises ValueError (an ended lease or an
unknown maker: KeyError); what ends the run is put into `failures.cause`, in words.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from buffer.config import BufferConfig, Route
from buffer.failures import FailureKind, Failures
from buffer.ledger import Ledger
from buffer.live import LiveRows
from buffer.records import Lease, MakerInfo, Produced, Prompt, SampledRow
from buffer.roster import NO_ROUTES, Roster, Routes
from buffer.rows import Row, check_produced, derive_seed
from buffer.selection import choose, worst_case_age
from buffer.versions import StepLog, Versions
from buffer.work import OpenWork

__all__ = ["ExperienceTable", "FailureKind", "worst_case_age"]


class ExperienceTable:
    """`stages` are the columns of a complete row; what a stage needs is told by the makers that fill it.

    `versions` and `lease_ids` are shared by tables that share makers. `first_step`: optimizer steps done before (resume).
    `total_rows`: how many rows are trained in all, `groups_per_step` in each step, those of steps done before included.
    `routes`: of the groups of makers that may come, by stage. A row that none of them takes fails as data when it is admitted.
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
        routes: Routes = NO_ROUTES,
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
        self.versions = versions or Versions(every, first_step)
        self.steps = StepLog(every, groups_per_step, first_step)
        self.ledger = Ledger()
        self.live = LiveRows()
        self.rows = self.live.by_id
        self.roster = Roster(stages, routes)
        self.work = OpenWork(stages, self.rows, self.roster)
        self.failures = Failures(config)
        self.clock = clock
        self.next_row = first_row
        self.lives = 1  # how often this table, or one that it was restored from, began
        self.lease_ids = lease_ids or itertools.count(1)
        self.rewound = False  # and nothing published since
        self.rewound_before = first_row  # rows below were admitted before the first version after a rewind
        self._seed = seed

    # Makers

    def attach(self, info: MakerInfo) -> None:
        """Raises ValueError for a maker whose name, stage or needs do not fit."""
        first, known = info.stage not in self.roster.needs, self.roster.knows(info)
        self.roster.add(info)
        if not known:
            self.work.relay(info.stage)
        self.work.add_maker(info.name)
        if first:
            for row in self.live.unsampled.values():
                self._enqueue(row)

    def detach(self, name: str, death: str | None = None) -> list[Lease]:
        """Forgets the maker and revokes its leases. With a cause of death each of its rows has failed an attempt."""
        self.roster.remove(name)
        revoked = self.work.remove_maker(name)
        for lease in revoked:
            row = self.rows[lease.row_id]
            if death is not None:
                self.failures.attempt(row, lease, "died", f"the maker died: {death}")
            self._enqueue(row)
        return revoked

    # Admission

    @property
    def charged(self) -> int:
        """Rows in flight: live, or trained for a version that is not published yet."""
        return len(self.rows) + self.steps.unpublished

    @property
    def rows_done(self) -> int:
        """Rows of the steps that are done."""
        return self.versions.step * self.groups_per_step

    def stalled_by(self) -> str | None:
        """Why no row may be admitted now; None if one may."""
        if self.failures.cause is not None:
            return "failure"
        if self.versions.published is None:
            return "no published version"
        if self.total_rows is not None and self.rows_done + len(self.rows) >= self.total_rows:
            return "total rows"
        if self.charged >= self.capacity:
            return "staleness"
        if self.live.nbytes > self.config.max_bytes:
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
        self.live.add(row)
        self.ledger.rows.admit(1)
        self._enter(row)
        return row.id

    def put_back(self, row: Row, sampled: bool) -> None:
        """A row of a snapshot, later than those there; its columns and its place in the ledger come with it."""
        self.live.add(row, sampled)
        if not sampled:
            self._enter(row)

    def _enter(self, row: Row) -> None:
        if refusal := self.roster.refusal(row.prompt):
            self.failures.data(f"{row}: {refusal}")
            self._remove(row, "data")
        else:
            self._enqueue(row)

    def rows_to_come(self, prompts_finished: bool) -> int | None:
        """How many rows can still be sampled, if nothing fails; None while there is no end in sight."""
        if prompts_finished:
            return len(self.live.unsampled)
        if self.total_rows is None:
            return None
        return len(self.live.unsampled) + max(0, self.total_rows - self.rows_done - len(self.rows))

    @property
    def oldest_unfinished(self) -> int:
        """The oldest row that is neither trained nor dropped, else the next one. Costs O(rows)."""
        return min(self.rows, default=self.next_row)

    # Leases

    def ready(self, stage: str, route: Route | None = None) -> int:
        """Rows that wait for a lease of the stage, and that makers of this route take; none once the run has failed."""
        return 0 if self.failures.cause is not None else self.work.waiting[stage].for_route(route)

    def lease(self, maker: str) -> Lease | None:
        """The oldest row that waits for the maker's stage; None if there is none for this maker."""
        found = self.work.next_for(maker)
        if found is None:
            return None
        row, stage = found
        lease = Lease(
            id=next(self.lease_ids),
            row_id=row.id,
            stage=stage,
            maker=maker,
            prompt=row.prompt,
            min_version=row.min_version,
            seed=derive_seed(self._seed, row.id, row.attempts.get(stage, 0)),
            samples=self.samples,
            timeout=self.config.lease_timeout,
        )
        self.work.open(lease, self.clock())
        return lease

    def inputs(self, lease: Lease) -> list[Any]:
        """The columns the lease's stage needs, in the order of its needs."""
        columns = self.rows[lease.row_id].columns
        return [columns[stage] for stage in self.roster.needs[lease.stage]]

    def commit(self, lease_id: int, produced: Produced, columns: Any) -> None:
        """Fills the stage. An answer that cannot be true raises ValueError and leaves the lease open."""
        lease = self.work.leases[lease_id].lease
        check_produced(produced, lease, self.versions.newest)
        self.work.end(lease_id)
        row = self.rows[lease.row_id]
        self.live.fill(row, lease.stage, lease.maker, produced, columns)
        self.ledger.tokens.admit(produced.tokens)
        self._enqueue(row)
        nbytes, rows, needed = self.live.nbytes, self.live.with_columns, self.groups_per_step
        if nbytes > self.config.max_bytes and rows < needed:
            self.failures.end_run(
                f"buffer.max_bytes is {self.config.max_bytes}, but {rows} rows already refer to {nbytes} bytes and one step "
                f"needs {needed} rows: it would never be admitted. Set buffer.max_bytes to {nbytes * needed // rows * 2} or more"
            )

    def fail(self, lease_id: int, kind: FailureKind, text: str) -> list[Lease]:
        """Ends a lease without columns. Data failures drop the row; the others are tried again, elsewhere if possible.

        Returns the leases of other stages of the row that were revoked with it.
        """
        lease = self.work.end(lease_id)
        row = self.rows[lease.row_id]
        if kind != "data":
            row.failed_by.setdefault(lease.stage, set()).add(lease.maker)
            self.failures.attempt(row, lease, kind, text)
            self._enqueue(row, again=lease.stage)
            return []
        self.failures.data(f"{row}, {lease.stage} on {lease.maker}: {text}")
        return self._remove(row, "data")

    def lost(self, row_id: int, stages: Collection[str], text: str) -> list[Lease]:
        """The columns of these stages are gone: they, and what was made from them, are made again.

        A row that the trainer has waits again too. Told again, or of a row that is done with, it does nothing. Returns the
        leases of the row that were revoked.
        """
        row = self.rows.get(row_id)
        gone = [] if row is None else [stage for stage in stages if stage in row.columns]
        if row is None or not gone:
            return []
        self.failures.lost(row, gone, text)
        revoked = self._discard(row, {stage for lost in gone for stage in self.roster.made_from(lost)}, "lost")
        if row.id in self.live.sampled:
            self.live.give_back([row])
        self._enqueue(row)
        return revoked

    def _enqueue(self, row: Row, again: str | None = None) -> None:
        """What can be made of the row now waits for a lease; stage `again` apart, since it failed before."""
        self.work.enqueue(row, again)
        if not row.complete and len(row.columns) == len(self.stages):
            self.live.completed(row)
            self.failures.data_in_a_row = 0

    # The trainer's side

    def select(self, groups: int) -> list[SampledRow] | None:
        """The next `groups` rows, oldest first, or None if not so many may be taken now.

        Rows above the staleness bound are dropped as `stale` with `order: ready`, and made again after a rewind.
        """
        if self.live.complete < groups:
            return None
        version = self.versions.newest
        for row in self._too_old(version):
            if self.config.order == "ready":
                self._remove(row, "stale")
            else:
                row.min_version = self.versions.published or 0
                self._discard(row, self.stages, "stale")
                self._enqueue(row)
        chosen = choose(self.live.unsampled.values(), groups, self.config.order, self.config.window)
        if len(chosen) < groups:
            return None
        return [self._take(row, version) for row in chosen]

    def _too_old(self, version: int) -> list[Row]:
        """Complete rows that the bound does not allow; without a rewind only `order: ready` has such rows."""
        all_rows = self.config.order == "ready"
        if not all_rows and next(iter(self.live.unsampled)) >= self.rewound_before:
            return []
        rows = (row for row in self.live.unsampled.values() if all_rows or row.id < self.rewound_before)
        return [row for row in rows if row.complete and row.age(version) > self.max_age]

    def _take(self, row: Row, version: int) -> SampledRow:
        age = row.age(version)
        if age > self.max_age:
            raise RuntimeError(
                f"{row} has age {age}, above the bound {self.max_age} of order {self.config.order}: a version was published "
                f"with fewer than {self.groups_per_step} rows a step"
            )
        self.live.sample(row)
        return SampledRow(row.id, row.prompt, dict(row.columns), dict(row.produced), age, dict(row.makers))

    def give_back(self) -> None:
        """The trainer has no rows any more: those it had wait again, or are made again where their columns are lost."""
        rows = list(self.live.sampled.values())
        for row in rows:
            if missing := row.produced.keys() - row.columns.keys():
                self.failures.counts["infra"] += 1
                self._discard(row, missing, "lost")
        self.live.give_back(rows)
        for row in rows:
            self._enqueue(row)

    def trained(self, row_ids: Sequence[int], step: int) -> None:
        """Sampled rows were used in optimizer step `step` (from 1). They stay charged until its version is published.

        Told again of a step that is done, it does nothing.
        """
        if step <= self.versions.step and not any(row_id in self.rows for row_id in row_ids):
            return
        rows = self._sampled(row_ids)
        self.versions.train(step)
        for row in rows:
            self.live.remove(row)
            self.ledger.train(row.tokens)
        self.steps.train(len(rows), sum(row.tokens for row in rows))

    def dropped(self, row_ids: Sequence[int], reason: str) -> None:
        """Sampled rows that will not be trained (filtered, a skipped step): free at once, and replaced.

        Of rows that are gone already it was told before.
        """
        for row in self._sampled([row_id for row_id in row_ids if row_id in self.rows]):
            self._remove(row, reason)

    def published(self, version: int, step: int) -> None:
        """The weights after `step` are `version`: frees the rows it was made of. Told again, it does nothing.

        Raises ValueError after a rewind for a version that is not newer: rows would seem to come from the future.
        """
        if not self.versions.publish(version, step):
            if self.rewound:
                raise ValueError(
                    f"version {version} was published after a rewind to step {self.versions.step}, but there was version "
                    f"{self.versions.published} before: give the weights that the trainer goes on from a larger one"
                )
            return
        self.steps.publish(step)
        if self.rewound:
            self.rewound, self.rewound_before = False, self.next_row
        self.check()

    def rewind(self, step: int) -> None:
        """The trainer goes on after `step`, without the rows it has: what later steps learnt from theirs is gone.

        Those are dropped as `rewound`: no row is trained twice. Raises ValueError for a step that was never done here.
        """
        rows, tokens = self.steps.rewind(step)
        self.ledger.rewind(rows, tokens)
        self.versions.step = step
        self.rewound = True
        self.give_back()
        self.check()

    def check(self) -> None:
        """Raises RuntimeError if a row or a token was lost."""
        self.ledger.check(len(self.rows), sum(row.tokens for row in self.rows.values()))

    def _sampled(self, row_ids: Sequence[int]) -> list[Row]:
        wrong = [row_id for row_id in row_ids if row_id not in self.live.sampled]
        if wrong or len(set(row_ids)) != len(row_ids):
            raise ValueError(f"rows {wrong or list(row_ids)}: not sampled, done with already, or named twice")
        return [self.rows[row_id] for row_id in row_ids]

    def _discard(self, row: Row, stages: Collection[str], reason: str) -> list[Lease]:
        """Lets go of what these stages have made, and of their leases. Their tokens are dropped for the reason."""
        revoked = self.work.call_off(row, stages)
        self.ledger.tokens.drop(self.live.empty(row, stages), reason)
        return revoked

    def _remove(self, row: Row, reason: str) -> list[Lease]:
        revoked = self.work.call_off(row, self.stages)
        self.live.remove(row)
        self.ledger.drop(row.tokens, reason)
        return revoked
