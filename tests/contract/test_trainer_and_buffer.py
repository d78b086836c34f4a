"""The trainer's loop against the real experience table, with makers that answer after a few turns of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from buffer.buffer import Buffer
from buffer.config import BufferConfig
from buffer.records import Lease, MakerInfo, Produced, Prompt
from buffer.table import worst_case_age
from tests.fakes_trainer import FakeRank, FakeRecorder, make_row
from tests.local_runtime import LocalRows
from trainers.checkpoints import Checkpointer
from trainers.config import Grpo, TorchBackend, TrainerConfig
from trainers.metrics import MetricsBuilder
from trainers.planner import StepPlanner
from trainers.ports import Deadlines, Schedule
from trainers.rank_group import LocalWorker, RankError, RankGroup
from trainers.trainer import Trainer

pytestmark = pytest.mark.timeout(60)
STEPS, GROUPS = 8, 4


class Prompts:
    cursor = 0

    def next(self) -> Prompt:
        self.cursor += 1
        return Prompt(id=str(self.cursor), content="?")

    def seek(self, cursor: int) -> None:
        self.cursor = cursor


class World:
    """The newest weights that makers can take."""

    version = -1

    async def publish(self, version: int) -> None:
        self.version = version


class MakerOf:
    """Fills one stage. A row takes `1 + row id % 5` turns, so rows overtake each other."""

    def __init__(self, stage: str, needs: tuple[str, ...], world: World) -> None:
        self.info = MakerInfo(f"maker/{stage}/0", stage, stage, needs, slots=6)
        self._world = world

    async def make(self, lease: Lease, inputs: Sequence[Any]) -> tuple[Produced, Mapping[str, Any]]:
        version = self._world.version
        for _ in range(1 + lease.row_id % 5):
            await asyncio.sleep(0)
        truncated = (1, 1) if lease.row_id % 7 == 0 else (0, 0)
        row = make_row(lease.row_id, version=version, max_version=self._world.version, finish=truncated)
        return row.produced[self.info.stage], row.columns[self.info.stage]


def new_buffer(settings: BufferConfig, every: int, world: World) -> Buffer:
    buffer = Buffer(
        settings,
        Prompts(),
        stages=("rollout", "reward"),
        groups_per_step=GROUPS,
        every=every,
        samples=2,
        total_rows=STEPS * GROUPS,
        seed=0,
    )
    buffer.attach(MakerOf("rollout", (), world))
    buffer.attach(MakerOf("reward", ("rollout",), world))
    return buffer


def new_trainer(
    folder: Path,
    settings: BufferConfig,
    every: int,
    buffer: Buffer,
    world: World,
    recorder: FakeRecorder,
    rank: FakeRank,
    checkpoint_every: int | None = None,
    **start: int,
) -> Trainer:
    async def makers() -> dict[str, Any]:
        return {}

    config = TrainerConfig(
        algorithm=Grpo(type="grpo", mask_truncated=True),
        backend=TorchBackend(type="torch"),
        groups_per_step=GROUPS,
        steps=STEPS,
    )
    return Trainer(
        config,
        planner=StepPlanner(config, max_response_tokens=8),
        ranks=RankGroup([LocalWorker(rank)], timeout=10.0),
        rows=LocalRows(buffer),
        weights=world,
        makers=makers,
        recorder=recorder,
        metrics=MetricsBuilder(),
        checkpointer=Checkpointer(folder, keep=1),
        schedule=Schedule(every, checkpoint_every, checkpoint_at_end=False),
        deadlines=Deadlines(batch=10.0, step=10.0),
        max_age=worst_case_age(settings.order, settings.window, settings.max_staleness, GROUPS, every),
        **start,
    )


def train(folder: Path, settings: BufferConfig, every: int, results: dict[int, dict[str, Any]]) -> tuple[Any, Any]:
    """Run to the end; the metrics objects and the buffer's last status."""

    async def main() -> tuple[Any, Any]:
        world, recorder = World(), FakeRecorder()
        buffer = new_buffer(settings, every, world)
        trainer = new_trainer(folder, settings, every, buffer, world, recorder, FakeRank([], results))
        assert await trainer.run() == "done"
        status = buffer.status()
        await buffer.close()
        return recorder.objects, status

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("settings", "every"),
    [
        (BufferConfig(max_staleness=0), 1),
        (BufferConfig(max_staleness=1), 1),
        (BufferConfig(max_staleness=2), 2),
        (BufferConfig(max_staleness=1, order="window", window=3), 1),
        (BufferConfig(max_staleness=1, order="ready"), 1),
    ],
)
def test_run_reaches_its_last_step_within_the_bound_and_the_ledger_closes(
    tmp_path: Path, settings: BufferConfig, every: int
) -> None:
    objects, status = train(tmp_path, settings, every, results={})
    assert [row["step"] for row in objects] == list(range(1, STEPS + 1))
    bound = worst_case_age(settings.order, settings.window, settings.max_staleness, GROUPS, every)
    assert max(row["staleness/max"] for row in objects) <= bound
    rows = status["ledger"]["rows"]
    assert rows["trained"] == STEPS * GROUPS
    assert rows["admitted"] == rows["trained"] + sum(rows["dropped"].values()) + rows["in_flight"]


def test_rows_of_skipped_steps_are_replaced_and_the_run_still_reaches_its_last_step(tmp_path: Path) -> None:
    skipped = {"optimizer_steps": 0, "skipped": "gradient is inf"}
    objects, status = train(tmp_path, BufferConfig(max_staleness=1), 1, results={2: skipped, 5: skipped})
    assert [row["step"] for row in objects] == list(range(1, STEPS + 1))
    assert status["ledger"]["rows"]["trained"] == STEPS * GROUPS
    assert status["ledger"]["rows"]["dropped"] == {"nonfinite": 2 * GROUPS}
    assert max(row["staleness/max"] for row in objects) <= 1


@pytest.mark.parametrize("back_to", [0, 2, 3, 5])
@pytest.mark.parametrize(
    ("settings", "every"),
    [
        (BufferConfig(max_staleness=0), 1),
        (BufferConfig(max_staleness=1), 2),
        (BufferConfig(max_staleness=1, order="window", window=3), 1),
        (BufferConfig(max_staleness=1, order="ready"), 2),
    ],
)
def test_a_trainer_that_is_lost_goes_on_from_a_step_before_while_buffer_and_makers_stay(
    tmp_path: Path, settings: BufferConfig, every: int, back_to: int
) -> None:
    """The first one fails in the middle of its sixth step, when it has rows; the second publishes under larger versions."""

    class Dies(FakeRank):
        def train_step(self, plan: Any, *rollouts: Any) -> Any:
            if plan.step == 6:
                raise RuntimeError("killed")
            return super().train_step(plan, *rollouts)

    async def main() -> tuple[list[int], Any]:
        world, recorder = World(), FakeRecorder()
        buffer = new_buffer(settings, every, world)
        first = new_trainer(tmp_path, settings, every, buffer, world, FakeRecorder(), Dies([]))
        with pytest.raises(RankError):
            await first.run()
        buffer.rewind(back_to)
        start = {"start_step": back_to, "start_version": world.version + 1}
        second = new_trainer(tmp_path, settings, every, buffer, world, recorder, FakeRank([]), **start)
        assert await second.run() == "done"
        status = buffer.status()
        await buffer.close()
        return [row["step"] for row in recorder.objects], status

    steps, status = asyncio.run(main())
    assert steps == list(range(back_to + 1, STEPS + 1))
    rows = status["ledger"]["rows"]
    assert rows["trained"] == STEPS * GROUPS
    assert rows["dropped"].get("rewound", 0) == (5 - back_to) * GROUPS
    assert rows["admitted"] == rows["trained"] + sum(rows["dropped"].values()) + rows["in_flight"]
