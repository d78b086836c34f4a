"""The consumer of complete rows in a run without trainers: selects samples and writes them, part by part.

Guarantees:
1. A row is in one part, once, or it was dropped with a reason (its data failed): after a kill between any two actions, of
   this process or of the buffer, what the part files say is what was collected.
2. The buffer is told that rows are done when they are on the disk, never before.
3. Every wait has a deadline and a name.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from buffer.buffer import EndOfData
from buffer.records import SampledRow
from trainers.collecting.config import CollectConfig
from trainers.collecting.parts import Parts
from trainers.collecting.records import Columns, Decode, records_of, scores_of
from trainers.collecting.select import select
from trainers.collecting.tally import RowCount, Tally
from trainers.fetching import fetch_columns
from trainers.ports import Deadlines, RowSource
from trainers.recorder import Recorder
from trainers.waiting import unless, within

T = TypeVar("T")
VERSION = 0  # the makers' own weights: there are no others
COLLECTED = "collected"  # the reason under which the ledger has rows that were written


class Collector:
    """See the module. `stages`: whose columns are read. `report`: the file that the figures go to at the end."""

    def __init__(
        self,
        config: CollectConfig,
        *,
        stages: Sequence[str],
        rows: RowSource,
        parts: Parts,
        decode: Decode,
        recorder: Recorder,
        deadlines: Deadlines,
        report: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._stages = tuple(stages)
        self._rows = rows
        self._parts = parts
        self._decode = decode
        self._recorder = recorder
        self._deadlines = deadlines
        self._report = report
        self._clock = clock
        self._tally = Tally(config.report)
        self._done: set[int] = set()
        self._count(list(parts.counts()))
        self._phase = "starting"
        self._since = clock()
        self._rates: dict[str, float] = {}
        self._stopping = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    async def publish_start(self) -> None:
        """Opens admission: prompts are taken, and rows made with the weights that the makers have."""
        await self._within(self._deadlines.call, "rows.published", self._rows.published(VERSION, 0))

    async def run(self) -> str:
        """Until the prompts end (`done`) or `stop` (`stopped`). Raises what ends the run.

        Consumes: complete rows of the buffer. Produces: part files, metrics, the report.
        Waits for: rows (deadline `batch`), their columns, the disk. Unblocked by: makers that complete rows, `stop`.
        """
        self._idle.clear()
        try:
            await self.publish_start()
            began = self._clock()
            while (rows := await self._next()) is not None:
                if await self._collect(rows):
                    self._record(self._clock() - began)
                    began = self._clock()
            self._phase = "ended"
            if self._stopping.is_set():
                return "stopped"
            self._write_report()
            return "done"
        finally:
            self._idle.set()

    async def stop(self) -> None:
        """The part that is being written is finished; rows are not waited for. Returns when `run` has."""
        self._stopping.set()
        await self._idle.wait()

    def status(self) -> dict[str, Any]:
        """`step` counts parts; `collected` is what the files hold."""
        return {
            "step": self._parts.count,
            "version": VERSION,
            "phase": self._phase,
            "rates": self._rates,
            "collected": self._tally.figures(),
        }

    async def _next(self) -> Sequence[SampledRow] | None:
        """The rows of the next part; None at the end, or when a stop came first. The last part may be smaller."""
        self._phase = "wait_for_batch"
        wanted = self._config.rows_per_part
        while not self._stopping.is_set():
            try:
                return await self._sample(wanted)
            except EndOfData:
                status = await self._within(self._deadlines.call, "rows.status", self._rows.status())
                left = status["ledger"]["rows"]["in_flight"]
                if not left:
                    return None
                wanted = min(left, self._config.rows_per_part)
        return None

    async def _sample(self, groups: int) -> Sequence[SampledRow] | None:
        # The buffer keeps the deadline itself, and says what each unfinished row waits for; this is the net below.
        net = self._deadlines.batch + self._deadlines.call
        sampling = asyncio.ensure_future(self._rows.sample(groups, self._deadlines.batch))
        try:
            return await unless([self._stopping], net, _late("rows.sample", net), sampling)
        finally:
            sampling.cancel()

    async def _collect(self, rows: Sequence[SampledRow]) -> bool:
        """Whether a part was written: not if columns were lost, or if all the rows are in files already."""
        new = [row for row in rows if row.row_id not in self._done]
        fetching = fetch_columns(self._rows, new, self._stages)
        columns, lost = await self._within(self._deadlines.batch, "fetch of columns", fetching)
        for row_id, error in lost.items():
            await self._within(self._deadlines.call, "rows.lost", self._rows.lost(row_id, error.stages, str(error)))
        if lost:
            return False
        if new:
            self._phase = "write"
            counts = await asyncio.to_thread(self._write, new, columns)
            self._count(counts)
        ids = [row.row_id for row in rows]
        await self._within(self._deadlines.call, "rows.dropped", self._rows.dropped(ids, COLLECTED))
        return bool(new)

    def _write(self, rows: Sequence[SampledRow], columns: Sequence[Mapping[str, Columns]]) -> list[RowCount]:
        records: list[dict[str, Any]] = []
        counts = []
        for row, stages in zip(rows, columns, strict=True):
            samples = len(stages["rollout"]["response_offsets"]) - 1
            scores = scores_of(stages, self._config.scores, samples)
            kept = select(self._config.select, scores).tolist()
            records += records_of(row, stages, scores, kept, self._decode)
            report = self._config.report
            right = 0 if report is None else int((scores >= report.threshold).sum())
            tokens = len(stages["rollout"]["response_ids"])
            counts.append(RowCount(row.row_id, samples, len(kept), right, float(scores.sum()), tokens))
        like = records_of(row, stages, scores, [0], self._decode)[0]
        self._parts.write(records, counts, like)
        return counts

    def _count(self, counts: Sequence[RowCount]) -> None:
        self._tally.add(counts)
        self._done |= {one.row_id for one in counts}
        self._last_tokens = sum(one.tokens for one in counts)

    def _record(self, seconds: float) -> None:
        """One line of metrics for each part; what it counts is of all parts so far."""
        self._rates = {"tokens_per_s/generated": self._last_tokens / seconds if seconds > 0 else 0.0}
        figures = {f"collected/{key}": value for key, value in self._tally.figures().items()}
        reward = {"reward/mean": self._tally.figures()["score"]} if self._config.scores else {}
        line = {"step": self._parts.count, "time/step": seconds, **reward, **self._rates, **figures}
        self._recorder.metrics(line)

    def _write_report(self) -> None:
        draft = self._report.with_name(f".{self._report.name}")
        draft.write_text(json.dumps(self._tally.figures(), indent=1))
        draft.replace(self._report)

    async def _within(self, seconds: float, what: str, work: Awaitable[T]) -> T:
        return await within(seconds, _late(what, seconds), work)


def _late(what: str, seconds: float) -> str:
    return f"{what} did not answer within {seconds:g} s"
