"""What a maker with a frozen model on a thread of its own has in common, whichever columns it makes.

Guarantees:
1. A row that the model cannot take (its context, its vocabulary) fails as data, with the row and the numbers.
2. Asleep the model is in the host's memory. Rows in progress end before it sleeps, and a row that comes meanwhile waits.

Rows are computed one after another in the thread; up to `slots` wait there, so that none is missed meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from buffer.columns import Columns, nbytes
from buffer.records import DataFailure, InfraFailure, Lease, Produced

if TYPE_CHECKING:
    from makers.scoring import FrozenModel


class ThreadedMaker:
    stage: str
    needs = ("rollout",)
    what: str  # the model, in messages

    def __init__(self, *, name: str, model_path: str, slots: int, threads: int) -> None:
        self.slots = slots
        self._name = name
        self._model_path = model_path
        self._threads = threads
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scorer")
        self._model: FrozenModel
        self._awake = asyncio.Event()
        self._awake.set()
        self._closed = False
        self._running = 0
        self._rows = 0
        self._tokens = 0
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
            await self._awake.wait()
            self._require_open(lease)
            return await self._in_thread(self._make, lease, inputs["rollout"])
        finally:
            self._running -= 1

    def status(self) -> dict[str, float | int | str | None]:
        """`seconds_forward` is the time inside the model."""
        return {
            "running": self._running,
            "rows_scored": self._rows,
            "tokens_scored": self._tokens,
            "seconds_forward": self._seconds,
        }

    async def sleep(self, level: int) -> None:
        """See makers.maker.Sleeper. Both levels do the same: there is nowhere to bring frozen weights from again."""
        self._awake.clear()
        try:
            await self._in_thread(lambda: self._model.move("cpu"))  # behind the rows in progress
        except BaseException:
            self._awake.set()
            raise

    async def wake(self) -> None:
        await self._in_thread(lambda: self._model.move(None))
        self._awake.set()

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

    def _make(self, lease: Lease, rollout: Columns) -> tuple[Produced, Columns]:
        self._require_open(lease)
        began = time.perf_counter()
        try:
            columns = self.columns(rollout)
        except DataFailure as failure:
            raise DataFailure(f"row {lease.row_id} (prompt {lease.prompt.id!r}), {self.stage}: {failure}") from failure
        seconds = time.perf_counter() - began
        self._rows += 1
        self._tokens += rollout["response_ids"].size
        self._seconds += seconds
        samples = rollout["response_offsets"].size - 1
        return Produced(samples=samples, tokens=0, nbytes=nbytes(columns), seconds=seconds), columns
