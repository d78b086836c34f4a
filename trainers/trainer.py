"""The single controller of one model under training.

Guarantees:
1. The start version is published before anything else, so that makers and admission begin from known weights.
2. No row older than `max_age` is trained on: it stops the run with the row's id and the numbers.
3. A step that is not trained (nothing valid in it, or not finite) takes no optimizer step and publishes no version; its
   rows are dropped with the reason, and the step is tried again with other rows. Too many in a row end the run. What a
   critic learnt from such rows it keeps; a step of the critic alone that is not finite counts towards the limit too.
4. The next version is published after each step that `every` divides, and only weights of a trained step are. Nobody waits
   for makers.
5. Every wait has a deadline and a name.
6. Rows whose columns are lost are not trained on: the buffer has them made again, and takes the batch's other rows back.
7. A checkpoint is written while training goes on. One that fails is an event; the last one of the run failing is a
   failure of the run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from buffer.buffer import EndOfData
from buffer.records import ColumnsLost, SampledRow
from trainers.batch import Columns
from trainers.checkpoints import Checkpoint, Checkpointer, CheckpointError
from trainers.config import TrainerConfig
from trainers.fetching import fetch_columns, stages_read
from trainers.guards import MismatchGate, SkipCounter, ages
from trainers.learner import StepResult
from trainers.metrics import MetricsBuilder, StepRecord
from trainers.planner import Batch, StepPlanner
from trainers.ports import Deadlines, Evaluation, MakerStatuses, Publisher, RowSource, Schedule, ValueModel
from trainers.rank_group import RankGroup
from trainers.recorder import Recorder
from trainers.rows_writer import RowsWriter
from trainers.saver import Saver, Saving
from trainers.stopwatch import Stopwatch
from trainers.training import BatchTraining, NotTrained, Trained
from trainers.turns import Holder, Turns
from trainers.validation import validate
from trainers.waiting import unless, within

T = TypeVar("T")
MAKERS_PATIENCE = 5.0  # seconds that a step waits for news of the makers


@dataclass
class Progress:
    """Where the trainer is. `version` is None before the first publication."""

    step: int
    version: int | None = None
    published_step: int | None = None  # the step whose weights the published version has
    phase: str = "starting"
    since: float = field(default=0.0)  # clock seconds


class Trainer:
    """See the module. `max_age`: the bound that the buffer's settings promise, in published versions.

    `start_step` is the step of the checkpoint that the ranks were restored from, or 0; `start_version` the number that its
    weights are published under (default: as many versions as were due until then). `turns`: where makers share the devices
    of the ranks, who have them while they train and write a checkpoint, and until they have published.
    """

    def __init__(
        self,
        config: TrainerConfig,
        *,
        planner: StepPlanner,
        ranks: RankGroup,
        rows: RowSource,
        weights: Publisher,
        makers: MakerStatuses,
        recorder: Recorder,
        metrics: MetricsBuilder,
        checkpointer: Checkpointer,
        schedule: Schedule,
        deadlines: Deadlines,
        max_age: int,
        critic: ValueModel | None = None,
        evaluation: Evaluation | None = None,
        rows_writer: RowsWriter | None = None,
        turns: Turns | None = None,
        start_step: int = 0,
        start_version: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if start_step > config.steps:
            raise ValueError(f"the checkpoint is of step {start_step}, the run has only {config.steps} steps")
        self._config = config
        self._ranks = ranks
        self._critic = critic
        self._rows = rows
        self._weights = weights
        self._makers = makers
        self._recorder = recorder
        self._metrics = metrics
        self._saver = Saver(checkpointer, ranks=ranks, critic=critic, rows=rows, recorder=recorder, clock=clock)
        self._schedule = schedule
        self._deadlines = deadlines
        self._max_age = max_age
        self._evaluation = evaluation
        self._rows_writer = rows_writer
        self._turns = turns
        self._clock = clock
        self._watch = Stopwatch(clock)
        self._planner = planner
        self._training = BatchTraining(planner, ranks, critic, self._watch)
        self._skips = SkipCounter({"nonfinite": config.max_nonfinite_steps, "no_valid_token": config.max_empty_steps})
        self._gate = MismatchGate(config.mismatch)
        self._progress = Progress(step=start_step, since=clock())
        self._start_step = start_step
        self._start_version = start_step // schedule.publish_every if start_version is None else start_version
        self._maker_statuses: Mapping[str, Mapping[str, Any]] = {}
        self._last: Mapping[str, Any] = {}
        self._stopping = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._end_of_data = False
        self._held_out: Mapping[str, Any] | None = None
        self._ranks_work = asyncio.Lock()  # no two calls of them may cross: their collectives would

    async def publish_start(self) -> None:
        """Publish the weights the run starts from."""
        await self._publish(self._start_version)

    async def refill(self) -> None:
        """The weight store has lost what it held: give it the present weights again, if they are those of a version.

        If they are not, or makers have the devices, it has to do without until the next version.
        """
        async with self._ranks_work:
            version = self._exact_version()
            if version is not None and (self._turns is None or self._turns.holder == "ranks"):
                what = f"weights.publish({version}), once more"
                await self._within(self._deadlines.step, what, self._weights.publish(version))

    async def run(self) -> str:
        """Train to the last step (`done`), until `stop` (`stopped`) or `end_of_data`. Raises what ends the run.

        Consumes: complete rows of the buffer. Produces: weight versions, checkpoints, metrics, events.
        Waits for: rows (deadline `batch`), its ranks, the export copy of a publication, evaluations.
        Unblocked by: makers that complete rows, ranks that answer, `stop`.
        """
        self._idle.clear()
        try:
            return await self._run()
        finally:
            await self._end_checkpoints()
            self._idle.set()

    async def _run(self) -> str:
        if self._progress.version is None:
            await self.publish_start()
        if self._evaluation is not None and self._evaluation.at_start and self._start_step == 0:
            await self._evaluate(self._evaluation)
        await self._ask_makers()
        self._metrics.begin(self._maker_statuses)
        self._watch.lap()
        while (outcome := self._outcome()) is None:
            await self._attempt()
        await self._finish(outcome)
        return outcome

    async def stop(self) -> None:
        """Finish the step that is being trained (rows and evaluations are not waited for), and write the last checkpoint.

        Returns when `run` has returned or failed; at once if it does not run.
        """
        self._stopping.set()
        await self._idle.wait()

    async def checkpoint(self) -> Checkpoint:
        """Write one of the present step when it is done; at once while rows are waited for. Before the first step: of that.

        Raises CheckpointError with the reason if the trainer does not run, if the run ends before, or if it fails.
        """
        if self._idle.is_set():
            raise CheckpointError(f"no checkpoint can be taken: the trainer does not train ({self._progress.phase})")
        return await self._saver.request()

    def status(self) -> dict[str, Any]:
        """Step, version, phase and seconds in it, last rates, what the run is bound by, the last held-out score."""
        progress, last = self._progress, self._last
        return {
            "step": progress.step,
            "steps": self._config.steps,
            "version": progress.version,
            "phase": progress.phase,
            "phase_seconds": self._clock() - progress.since,
            "skipped": self._skips.total,
            "rates": {key: value for key, value in last.items() if key.startswith("tokens_per_s/")},
            "bound_by": last.get("bound_by"),
            "knob": last.get("knob"),
            "held_out": self._held_out,
        }

    async def _attempt(self) -> None:
        """One batch of rows: sample, train, publish, tell; or skip it."""
        step = self._progress.step + 1
        try:
            batch = await self._batch()
        except EndOfData as error:
            self._recorder.event("end_of_data", step=self._progress.step, cause=str(error))
            self._end_of_data = True
            return
        if batch is None:
            return
        async with self._ranks_work:
            trained = await self._step(batch, step)
        if trained:
            await self._between_steps(batch)

    async def _step(self, batch: Batch, step: int) -> bool:
        """Whether the batch was trained on."""
        await self._hand_to("ranks")
        try:
            with self._phase("train"):
                trained = await self._training.train(batch, step, self._exact_version())
        except NotTrained as error:
            await self._skip(batch, error.kind, str(error))
            return False
        await self._within(self._deadlines.call, "rows.trained", self._rows.trained(batch.row_ids, step))
        self._progress.step = step
        self._note_skipped(step, trained.losses)
        self._check_mismatch(trained.result)
        if step % self._schedule.publish_every == 0:
            await self._publish(self._version + 1)
        await self._record(batch, trained)
        return True

    async def _batch(self) -> Batch | None:
        """What the next step trains on. Dynamic sampling: rows without a signal are dropped, others take their place.

        The rows that are kept come again with the next sample, as the oldest. Nothing is published meanwhile, so none ages.
        """
        batch, refills, replaced = await self._sampled_batch(), self._planner.max_refills, 0
        if not refills:
            return batch
        for _ in range(refills):
            if batch is None or not (silent := self._planner.without_signal(batch)):
                break
            await self._within(self._deadlines.call, "rows.dropped", self._rows.dropped(silent, "no_signal"))
            replaced += len(silent)
            batch = await self._sampled_batch()
        return None if batch is None else replace(batch, replaced=replaced)

    async def _sampled_batch(self) -> Batch | None:
        """The next rows with their columns, ages checked; None when a stop came first, or columns were lost."""
        rows = await self._sample()
        if rows is None:
            return None
        found = ages(rows, self._version, self._max_age)
        with self._phase("wait_for_batch"):
            fetching = fetch_columns(self._rows, rows, stages_read(self._config, rows))
            columns, lost = await self._within(self._deadlines.batch, "fetch of columns", fetching)
        if lost:
            await self._tell_lost(lost)
            return None
        return Batch(rows, columns, found)

    async def _sample(self) -> Sequence[SampledRow] | None:
        """Meanwhile, checkpoints are taken that are asked for."""
        # The buffer keeps the deadline itself, and says what each unfinished row waits for; this is the net below.
        net = self._deadlines.batch + self._deadlines.call
        interrupts = [self._stopping] + ([self._saver.asked] if self._progress.step else [])
        await self._hand_to("makers")
        sample = self._rows.sample(self._config.groups_per_step, self._deadlines.batch)
        sampling = asyncio.ensure_future(sample)
        try:
            while True:
                with self._phase("wait_for_batch"):
                    rows = await self._unless(interrupts, net, "rows.sample", sampling)
                if rows is not None or self._stopping.is_set():
                    return rows
                await self._checkpoint()
                await self._hand_to("makers")
        finally:
            sampling.cancel()

    async def _tell_lost(self, lost: Mapping[int, ColumnsLost]) -> None:
        """The buffer has the lost columns made again; `sample` will find that the other rows are not held any more."""
        for row_id, error in lost.items():
            await self._within(self._deadlines.call, "rows.lost", self._rows.lost(row_id, error.stages, str(error)))
        cause = str(next(iter(lost.values())))
        self._recorder.event("columns_lost", step=self._progress.step + 1, row_ids=list(lost), cause=cause)

    @property
    def _version(self) -> int:
        """The newest one published."""
        assert self._progress.version is not None, "nothing is published yet"
        return self._progress.version

    def _exact_version(self) -> int | None:
        """The published version that the trainer's weights are right now, if any."""
        progress = self._progress
        return progress.version if progress.published_step == progress.step else None

    async def _skip(self, batch: Batch, kind: str, cause: str) -> None:
        step = self._progress.step + 1
        await self._within(self._deadlines.call, "rows.dropped", self._rows.dropped(batch.row_ids, kind))
        self._recorder.event("step_skipped", step=step, reason=kind, cause=cause, row_ids=batch.row_ids)
        self._skips.skipped(kind, step, cause)

    def _note_skipped(self, step: int, cause: str | None) -> None:
        """A step of which some optimizer steps were not finite is trained, and yet counts as skipped."""
        if cause is None:
            self._skips.trained()
            return
        self._recorder.event("minibatch_skipped", step=step, cause=cause)
        self._skips.skipped("nonfinite", step, cause)

    def _check_mismatch(self, result: StepResult) -> None:
        warning = self._gate.check(result.step, result.metrics.get("mismatch/kl"))
        if warning is not None:
            self._recorder.event("mismatch", step=result.step, kl=result.metrics["mismatch/kl"], warning=warning)

    async def _publish(self, version: int) -> None:
        with self._phase("publish"):
            await self._within(self._deadlines.step, f"weights.publish({version})", self._weights.publish(version))
            self._progress.version, self._progress.published_step = version, self._progress.step
            await self._within(
                self._deadlines.call, "rows.published", self._rows.published(version, self._progress.step)
            )

    async def _record(self, batch: Batch, trained: Trained) -> None:
        status = await self._within(self._deadlines.call, "rows.status", self._rows.status())
        await self._ask_makers()
        record = StepRecord(trained, batch, self._version, self._watch.lap(), status, self._maker_statuses)
        self._last = self._metrics.build(record)
        self._recorder.metrics(self._last)

    async def _ask_makers(self) -> None:
        """Makers tell how they are if they can; the trainer goes on with what they last said if they cannot."""
        try:
            self._maker_statuses = await self._within(MAKERS_PATIENCE, "maker statuses", self._makers())
        except TimeoutError as error:
            self._recorder.event("makers_silent", step=self._progress.step, cause=str(error))

    async def _between_steps(self, batch: Batch) -> None:
        step, last = self._progress.step, self._progress.step == self._config.steps
        if self._rows_writer is not None and self._rows_writer.wants(step):
            await self._write_rows(self._rows_writer.write(step, batch.rows, batch.columns))
        evaluation = self._evaluation
        if evaluation is not None and evaluation.every is not None and step % evaluation.every == 0 and not last:
            await self._evaluate(evaluation)
        every = self._schedule.checkpoint_every
        # Last, so that a run that goes on from it has nothing left to do of this step.
        if (every is not None and step % every == 0 and not last) or self._saver.asked.is_set():
            await self._checkpoint()

    async def _write_rows(self, writing: Awaitable[None]) -> None:
        try:
            await self._within(self._deadlines.step, "rows file", writing)
        except OSError as error:  # a full disk costs the file, not the run
            self._recorder.event("rows_not_written", step=self._progress.step, cause=str(error))

    async def _validate(self, rows: Sequence[Columns]) -> None:
        """The loss of held-out rows, asked of the ranks."""
        step = self._progress.step
        async with self._ranks_work:
            await self._hand_to("ranks")
            with self._phase("evaluate"):
                found = await validate(self._ranks, self._config.backend, rows)
        self._held_out = {"step": step, "loss": found.loss}
        self._recorder.event("validation", step=step, loss=found.loss, rows=found.rows, tokens=found.tokens)
        self._recorder.chart(step, {"validation/loss": found.loss})

    async def _evaluate(self, evaluation: Evaluation) -> None:
        if evaluation.rows:
            await self._validate(evaluation.rows)
            return
        step, version = self._progress.step, self._version
        await self._hand_to("makers")
        with self._phase("evaluate"):
            asked = self._rows.evaluate(
                evaluation.prompts,
                samples=evaluation.samples,
                min_version=version,
                seed=evaluation.seed,
                timeout=evaluation.timeout,
            )
            evaluating = asyncio.ensure_future(asked)
            net = evaluation.timeout + self._deadlines.call
            try:
                result = await self._unless([self._stopping], net, "rows.evaluate", evaluating)
            finally:
                evaluating.cancel()
        if result is None:
            return
        self._held_out = {"step": step, "score": result.reward_mean}
        shown = ("rows", "samples", "failed", "response_length", "seconds")
        figures = {"score": result.reward_mean, "stderr": result.reward_stderr}
        figures |= {name: getattr(result, name) for name in shown}
        self._recorder.event("evaluation", step=step, version=version, **figures)
        self._recorder.chart(step, {"eval/score": result.reward_mean})

    async def _checkpoint(self) -> Saving:
        """Take one of the present step. Returns when its state is copied: who writes it, which may fail."""
        meta = {"step": self._progress.step, "version": self._version, "steps": self._config.steps}
        with self._phase("checkpoint"):
            await self._saver.settle()
        async with self._ranks_work:
            await self._hand_to("ranks")
            with self._phase("checkpoint"):
                return await self._saver.begin(meta)

    async def _end_checkpoints(self) -> None:
        """However the run ends: what is being written is finished, if that takes no longer than a call."""
        with suppress(TimeoutError):
            await self._within(self._deadlines.call, "checkpoint", self._saver.settle())
        self._saver.refuse("no checkpoint was taken: the run ended before")

    def _outcome(self) -> str | None:
        """Why the loop ends, None while it goes on."""
        if self._progress.step == self._config.steps:
            return "done"
        if self._stopping.is_set():
            return "stopped"
        return "end_of_data" if self._end_of_data else None

    async def _finish(self, outcome: str) -> None:
        step = self._progress.step
        with self._phase("checkpoint"):
            await self._saver.settle()  # else it is not known whether this step has one
        due = self._schedule.checkpoint_at_end and step > self._start_step and not self._saver.has(step)
        if due or (step and self._saver.asked.is_set()):
            saving = await self._checkpoint()
            with self._phase("checkpoint"):
                await self._saver.settle()
            if due:
                saving.result()
        if outcome != "stopped" and self._evaluation is not None and self._evaluation.at_end:
            await self._evaluate(self._evaluation)
        if self._rows_writer is not None:
            await self._write_rows(self._rows_writer.finish())
        await self._close_recorder()
        self._enter(outcome)

    async def _close_recorder(self) -> None:
        try:
            await self._within(self._deadlines.call, "recorder.close", asyncio.to_thread(self._recorder.close))
        except Exception as error:  # a chart service that cannot be reached costs its last points, not the run
            self._recorder.event("charts_not_closed", step=self._progress.step, cause=str(error))

    async def _hand_to(self, holder: Holder) -> None:
        """Where makers share the devices of the ranks: who is to have them now."""
        if self._turns is None or self._turns.holder == holder:
            return
        begun = self._clock()
        with self._phase("hand_over"):
            await self._turns.hand_to(holder)
        self._recorder.event("hand_over", step=self._progress.step, to=holder, seconds=self._clock() - begun)

    def _phase(self, name: str) -> Any:
        self._enter(name)
        return self._watch.measure(name)

    def _enter(self, phase: str) -> None:
        self._progress.phase, self._progress.since = phase, self._clock()

    async def _unless(
        self, interrupts: Sequence[asyncio.Event], seconds: float, what: str, task: asyncio.Future[T]
    ) -> T | None:
        return await unless(interrupts, seconds, self._late(what, seconds), task)

    async def _within(self, seconds: float, what: str, waiting: Awaitable[T]) -> T:
        return await within(seconds, self._late(what, seconds), waiting)

    def _late(self, what: str, seconds: float) -> str:
        return f"trainer: {what} took over {seconds:g} s (step {self._progress.step})"
