"""Checkpoints beside the training: the trainer is held while the state is copied, and goes on while the copy is written.

Guarantees:
1. One cut: ranks, critic and buffer as they are at the end of one step. Makers are not held at all.
2. One at a time: a checkpoint waits until the one before is written; so may whoever ends the run.
3. One that fails is an event, and leaves the last one valid. Whoever waits for it learns the cause.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from buffer.files import write_cut
from buffer.snapshot import Cut
from trainers.checkpoints import (
    BUFFER_FOLDER,
    CRITIC_FOLDER,
    RANKS_FOLDER,
    Checkpoint,
    Checkpointer,
    CheckpointError,
    Writer,
)
from trainers.fetching import fetch_cut
from trainers.ports import RowSource, ValueModel
from trainers.rank import TrainerRank
from trainers.rank_group import RankGroup
from trainers.recorder import Recorder

Saving = asyncio.Task[Checkpoint]


class Saver:
    """Writes with `checkpointer` what `ranks`, `critic` and `rows` hold."""

    def __init__(
        self,
        checkpointer: Checkpointer,
        *,
        ranks: RankGroup,
        critic: ValueModel | None,
        rows: RowSource,
        recorder: Recorder,
        clock: Callable[[], float],
    ) -> None:
        self._checkpointer = checkpointer
        self._ranks = ranks
        self._critic = critic
        self._rows = rows
        self._recorder = recorder
        self._clock = clock
        self._step = 0  # that `_saving` is of
        self._saving: Saving | None = None
        self._wanted: list[asyncio.Future[Checkpoint]] = []
        self.asked = asyncio.Event()  # set while somebody wants a checkpoint that is not begun

    async def request(self) -> Checkpoint:
        """The one that is begun next, when it is written. Raises CheckpointError."""
        wanted = asyncio.get_running_loop().create_future()
        self._wanted.append(wanted)
        self.asked.set()
        return await wanted

    async def begin(self, meta: Mapping[str, Any]) -> Saving:
        """Copy the state of the step that `meta` names; returns when it may change. Raises nothing.

        The task ends when the checkpoint is written, and raises CheckpointError if it is not. A step that has its
        checkpoint already is not copied again.
        """
        await self.settle()
        if self._saving is None or not self.has(meta["step"]):
            copied = asyncio.Event()
            self._step, self._saving = meta["step"], asyncio.create_task(self._save(meta, copied))
            self._saving.add_done_callback(lambda saving: saving.cancelled() or saving.exception())  # it has been told
            waiting = asyncio.create_task(copied.wait())
            await asyncio.wait({self._saving, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
        for wanted in self._requests():
            self._saving.add_done_callback(partial(_answer, wanted))
        return self._saving

    async def settle(self) -> None:
        """Wait until nothing is being written."""
        if self._saving is not None:
            await asyncio.wait({self._saving})

    def refuse(self, cause: str) -> None:
        """There will be no next one."""
        for wanted in self._requests():
            if not wanted.done():  # else whoever asked is gone
                wanted.set_exception(CheckpointError(cause))

    def _requests(self) -> list[asyncio.Future[Checkpoint]]:
        self.asked.clear()
        requests, self._wanted = self._wanted, []
        return requests

    def has(self, step: int) -> bool:
        """Whether the checkpoint of this step is written."""
        saving = self._saving
        return saving is not None and self._step == step and saving.done() and saving.exception() is None

    async def _save(self, meta: Mapping[str, Any], copied: asyncio.Event) -> Checkpoint:
        step, begun = meta["step"], self._clock()
        try:
            cut = await self._rows.cut()
            critic = [] if self._critic is None else [self._critic.stage()]
            await asyncio.gather(self._ranks.call(TrainerRank.stage), *critic)
            copied.set()
            checkpoint = await self._checkpointer.save(meta, self._writers(cut))
        except Exception as error:
            cause = (
                error if isinstance(error, CheckpointError) else CheckpointError(f"step {step}, not copied: {error}")
            )
            self._recorder.event("checkpoint_failed", step=step, cause=str(cause))
            raise cause from error
        seconds = round(self._clock() - begun, 3)
        self._recorder.event("checkpoint", step=step, folder=str(checkpoint.path), seconds=seconds)
        return checkpoint

    def _writers(self, cut: Cut) -> list[Writer]:
        async def ranks(folder: Path) -> None:
            await self._ranks.call(TrainerRank.write, str(folder / RANKS_FOLDER))
            _require(folder / RANKS_FOLDER)

        async def critic(folder: Path) -> None:
            assert self._critic is not None
            await self._critic.write(str(folder / CRITIC_FOLDER))
            _require(folder / CRITIC_FOLDER)

        async def buffer(folder: Path) -> None:
            state, columns = await fetch_cut(self._rows, cut)
            await asyncio.to_thread(write_cut, folder / BUFFER_FOLDER, state, columns)

        return [ranks, buffer] if self._critic is None else [ranks, critic, buffer]


def _answer(wanted: asyncio.Future[Checkpoint], saving: Saving) -> None:
    if wanted.done() or saving.cancelled():  # whoever asked, or this process, is gone
        return
    if (error := saving.exception()) is not None:
        wanted.set_exception(error)
    else:
        wanted.set_result(saving.result())


def _require(folder: Path) -> None:
    """What ranks on other nodes wrote must be seen here, or the checkpoint would lack it."""
    if not folder.is_dir():
        raise OSError(f"the ranks wrote nothing to {folder} that is seen here: the run folder must be on a shared disk")
