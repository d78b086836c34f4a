"""The reference maker: log-probs of a row's sampled tokens under a policy that never changes.

Guarantees:
1. `reference_logprobs[t]` belongs to `response_ids[t]`: one for each response token of the row, in their order.
2. They are of the distribution tempered at the sample's `temperatures`, as `behaviour_logprobs` are, so that the two can
   be compared term by term.
3. A row that the model cannot take (its context, its vocabulary) fails as data, with the numbers.
4. Asleep the model is in the host's memory. Rows in progress end before it sleeps, and a row that comes meanwhile waits.

Rows are computed one after another in a thread of their own; up to `slots` wait there, so that none is missed meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from buffer.columns import Columns, nbytes
from buffer.records import DataFailure, InfraFailure, Lease, Produced
from makers.config import ReferenceMaker as ReferenceMakerConfig

if TYPE_CHECKING:
    from makers.scoring import Scorer


class ReferenceMaker:
    """Fills the stage `reference`: `reference_logprobs` float32 [response tokens]."""

    stage = "reference"
    needs = ("rollout",)

    def __init__(self, config: ReferenceMakerConfig, *, name: str, model_path: str) -> None:
        self.slots = config.slots
        self._config = config
        self._name = name
        self._model_path = model_path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scorer")
        self._scorer: Scorer
        self._awake = asyncio.Event()
        self._awake.set()
        self._closed = False
        self._running = 0
        self._rows = 0
        self._tokens = 0
        self._seconds = 0.0

    async def start(self) -> None:
        """Load the model. Raises InfraFailure."""
        try:
            await self._in_thread(self._load)
        except Exception as error:
            raise InfraFailure(f"{self._name}: no reference model from {self._model_path}: {error!r}") from error

    async def make(self, lease: Lease, inputs: Mapping[str, Columns]) -> tuple[Produced, Columns]:
        self._running += 1
        try:
            await self._awake.wait()
            self._require_open(lease)
            return await self._in_thread(self._score, lease, inputs["rollout"])
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
            await self._in_thread(lambda: self._scorer.move("cpu"))  # behind the rows in progress
        except BaseException:
            self._awake.set()
            raise

    async def wake(self) -> None:
        await self._in_thread(lambda: self._scorer.move(None))
        self._awake.set()

    async def close(self) -> None:
        self._closed = True
        self._awake.set()
        await asyncio.to_thread(self._thread.shutdown)

    def _require_open(self, lease: Lease) -> None:
        if self._closed:
            raise InfraFailure(f"maker {self._name}: closed before row {lease.row_id} was scored")

    async def _in_thread(self, function, *args):
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    # Below: on the maker's own thread.

    def _load(self) -> None:
        import torch

        from makers.scoring import Scorer

        torch.set_num_threads(self._config.cpu_threads)
        self._scorer = Scorer(
            self._model_path, dtype=self._config.dtype, micro_batch_tokens=self._config.micro_batch_tokens
        )

    def _score(self, lease: Lease, rollout: Columns) -> tuple[Produced, Columns]:
        self._require_open(lease)
        began = time.perf_counter()
        logprobs = np.empty(rollout["response_ids"].size, np.float32)
        try:
            for sample in self._scorer.score(rollout):
                logprobs[sample.span] = sample.log_probs.gather(-1, sample.targets[:, None])[:, 0].cpu().numpy()
        except DataFailure as failure:
            raise DataFailure(f"row {lease.row_id} (prompt {lease.prompt.id!r}), reference: {failure}") from failure
        seconds = time.perf_counter() - began
        self._rows += 1
        self._tokens += logprobs.size
        self._seconds += seconds
        columns = {"reference_logprobs": logprobs}
        samples = rollout["response_offsets"].size - 1
        return Produced(samples=samples, tokens=0, nbytes=nbytes(columns), seconds=seconds), columns
