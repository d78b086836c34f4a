"""The buffer: the owner of the experience channel. Prompts go in, makers are called, complete rows come out.

It never holds tokens: columns are references it owns. It admits prompts whenever the table has room, gives out leases, and
wakes whoever waits for rows. The first cause that ends a run is kept in `fatal`; every waiting call raises it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from buffer.config import BufferConfig
from buffer.dispatcher import Dispatcher, MakerHandle
from buffer.evaluation import EvaluationResult, Tally
from buffer.records import Prompt, SampledRow
from buffer.report import table_status, who_waits
from buffer.roster import NO_ROUTES, Routes
from buffer.snapshot import Cut, PromptSource, cut, restore, snapshot
from buffer.table import ExperienceTable

__all__ = ["Buffer", "Cut", "EndOfData", "EvaluationResult", "Fatal", "PromptSource", "RunFailed"]


class EndOfData(Exception):
    """The prompts, or the rows of the run, are used up: fewer rows can still come than are wanted. Not a failure."""


class RunFailed(RuntimeError):
    """The run cannot go on; the text is the cause."""


class Fatal:
    """The first cause that ends the run; awaitable by any number of watchers."""

    def __init__(self) -> None:
        self.cause: str | None = None
        self._event = asyncio.Event()

    def set(self, cause: str) -> None:
        self.cause = self.cause or cause
        self._event.set()

    async def wait(self) -> str:
        await self._event.wait()
        return self.cause or ""

    def check(self) -> None:
        """Raises RunFailed if there is a cause."""
        if self.cause is not None:
            raise RunFailed(self.cause)


class Buffer:
    """Consumes prompts; produces complete rows; paced by `published`; everything else is told in the method's words.

    `stages`: the columns of a complete row. `samples`: the size of a group. `total_rows`: how many rows are trained in
    all, those of earlier steps included. `first_step`: the step of the checkpoint that the trainer goes on from. A row's id
    is the prompt's place in the source, so a source that was moved by `seek` goes on with new seeds.

    There is one trainer: its `sample` says that it holds no rows. What it says may be said again, after a lost answer.
    `save` is given the state (JSON-able, without columns) after every change on the trainer's side, before that is told: a
    buffer that restores the last one goes on where this one ended.
    """

    def __init__(
        self,
        config: BufferConfig,
        prompts: PromptSource,
        *,
        stages: tuple[str, ...],
        groups_per_step: int,
        every: int,
        samples: int,
        total_rows: int | None,
        seed: int,
        first_step: int = 0,
        routes: Routes = NO_ROUTES,
        clock: Callable[[], float] = time.monotonic,
        save: Callable[[dict[str, Any]], None] = lambda state: None,
    ) -> None:
        self._config = config
        self._prompts = prompts
        self._clock = clock
        self._save_state = save
        self._table = ExperienceTable(
            config,
            stages=stages,
            groups_per_step=groups_per_step,
            every=every,
            samples=samples,
            total_rows=total_rows,
            seed=seed,
            clock=clock,
            first_row=prompts.cursor,
            first_step=first_step,
            routes=routes,
        )
        self._routes = routes
        self._dispatcher = Dispatcher(self._advance, self._bug)
        self._dispatcher.add_table(self._table)
        self._prompts_finished = False
        self._changed = asyncio.Event()
        self._samples = 0  # how often the trainer asked for rows
        self.fatal = Fatal()

    # Crashes and checkpoints

    def cut(self) -> Cut:
        """Everything, for a checkpoint: the JSON-able state, and the references of all columns of live rows.

        To be taken when the trainer holds no rows: at the end of a step. `buffer.snapshot.places(state)` tells row and
        stage of each reference.
        """
        return cut(self._table)

    def restore(self, state: Mapping[str, Any], columns: Sequence[Any] | None = None) -> None:
        """Goes on from a cut's state with its columns (in their order), or from a saved state, which has none.

        To be told before anything else. The prompt source is moved to its place. Raises ValueError for a buffer that has
        had rows, for another number of columns, and for prompts that end too early.
        """
        restore(self._table, state, self._prompts, columns)
        self._dispatcher.unrouted = set(state.get("unrouted", ()))
        self.save()

    def save(self) -> None:
        """Hands the state to `save`. Not needed after a change, but once before the first."""
        self._save_state({**snapshot(self._table), "unrouted": sorted(self._dispatcher.unrouted)})

    # Makers

    def attach(self, handle: MakerHandle) -> None:
        """The maker is called from now on. Raises ValueError if its name, stage or needs do not fit."""
        self._dispatcher.attach(handle)

    async def detach(self, name: str, drain: bool = True) -> None:
        """Takes the maker out; `drain` lets its calls end first (each by its deadline), else they are revoked."""
        await self._dispatcher.detach(name, drain)

    def maker_died(self, name: str, cause: str) -> None:
        """Revokes the maker's leases at once; told again, or of a maker that is not attached, it does nothing."""
        self._dispatcher.died(name, cause)

    async def unroute(self, makers: Sequence[str]) -> None:
        """No new rows for makers of these names until `route`; returns when they have finished those they have."""
        self._dispatcher.unrouted |= set(makers)
        self.save()
        await asyncio.gather(*(self._dispatcher.unroute(name) for name in makers))

    def route(self, makers: Sequence[str]) -> None:
        for name in makers:
            self._dispatcher.route(name)
        self.save()

    # The trainer

    def published(self, version: int, step: int) -> None:
        """The weights after `step` are `version`: frees the rows it was made of, and opens admission at that version."""
        self._table.published(version, step)
        self._changed_by_trainer()

    async def sample(self, groups: int, timeout: float) -> list[SampledRow]:
        """Waits for `groups` complete rows, in the order the config allows. Rows it gave before wait again, as the oldest.

        Raises EndOfData if fewer can still come, TimeoutError after `timeout` seconds with what each unfinished row waits
        for, RunFailed if the run cannot go on, ValueError if so many rows are never in flight.
        """
        if not 1 <= groups <= self._table.capacity:
            raise ValueError(
                f"{groups} rows wanted, but at most {self._table.capacity} are in flight: raise buffer.max_staleness or "
                f"lower groups_per_step"
            )
        self._table.give_back()
        self._samples += 1
        sample = self._samples
        self._wake()  # a call before this one, whose caller is gone, must take no rows
        try:
            async with asyncio.timeout(timeout):
                while (rows := self._select(groups)) is None:
                    await self._changed.wait()
                    self._check_latest(sample)
        except TimeoutError:
            raise TimeoutError(
                f"no {groups} rows within {timeout:g} s ({self._table.live.complete} are complete): "
                f"{who_waits(self._table, self._clock)}"
            ) from None
        self.save()
        return rows

    def _check_latest(self, sample: int) -> None:
        if sample != self._samples:
            raise RuntimeError("rows were asked for again, or the trainer was rewound, while this call waited for some")

    def trained(self, row_ids: Sequence[int], step: int) -> None:
        """These rows were used in optimizer step `step` (from 1). To be told before that step's version is published."""
        self._table.trained(row_ids, step)
        self._changed_by_trainer()

    def dropped(self, row_ids: Sequence[int], reason: str) -> None:
        """These sampled rows will not be trained: they are replaced."""
        self._table.dropped(row_ids, reason)
        self._changed_by_trainer()

    def lost(self, row_id: int, stages: Collection[str], cause: str) -> None:
        """The columns of these stages of a row cannot be had: they, and what was made from them, are made again."""
        self._dispatcher.lost(self._table, row_id, stages, cause)

    def rewind(self, step: int) -> None:
        """The trainer goes on after `step`, and holds no rows: those trained in later steps are dropped as `rewound`.

        To be told before the weights it goes on from are published. Raises ValueError for a step never done here.
        """
        self._samples += 1
        self._table.rewind(step)
        self._changed_by_trainer()

    def _changed_by_trainer(self) -> None:
        self.save()
        self._advance()

    # Evaluation

    async def evaluate(
        self, prompts: Sequence[Prompt], *, samples: int, min_version: int, seed: int, timeout: float
    ) -> EvaluationResult:
        """Makes rows for these prompts on the same makers, before any other row, and averages what the stages report.

        Prompts that fail as data are counted, not replaced. Raises RunFailed if one fails otherwise or if all fail,
        TimeoutError after `timeout` seconds, ValueError if `min_version` is not published yet.
        """
        started = self._clock()
        table = self._evaluation_table(len(prompts), samples, min_version, seed)
        for prompt in prompts:
            table.admit(prompt, min_version)
        tally = Tally()
        self._dispatcher.add_table(table)
        self._dispatcher.pump_soon()
        try:
            async with asyncio.timeout(timeout):
                while not self._tallied(table, tally):
                    await self._changed.wait()
        except TimeoutError:
            raise TimeoutError(
                f"evaluation: {tally.rows} of {len(prompts)} rows within {timeout:g} s: {who_waits(table, self._clock)}"
            ) from None
        finally:
            self._dispatcher.remove_table(table)
        if not tally.rows:
            raise RunFailed(f"evaluation: all {len(prompts)} prompts failed as data: {table.failures.last_of_data}")
        return tally.result(failed=table.failures.counts["data"], samples=samples, seconds=self._clock() - started)

    def _evaluation_table(self, rows: int, samples: int, min_version: int, seed: int) -> ExperienceTable:
        """Admits everything at once and gives rows out in any order, at any age."""
        versions = self._table.versions
        if versions.published is None or not 0 <= min_version <= versions.newest:
            raise ValueError(f"evaluation of version {min_version}, but the newest published is {versions.published}")
        if rows == 0:
            raise ValueError("evaluation without prompts: give at least one")
        unbounded = {"order": "ready", "max_staleness": versions.newest + 2**31, "max_bytes": 2**62}
        return ExperienceTable(
            self._config.model_copy(update={**unbounded, "max_data_failures": rows}),
            stages=self._table.stages,
            groups_per_step=rows,
            every=1,
            samples=samples,
            total_rows=None,
            seed=seed,
            clock=self._clock,
            versions=versions,
            lease_ids=self._table.lease_ids,
            routes=self._routes,
        )

    def _tallied(self, table: ExperienceTable, tally: Tally) -> bool:
        """Adds the complete rows and lets their columns go; whether every row is accounted for."""
        self.fatal.check()
        if table.failures.cause is not None:
            raise RunFailed(f"evaluation: {table.failures.cause}")
        rows = table.select(table.live.complete) if table.live.complete else None
        if rows:
            tally.add(rows)
            table.dropped([row.row_id for row in rows], "evaluated")
        return not table.rows

    # The run

    def status(self) -> dict[str, Any]:
        """One plain object, JSON-able."""
        return {
            **table_status(self._table),
            **self._dispatcher.status(),
            "prompts": {
                "cursor": self.cursor,
                "finished": self._prompts_finished,
                "oldest_unfinished": self.oldest_unfinished,
            },
            "fatal": self.fatal.cause,
        }

    @property
    def cursor(self) -> int:
        """Prompts taken from the source."""
        return self._prompts.cursor

    @property
    def oldest_unfinished(self) -> int:
        """Where the prompts of a resumed run begin: at the oldest row that is neither trained nor dropped."""
        return self._table.oldest_unfinished

    async def close(self) -> None:
        """Revokes every lease; whoever waits for rows is told."""
        self.fatal.set("the buffer was closed")
        self._dispatcher.close()

    def _select(self, groups: int) -> list[SampledRow] | None:
        self.fatal.check()
        rows = self._table.select(groups)
        if rows is None:
            if self._feed():  # stale rows may have been dropped, which makes room
                self._wake()
            self.fatal.check()  # a source that just broke must not look like the end of the data
            self._check_end(groups)
        return rows

    def _check_end(self, groups: int) -> None:
        to_come = self._table.rows_to_come(self._prompts_finished)
        if to_come is not None and to_come < groups:
            rows = self._table.ledger.rows
            raise EndOfData(
                f"{groups} rows wanted, {to_come} can still come: {self.cursor} prompts were taken"
                f"{' and there are no more' if self._prompts_finished else ''}, {rows.trained} rows trained "
                f"of {self._table.total_rows or 'any number'}, dropped {rows.dropped or 'none'}"
            )

    def _advance(self) -> None:
        """After every change."""
        self._feed()
        self._wake()

    def _feed(self) -> bool:
        """Admits what there is room for and gives out leases; whether anything was admitted."""
        cursor = self.cursor
        while not self._prompts_finished and self._table.stalled_by() is None:
            prompt = self._next_prompt()
            if prompt is None:
                self._prompts_finished = True
            else:
                self._table.admit(prompt)
        self._dispatcher.pump_soon()
        return self.cursor != cursor

    def _next_prompt(self) -> Prompt | None:
        try:
            return self._prompts.next()
        except Exception as error:
            # Nobody waits for this call, and a broken source must not look like the end of the data.
            self.fatal.set(f"the prompt source failed after {self.cursor} prompts: {type(error).__name__}: {error}")
            return None

    def _bug(self, error: Exception) -> None:
        self.fatal.set(f"error in the buffer: {type(error).__name__}: {error}")
        self._wake()

    def _wake(self) -> None:
        """Everybody who waits looks again."""
        if self._table.failures.cause is not None:
            self.fatal.set(self._table.failures.cause)
        self._changed.set()
        self._changed = asyncio.Event()
