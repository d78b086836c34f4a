"""Trainer and buffer over a checkpoint: what was in flight goes on, with the columns it had."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffer.config import BufferConfig
from buffer.files import read_cut
from buffer.records import ColumnsLost
from buffer.snapshot import Cut, places
from tests.contract.test_trainer_and_buffer import GROUPS, STEPS, World, new_buffer, new_trainer
from tests.fakes_trainer import FakeRank, FakeRecorder
from tests.local_runtime import LocalRows
from trainers.checkpoints import Checkpoint, find_latest
from trainers.rank_group import RankError

pytestmark = pytest.mark.timeout(60)
FAILS = 6
SETTINGS = [
    (BufferConfig(max_staleness=0), 1),
    (BufferConfig(max_staleness=1), 1),
    (BufferConfig(max_staleness=1), 2),
    (BufferConfig(max_staleness=2, order="window", window=3), 1),
    (BufferConfig(max_staleness=1, order="ready"), 1),
]


class Dies(FakeRank):
    def train_step(self, plan: Any, *rollouts: Any) -> Any:
        if plan.step == FAILS:
            raise RuntimeError("killed")
        return super().train_step(plan, *rollouts)


async def first_life(folder: Path, settings: BufferConfig, every: int) -> tuple[Checkpoint, list[int]]:
    """The checkpoint of the last step before the one that fails, and which rows were trained until then."""
    world = World()
    buffer = new_buffer(settings, every, world)
    trainer = new_trainer(folder, settings, every, buffer, world, FakeRecorder(), Dies([]), checkpoint_every=1)
    with pytest.raises(RankError):
        await trainer.run()
    await buffer.close()
    return find_latest(folder), ids(trainer._rows)[:-GROUPS]


async def second_life(folder: Path, settings: BufferConfig, every: int, checkpoint: Checkpoint) -> Any:
    """The rows as they were trained from the checkpoint on, and the buffer's last status."""
    world = World()
    buffer = new_buffer(settings, every, world)
    buffer.restore(*read_cut(checkpoint.path / "buffer"))
    start = {"start_step": checkpoint.step, "start_version": checkpoint.version}
    trainer = new_trainer(folder, settings, every, buffer, world, FakeRecorder(), FakeRank([]), **start)
    assert await trainer.run() == "done"
    status = buffer.status()
    await buffer.close()
    return trainer._rows, status


def ids(rows: Any) -> list[int]:
    return [row.row_id for batch in rows.batches for row in batch]


@pytest.mark.parametrize(("settings", "every"), SETTINGS)
def test_a_resumed_run_trains_the_rows_of_its_checkpoint_as_they_were(
    tmp_path: Path, settings: BufferConfig, every: int
) -> None:
    async def main() -> None:
        checkpoint, before = await first_life(tmp_path, settings, every)
        state, columns = read_cut(checkpoint.path / "buffer")
        rows, status = await second_life(tmp_path, settings, every, checkpoint)

        assert checkpoint.step == FAILS - 1
        assert set(before).isdisjoint(ids(rows))
        assert len(before) + len(ids(rows)) == len({*before, *ids(rows)}) == STEPS * GROUPS
        assert status["ledger"]["rows"]["trained"] == STEPS * GROUPS
        assert status["ledger"]["tokens"]["dropped"].get("lost", 0) == 0
        trained = {row.row_id: row.columns for batch in rows.batches for row in batch}
        kept = [(row, stage) for row, stage in places(state) if row in trained]
        assert settings.max_staleness == 0 or kept  # makers were ahead
        for (row, stage), saved in zip(places(state), columns, strict=True):
            if row in trained:
                np.testing.assert_equal(dict(trained[row][stage]), dict(saved))

    asyncio.run(main())


def test_a_row_whose_columns_are_lost_while_a_checkpoint_is_written_is_made_again_by_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = BufferConfig(max_staleness=1)
    lost: list[int] = []

    async def cut(rows: LocalRows) -> Cut:
        """Of one row, the columns of the first stage cannot be fetched."""
        whole = rows._buffer.cut()
        if whole.references:
            lost[:] = [places(whole.state)[0][0]]
            return Cut(whole.state, [None, *whole.references[1:]])
        return whole

    async def fetch(rows: LocalRows, reference: Any) -> Any:
        if reference is None:
            raise ColumnsLost("its node is gone", [])
        return reference

    async def main() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(LocalRows, "cut", cut)
            patch.setattr(LocalRows, "fetch", fetch)
            checkpoint, _ = await first_life(tmp_path, settings, 1)
        state, _ = read_cut(checkpoint.path / "buffer")
        assert lost
        assert lost[0] not in {row for row, _ in places(state)}
        rows, status = await second_life(tmp_path, settings, 1, checkpoint)
        assert lost[0] in ids(rows)
        assert status["ledger"]["rows"]["trained"] == STEPS * GROUPS
        assert status["ledger"]["tokens"]["dropped"]["lost"] > 0

    asyncio.run(main())
