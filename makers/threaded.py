"""What a maker with a frozen model on a thread of its own has in common, whichever columns it makes.

Rows are computed one after another in the thread; up to `slots` wait there, so that none is missed meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from buffer.columns import Columns
from buffer.records import InfraFailure, Lease, Produced
from makers.frozen import FrozenMaker

if TYPE_CHECKING:
    from makers.scoring import FrozenModel


class ThreadedMaker(FrozenMaker):
    what: str  # the model, in messages

    def __init__(self, *, name: str, model_path: str, slots: int, threads: int) -> None:
        super().__init__(name=name, model_path=model_path, slots=slots)
        self._threads = threads
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scorer")
        self._model: FrozenModel
        self._closed = False
        self._running = 0
        self._seconds = 0.0

    def load(self) -> FrozenModel:
        """On the maker's own thread, once."""
        raise NotImplementedError

    def columns(self, rollout: Columns) -> Columns:
        """Of one row, on the maker's own thread. Raises DataFailure."""
        raise NotImplementedError

    async def start(self) -> None:
        """Load the model. Raises InfraFailure."""
        try:
            await self._in_thread(self._load)
        except Exception as error:
            raise InfraFailure(f"{self._name}: no {self.what} from {self._model_path}: {error!r}") from error

    async def make(self, lease: Lease, inputs: Mapping[str, Columns]) -> tuple[Produced, Columns]:
        self._running += 1
        try:
            return await super().make(lease, inputs)
        finally:
            self._running -= 1

    async def score(self, lease: Lease, rollout: Columns) -> tuple[Columns, float]:
        self._require_open(lease)
        columns, seconds = await self._in_thread(self._timed, lease, rollout)
        self._seconds += seconds
        return columns, seconds

    def status(self) -> dict[str, float | int | str | None]:
        """`seconds_forward` is the time inside the model."""
        return {
            "running": self._running,
            "rows_scored": self._rows,
            "tokens_scored": self._tokens,
            "seconds_forward": self._seconds,
        }

    async def leave_device(self) -> None:
        await self._in_thread(lambda: self._model.move("cpu"))

    async def take_device(self) -> None:
        await self._in_thread(lambda: self._model.move(None))

    async def close(self) -> None:
        self._closed = True
        self._awake.set()
        await asyncio.to_thread(self._thread.shutdown)

    def _require_open(self, lease: Lease) -> None:
        if self._closed:
            raise InfraFailure(f"maker {self._name}: closed before row {lease.row_id} was scored")

    async def _in_thread(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    # Below: on the maker's own thread.

    def _load(self) -> None:
        import torch

        torch.set_num_threads(self._threads)
        self._model = self.load()

    def _timed(self, lease: Lease, rollout: Columns) -> tuple[Columns, float]:
        self._require_open(lease)
        began = time.perf_counter()
        return self.columns(rollout), time.perf_counter() - began
