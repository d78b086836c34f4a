"""What a maker with a frozen model has in common, whatever computes it and whichever columns it makes.

Guarantees: a row that the model cannot take fails as data, with the row and the numbers; asleep the maker holds no device
memory, rows in progress end before it sleeps, and a row that comes meanwhile waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from buffer.columns import Columns, nbytes
from buffer.records import DataFailure, Lease, Produced


class FrozenMaker:
    """The weights are those of the model's folder, for ever: there is no weight client."""

    stage: str
    needs = ("rollout",)

    def __init__(self, *, name: str, model_path: str, slots: int) -> None:
        self.slots = slots
        self._name = name
        self._model_path = model_path
        self._awake = asyncio.Event()
        self._awake.set()
        self._rows = 0
        self._tokens = 0

    async def score(self, lease: Lease, rollout: Columns) -> tuple[Columns, float]:
        """The columns of one row, and the seconds they took. Raises DataFailure, which need not name the row."""
        raise NotImplementedError

    def stats(self, columns: Columns) -> dict[str, float]:
        """Means over the samples, for the metrics."""
        return {}

    async def take_device(self) -> None:
        raise NotImplementedError

    async def leave_device(self) -> None:
        """Behind the rows in progress."""
        raise NotImplementedError

    async def make(self, lease: Lease, inputs: Mapping[str, Columns]) -> tuple[Produced, Columns]:
        rollout = inputs["rollout"]
        await self._awake.wait()
        try:
            columns, seconds = await self.score(lease, rollout)
        except DataFailure as failure:
            raise DataFailure(f"row {lease.row_id} (prompt {lease.prompt.id!r}), {self.stage}: {failure}") from failure
        self._rows += 1
        self._tokens += rollout["response_ids"].size
        samples = rollout["response_offsets"].size - 1
        produced = Produced(
            samples=samples, tokens=0, nbytes=nbytes(columns), seconds=seconds, stats=self.stats(columns)
        )
        return produced, columns

    async def sleep(self, level: int) -> None:
        """See makers.maker.Sleeper. Both levels do the same: there is nowhere to bring frozen weights from again."""
        self._awake.clear()
        try:
            await self.leave_device()
        except BaseException:
            self._awake.set()
            raise

    async def wake(self) -> None:
        await self.take_device()
        self._awake.set()
