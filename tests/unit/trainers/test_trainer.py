from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from buffer.files import read_cut
from buffer.records import ColumnsLost, Prompt
from tests.fakes_trainer import FakeClock, FakeRank, FakeRecorder, FakeRows, FakeWeights, make_row
from trainers.checkpoints import Checkpoint, Checkpointer, CheckpointError, find_latest
from trainers.config import Dapo, Grpo, Optimizer, TorchBackend, TrainerConfig
from trainers.guards import MismatchExceeded, SkippedTooOften, StalenessExceeded
from trainers.metrics import MetricsBuilder
from trainers.planner import StepPlanner
from trainers.ports import Deadlines, Evaluation, Schedule
from trainers.rank_group import LocalWorker, RankError, RankGroup
from trainers.trainer import Trainer
from trainers.turns import Turns

pytestmark = pytest.mark.timeout(30)


def config(**changes: Any) -> TrainerConfig:
    settings: dict[str, Any] = {
        "algorithm": Grpo(type="grpo"),
        "backend": TorchBackend(type="torch"),
        "optimizer": Optimizer(),
        "groups_per_step": 2,
        "steps": 2,
    }
    return TrainerConfig(**(settings | changes))


@dataclass
class FakeTurns:
    log: list[tuple[Any, ...]]
    holder: str = "makers"

    async def hand_to(self, holder: str) -> None:
        self.holder = holder
        self.log.append(("hand_to", holder))


@dataclass
class Bench:
    """A trainer among fakes that share one log."""

    folder: Path
    config: TrainerConfig = field(default_factory=config)
    batches: list[Any] = field(default_factory=list)
    every: int = 1
    checkpoint_every: int | None = None
    checkpoint_at_end: bool = False
    max_age: int = 1
    evaluation: Evaluation | None = None
    start_step: int = 0
    start_version: int | None = None
    batch_deadline: float = 5.0
    ends: bool = False
    critic: Any = None
    results: dict[int, dict[str, Any]] = field(default_factory=dict)
    shared: bool = False  # the devices, with makers
    log: list[tuple[Any, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = FakeClock()
        self.rows = FakeRows(self.log, list(self.batches), ends=self.ends)
        self.rank = FakeRank(self.log, self.results)
        self.recorder = FakeRecorder()

    def build(self) -> Trainer:
        async def makers() -> dict[str, dict[str, Any]]:
            return {"maker/rollout/0": {"version": self.rows.version, "seconds_generating": 1.0, "tokens_generated": 7}}

        return Trainer(
            self.config,
            planner=StepPlanner(self.config, max_response_tokens=8),
            ranks=RankGroup([LocalWorker(self.rank, "trainer/policy/rank/0")], timeout=5.0),
            rows=self.rows,
            weights=FakeWeights(self.log),
            makers=makers,
            recorder=self.recorder,
            metrics=MetricsBuilder(wall_clock=lambda: 1000.0),
            checkpointer=Checkpointer(self.folder, keep=2),
            schedule=Schedule(self.every, self.checkpoint_every, self.checkpoint_at_end),
            deadlines=Deadlines(batch=self.batch_deadline, step=5.0, call=1.0),
            max_age=self.max_age,
            critic=self.critic,
            evaluation=self.evaluation,
            turns=cast(Turns, FakeTurns(self.log)) if self.shared else None,
            start_step=self.start_step,
            start_version=self.start_version,
            clock=self.clock,
        )

    def run(self) -> str:
        async def main() -> str:
            return await self.build().run()

        return asyncio.run(main())

    def calls(self, *names: str) -> list[tuple[Any, ...]]:
        return [call for call in self.log if call[0] in names]


def fresh(*row_ids: int, **changes: Any) -> Callable[[int], list[Any]]:
    """Rows made by the version that is the newest when they are sampled."""
    return lambda version: [make_row(row_id, version=version, **changes) for row_id in row_ids]


def test_start_version_is_published_before_rows_are_sampled_and_each_step_goes_sample_train_tell_publish(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path, batches=[fresh(0, 1), fresh(2, 3)])
    assert bench.run() == "done"
    assert bench.log == [
        ("publish", 0),
        ("published", 0, 0),
        ("sample", 2),
        ("train_step", 1, 0, 2),
        ("trained", (0, 1), 1),
        ("publish", 1),
        ("published", 1, 1),
        ("sample", 2),
        ("train_step", 2, 1, 2),
        ("trained", (2, 3), 2),
        ("publish", 2),
        ("published", 2, 2),
    ]
    assert [row["step"] for row in bench.recorder.objects] == [1, 2]
    assert bench.recorder.closed


def dynamic(max_refills: int) -> TrainerConfig:
    return config(algorithm=Dapo(type="dapo", max_refills=max_refills), steps=1)


def test_groups_without_a_signal_are_dropped_and_replaced_before_a_step(tmp_path: Path) -> None:
    silent = [make_row(1, rewards=(1.0, 1.0)), make_row(2, rewards=(0.0, 0.0))]
    batches = [[make_row(0), silent[0]], [make_row(0), silent[1]], [make_row(0), make_row(3)]]
    bench = Bench(tmp_path, batches=batches, config=dynamic(5))

    assert bench.run() == "done"

    told = bench.calls("sample", "dropped", "trained")
    assert told[:4] == [("sample", 2), ("dropped", (1,), "no_signal"), ("sample", 2), ("dropped", (2,), "no_signal")]
    assert told[4:] == [("sample", 2), ("trained", (0, 3), 1)]
    assert bench.recorder.objects[0]["reward/replaced"] == 2


def test_refills_end_at_their_bound_and_the_step_is_trained_as_it_is(tmp_path: Path) -> None:
    batches = [[make_row(0), make_row(i, rewards=(1.0, 1.0))] for i in (1, 2)]
    bench = Bench(tmp_path, batches=batches, config=dynamic(1))

    assert bench.run() == "done"

    assert bench.calls("dropped", "trained") == [("dropped", (1,), "no_signal"), ("trained", (0, 2), 1)]


def test_rows_whose_columns_are_lost_are_told_and_other_rows_asked_for(tmp_path: Path) -> None:
    rows = [make_row(0), make_row(1)]
    lost = {"rollout": ColumnsLost("the node died"), "reward": rows[1].columns["reward"]}
    bench = Bench(tmp_path, batches=[[rows[0], replace(rows[1], columns=lost)], fresh(0, 1), fresh(2, 3)])
    assert bench.run() == "done"
    assert bench.calls("sample", "lost", "trained") == [
        ("sample", 2),
        ("lost", 1, ("rollout",)),
        ("sample", 2),
        ("trained", (0, 1), 1),
        ("sample", 2),
        ("trained", (2, 3), 2),
    ]
    assert bench.recorder.of_kind("columns_lost") == [{"step": 1, "row_ids": [1], "cause": "the node died"}]


def test_ranks_that_could_not_be_brought_the_columns_get_those_that_the_trainer_has(tmp_path: Path) -> None:
    given: list[Any] = []

    class Lossy(FakeRank):
        def train_step(self, plan: Any, *rollouts: Any) -> Any:
            given.append(rollouts)
            if len(given) == 1:
                raise ColumnsLost("the buffer died")
            return super().train_step(plan, *rollouts)

    bench = Bench(tmp_path, batches=[fresh(0, 1), fresh(2, 3)])
    bench.rank = Lossy(bench.log)
    assert bench.run() == "done"
    assert [call[1] for call in bench.calls("train_step")] == [1, 2]
    assert [rollout["prompt_ids"].tolist() for rollout in given[1]] == [[1, 2], [1, 2]]


def test_the_start_version_of_a_trainer_that_begins_again_is_the_one_it_is_told(tmp_path: Path) -> None:
    bench = Bench(
        tmp_path, config=config(steps=4), every=2, start_step=2, start_version=7, batches=[fresh(0, 1), fresh(2, 3)]
    )
    assert bench.run() == "done"
    assert bench.calls("published", "trained") == [
        ("published", 7, 2),
        ("trained", (0, 1), 3),
        ("trained", (2, 3), 4),
        ("published", 8, 4),
    ]


def test_versions_are_published_every_k_steps_and_only_then_the_ranks_compare_with_makers(tmp_path: Path) -> None:
    bench = Bench(tmp_path, config=config(steps=5), every=2, batches=[fresh(2 * i, 2 * i + 1) for i in range(5)])
    bench.run()
    assert [call[1] for call in bench.calls("publish")] == [0, 1, 2]
    # The weights equal the published version only in the first step after a publication.
    assert [call[2] for call in bench.calls("train_step")] == [0, None, 1, None, 2]


def test_row_older_than_the_bound_stops_the_run_with_its_id_and_the_numbers(tmp_path: Path) -> None:
    bench = Bench(tmp_path, config=config(steps=3), batches=[fresh(0, 1), fresh(2, 3), [make_row(4), make_row(5)]])
    with pytest.raises(StalenessExceeded, match=r"row 4 has tokens of version 0, 2 versions behind version 2; .* is 1"):
        bench.run()
    assert len(bench.calls("train_step")) == 2


def test_row_from_a_version_that_was_never_published_stops_the_run(tmp_path: Path) -> None:
    bench = Bench(tmp_path, batches=[[make_row(0), make_row(1, version=0, max_version=3)]])
    with pytest.raises(StalenessExceeded, match="row 1 has tokens of version 3, but version 0 is the newest"):
        bench.run()


def test_batch_whose_samples_are_all_masked_takes_no_step_and_its_rows_are_dropped(tmp_path: Path) -> None:
    masking = config(algorithm=Grpo(type="grpo", mask_truncated=True), steps=1)
    bench = Bench(tmp_path, config=masking, batches=[fresh(0, 1, finish=(1, 1)), fresh(2, 3)])
    assert bench.run() == "done"
    assert bench.calls("dropped", "trained") == [("dropped", (0, 1), "no_valid_token"), ("trained", (2, 3), 1)]
    assert [call[1] for call in bench.calls("publish")] == [0, 1]
    assert bench.recorder.of_kind("step_skipped")[0]["row_ids"] == [0, 1]


def test_batches_without_a_valid_token_end_the_run_after_the_limit(tmp_path: Path) -> None:
    masking = config(algorithm=Grpo(type="grpo", mask_truncated=True), max_empty_steps=2)
    bench = Bench(tmp_path, config=masking, batches=[fresh(i, i + 1, finish=(1, 1)) for i in (0, 2, 4)])
    with pytest.raises(SkippedTooOften, match=r"step 1 was skipped 2 times in a row \(no_valid_token; limit 2\)"):
        bench.run()
    assert not bench.calls("train_step")


def test_batch_without_any_advantage_is_trained(tmp_path: Path) -> None:
    bench = Bench(tmp_path, config=config(steps=1), batches=[fresh(0, 1, rewards=(1.0, 1.0))])
    bench.run()
    assert bench.calls("trained") == [("trained", (0, 1), 1)]
    assert bench.recorder.objects[0]["reward/frac_zero_std"] == 1.0


def test_step_that_is_not_finite_is_dropped_and_tried_again_without_a_publication(tmp_path: Path) -> None:
    skipped = {"optimizer_steps": 0, "skipped": "loss is nan"}
    bench = Bench(tmp_path, config=config(steps=1), batches=[fresh(0, 1), fresh(2, 3)], results={1: skipped})
    assert bench.run() == "done"
    assert [call[1] for call in bench.calls("train_step")] == [1, 1]
    assert bench.calls("dropped", "trained") == [("dropped", (0, 1), "nonfinite"), ("trained", (2, 3), 1)]
    assert [call[1] for call in bench.calls("publish")] == [0, 1]


def test_steps_that_are_not_finite_end_the_run_after_the_limit_with_the_cause(tmp_path: Path) -> None:
    skipped = {"optimizer_steps": 0, "skipped": "loss is nan"}
    batches = [fresh(2 * i, 2 * i + 1) for i in range(4)]
    bench = Bench(
        tmp_path, config=config(max_nonfinite_steps=3), batches=batches, results=dict.fromkeys(range(1, 5), skipped)
    )
    with pytest.raises(SkippedTooOften, match=r"3 times in a row \(nonfinite; limit 3\): loss is nan"):
        bench.run()
    assert bench.calls("publish") == [("publish", 0)]


def test_trained_step_resets_the_count_of_skipped_ones(tmp_path: Path) -> None:
    skipped = {"optimizer_steps": 0, "skipped": "loss is nan"}
    batches = [fresh(2 * i, 2 * i + 1) for i in range(4)]
    bench = Bench(tmp_path, config=config(max_nonfinite_steps=2), batches=batches, results={1: skipped, 3: skipped})
    assert bench.run() == "done"


def test_step_with_one_of_two_minibatches_skipped_is_trained_but_counts_as_not_finite(tmp_path: Path) -> None:
    half = {"optimizer_steps": 1, "skipped": "minibatch 1: gradient is inf"}
    settings = config(minibatches=2, max_nonfinite_steps=2)
    bench = Bench(tmp_path, config=settings, batches=[fresh(0, 1), fresh(2, 3)], results={1: half, 2: half})
    with pytest.raises(SkippedTooOften, match="minibatch 1: gradient is inf"):
        bench.run()
    assert bench.calls("trained") == [("trained", (0, 1), 1), ("trained", (2, 3), 2)]
    assert bench.calls("publish")[-1] == ("publish", 1)


def test_mismatch_warns_past_the_first_bound_and_stops_before_publishing_past_the_second(tmp_path: Path) -> None:
    results = {1: {"metrics": {"mismatch/kl": 0.05}}, 2: {"metrics": {"mismatch/kl": 2.0}}}
    bench = Bench(tmp_path, batches=[fresh(0, 1), fresh(2, 3)], results=results)
    with pytest.raises(MismatchExceeded, match=r"step 2: KL .* is 2, above mismatch.stop 1"):
        bench.run()
    assert bench.recorder.of_kind("mismatch")[0]["step"] == 1
    assert [call[1] for call in bench.calls("publish")] == [0, 1]


def test_mismatch_that_is_not_a_number_stops_the_run(tmp_path: Path) -> None:
    bench = Bench(tmp_path, batches=[fresh(0, 1)], results={1: {"metrics": {"mismatch/kl": float("nan")}}})
    with pytest.raises(MismatchExceeded):
        bench.run()


def test_evaluations_come_at_start_every_n_steps_and_at_the_end_once_each(tmp_path: Path) -> None:
    evaluation = Evaluation([Prompt("e", "?")] * 3, samples=4, every=1, at_start=True, at_end=True, timeout=5.0)
    bench = Bench(tmp_path, batches=[fresh(0, 1), fresh(2, 3)], evaluation=evaluation)
    bench.rows.rewards = [0.1, 0.2, 0.3]
    bench.run()
    found = [(e["step"], e["version"], e["score"]) for e in bench.recorder.of_kind("evaluation")]
    assert found == [(0, 0, 0.1), (1, 1, 0.2), (2, 2, 0.3)]
    assert bench.calls("evaluate") == [("evaluate", 3, 0), ("evaluate", 3, 1), ("evaluate", 3, 2)]
    assert bench.recorder.charts == [(0, {"eval/score": 0.1}), (1, {"eval/score": 0.2}), (2, {"eval/score": 0.3})]


def test_checkpoints_come_every_n_steps_and_at_the_end_with_what_a_resume_needs(tmp_path: Path) -> None:
    batches = [fresh(2 * i, 2 * i + 1) for i in range(3)]
    bench = Bench(tmp_path, config=config(steps=3), batches=batches, checkpoint_every=2, checkpoint_at_end=True)
    bench.run()
    assert [e["step"] for e in bench.recorder.of_kind("checkpoint")] == [2, 3]
    latest = find_latest(tmp_path)
    assert (latest.step, latest.version) == (3, 3)
    assert (latest.path / "trainer" / "model.bin").read_bytes() == b"weights"
    state, columns = read_cut(latest.path / "buffer")
    assert state["filled"][0]["id"] == 7
    np.testing.assert_equal(columns, [{"rewards": np.array([0.5], np.float32)}])


def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_one_waits_for_it(tmp_path: Path) -> None:
    batches = [fresh(2 * i, 2 * i + 1) for i in range(3)]
    bench = Bench(tmp_path, config=config(steps=3), batches=batches, checkpoint_every=1)
    bench.rank.released.clear()

    async def main() -> str:
        trainer = bench.build()
        running = asyncio.create_task(trainer.run())
        while len(bench.calls("train_step")) < 2 or trainer.status()["phase"] != "checkpoint":  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        assert trainer.status()["phase"] == "checkpoint"
        assert len(bench.calls("cut")) == len(bench.calls("stage")) == 1
        bench.rank.released.set()
        return await running

    assert asyncio.run(main()) == "done"
    assert [e["step"] for e in bench.recorder.of_kind("checkpoint")] == [1, 2]
    first, *_ = written = [bench.log.index(call) for call in bench.calls("written")]
    assert len(written) == 2
    assert bench.log.index(("train_step", 2, 1, 2)) < first < len(bench.log) - bench.log[::-1].index(("stage",))


def test_a_checkpoint_that_is_asked_for_is_taken_at_once_while_rows_are_waited_for(tmp_path: Path) -> None:
    bench = Bench(tmp_path, config=config(steps=9), batches=[fresh(0, 1)])

    async def main() -> tuple[Checkpoint, str]:
        trainer = bench.build()
        running = asyncio.create_task(trainer.run())
        await bench.rows.waiting.wait()
        first, second = await asyncio.gather(trainer.checkpoint(), trainer.checkpoint())
        assert first == second
        assert trainer.status()["phase"] == "wait_for_batch"
        await trainer.stop()
        return first, await running

    checkpoint, outcome = asyncio.run(main())
    assert outcome == "stopped"
    assert checkpoint == find_latest(tmp_path)
    assert checkpoint.step == 1
    assert len(bench.calls("stage")) == 1
    assert len(bench.calls("sample")) == 2  # rows that come meanwhile are not lost


def test_a_checkpoint_that_is_asked_for_during_a_step_is_taken_at_its_end(tmp_path: Path) -> None:
    bench = Bench(tmp_path, batches=[fresh(0, 1), fresh(2, 3)])
    asked: list[asyncio.Task[Checkpoint]] = []

    async def main() -> str:
        trainer = bench.build()

        def first_batch(version: int) -> list[Any]:
            asked.append(asyncio.create_task(trainer.checkpoint()))
            return [make_row(0, version=version), make_row(1, version=version)]

        bench.rows.batches[0] = first_batch
        outcome = await trainer.run()
        assert asked[0].result().step == 1
        return outcome

    assert asyncio.run(main()) == "done"
    assert [call[0] for call in bench.calls("publish", "cut", "train_step")] == [
        *["publish", "train_step", "publish", "cut", "train_step", "publish"]
    ]


def test_a_checkpoint_that_is_asked_for_and_fails_costs_the_run_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path, config=config(steps=9), batches=[fresh(0, 1)])
    bench.rank.write_error = OSError(errno.ENOSPC, "No space left on device")

    async def main() -> str:
        trainer = bench.build()
        running = asyncio.create_task(trainer.run())
        await bench.rows.waiting.wait()
        with pytest.raises(CheckpointError, match="step-000001 was not written .*No space left"):
            await trainer.checkpoint()
        await trainer.stop()
        return await running

    assert asyncio.run(main()) == "stopped"


def test_a_checkpoint_of_a_run_that_has_not_begun_or_has_ended_is_refused_with_the_reason(tmp_path: Path) -> None:
    bench = Bench(tmp_path, config=config(steps=9), batches=[], ends=False)

    async def main() -> None:
        trainer = bench.build()
        with pytest.raises(CheckpointError, match=r"the trainer does not train \(starting\)"):
            await trainer.checkpoint()
        running = asyncio.create_task(trainer.run())
        await bench.rows.waiting.wait()
        asked = asyncio.create_task(trainer.checkpoint())
        await asyncio.sleep(0)
        await trainer.stop()
        with pytest.raises(CheckpointError, match="the run ended before"):
            await asked
        with pytest.raises(CheckpointError, match=r"the trainer does not train \(stopped\)"):
            await trainer.checkpoint()
        await running

    asyncio.run(main())
    assert not bench.calls("stage")


def test_full_disk_during_the_run_is_an_event_and_the_run_goes_on(tmp_path: Path) -> None:
    bench = Bench(tmp_path, batches=[fresh(0, 1), fresh(2, 3)], checkpoint_every=1)
    bench.rank.write_error = OSError(errno.ENOSPC, "No space left on device")
    assert bench.run() == "done"
    assert "No space left on device" in bench.recorder.of_kind("checkpoint_failed")[0]["cause"]
    assert list(tmp_path.iterdir()) == []


def test_full_disk_at_the_last_checkpoint_is_a_failure_of_the_run(tmp_path: Path) -> None:
    bench = Bench(tmp_path, batches=[fresh(0, 1), fresh(2, 3)], checkpoint_at_end=True)
    bench.rank.write_error = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(CheckpointError, match="step-000002 was not written .*No space left on device"):
        bench.run()


def test_resume_goes_on_with_the_next_step_and_publishes_its_weights_first(tmp_path: Path) -> None:
    evaluation = Evaluation([Prompt("e", "?")], samples=1, every=None, at_start=True, at_end=False, timeout=5.0)
    bench = Bench(
        tmp_path,
        config=config(steps=5),
        every=2,
        start_step=3,
        batches=[fresh(0, 1), fresh(2, 3)],
        evaluation=evaluation,
    )
    assert bench.run() == "done"
    assert bench.log[:2] == [("publish", 1), ("published", 1, 3)]
    assert bench.calls("train_step") == [("train_step", 4, 1, 2), ("train_step", 5, 2, 2)]
    assert [call[1] for call in bench.calls("publish")] == [1, 2]
    assert not bench.calls("evaluate")  # the start was evaluated in the run's first life


def test_resume_of_a_finished_step_count_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the checkpoint is of step 9, the run has only 2 steps"):
        Bench(tmp_path, start_step=9).build()


def test_stop_while_waiting_for_rows_returns_at_once_with_a_checkpoint(tmp_path: Path) -> None:
    bench = Bench(tmp_path, config=config(steps=9), batches=[fresh(0, 1)], checkpoint_at_end=True)

    async def main() -> tuple[str, dict[str, Any]]:
        trainer = bench.build()
        running = asyncio.create_task(trainer.run())
        await bench.rows.waiting.wait()
        assert not running.done()
        assert trainer.status()["phase"] == "wait_for_batch"
        await trainer.stop()
        assert running.done()
        return await running, trainer.status()

    outcome, status = asyncio.run(main())
    assert outcome == "stopped"
    assert (status["step"], status["version"], status["phase"]) == (1, 1, "stopped")
    assert find_latest(tmp_path).step == 1


def test_end_of_the_data_ends_the_run_cleanly_and_says_so(tmp_path: Path) -> None:
    bench = Bench(tmp_path, config=config(steps=9), batches=[fresh(0, 1)], ends=True, checkpoint_at_end=True)
    assert bench.run() == "end_of_data"
    assert bench.recorder.of_kind("end_of_data")[0]["step"] == 1
    assert find_latest(tmp_path).step == 1


def test_rank_that_fails_ends_the_run_and_is_named(tmp_path: Path) -> None:
    bench = Bench(tmp_path, batches=[fresh(0, 1)])

    def broken(*_: Any) -> None:
        raise RuntimeError("out of memory")

    bench.rank.train_step = broken  # type: ignore[method-assign, assignment]
    with pytest.raises(
        RankError, match=r"rank trainer/policy/rank/0 failed \(RuntimeError: out of memory\) in train_step"
    ):
        bench.run()


def test_buffer_that_does_not_answer_ends_the_run_by_its_deadline(tmp_path: Path) -> None:
    bench = Bench(tmp_path, batch_deadline=0.01)
    with pytest.raises(TimeoutError, match=r"trainer: rows.sample took over 1.01 s \(step 0\)"):
        bench.run()


def test_reward_that_is_not_finite_is_refused_with_the_row_id(tmp_path: Path) -> None:
    bench = Bench(tmp_path, batches=[fresh(0, 1, rewards=(0.0, np.nan))])
    with pytest.raises(ValueError, match="row 0: reward of sample 1 is nan"):
        bench.run()


def test_stop_does_not_wait_for_an_evaluation(tmp_path: Path) -> None:
    evaluation = Evaluation([Prompt("e", "?")], samples=1, every=None, at_start=True, at_end=True, timeout=5.0)
    bench = Bench(tmp_path, batches=[fresh(0, 1)], evaluation=evaluation)

    async def main() -> str:
        begun = asyncio.Event()

        async def endless(*_: Any, **__: Any) -> Any:
            begun.set()
            await asyncio.Event().wait()

        bench.rows.evaluate = endless  # type: ignore[method-assign]
        trainer = bench.build()
        running = asyncio.create_task(trainer.run())
        await begun.wait()
        await trainer.stop()
        return await running

    assert asyncio.run(main()) == "stopped"
    assert not bench.recorder.of_kind("evaluation")
    assert not bench.calls("train_step")


def test_ranks_have_shared_devices_from_the_step_to_the_publication_and_makers_while_rows_are_made(
    tmp_path: Path,
) -> None:
    prompts = [Prompt("q", "?")]
    evaluation = Evaluation(prompts, samples=1, every=None, at_start=False, at_end=True, timeout=5.0)
    bench = Bench(
        tmp_path,
        batches=[fresh(0, 1), fresh(2, 3)],
        shared=True,
        checkpoint_every=1,
        checkpoint_at_end=True,
        evaluation=evaluation,
    )
    step = [
        "sample",
        ("hand_to", "ranks"),
        "train_step",
        "trained",
        "publish",
        "published",
        *["cut", "stage"],
        ("hand_to", "makers"),
    ]
    assert bench.run() == "done"
    assert [call[0] if call[0] != "hand_to" else call for call in bench.log if call[0] != "written"] == [
        *["publish", "published"],  # before any maker is there
        *(2 * step),
        "evaluate",
    ]
    assert [(event["step"], event["to"]) for event in bench.recorder.of_kind("hand_over")] == [
        *[(0, "ranks"), (1, "makers"), (1, "ranks"), (2, "makers")]
    ]


def test_a_step_that_is_skipped_gives_shared_devices_back_before_it_waits_for_other_rows(tmp_path: Path) -> None:
    bench = Bench(
        tmp_path,
        config=config(steps=1),
        batches=[fresh(0, 1), fresh(2, 3)],
        shared=True,
        results={1: {"optimizer_steps": 0, "skipped": "loss is nan"}},
    )
    assert bench.run() == "done"
    wanted = ("hand_to", "sample", "train_step")
    assert [call[-1] if call[0] == "hand_to" else call[0] for call in bench.calls(*wanted)] == [
        *["sample", "ranks", "train_step", "makers", "sample", "ranks", "train_step"]
    ]
