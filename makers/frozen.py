"""What a maker with a frozen model on vLLM has in common, whichever columns it makes of the scores.

Guarantees: token ids in, the same token ids scored; one result for each response token, in their order; a row that the model
cannot take fails as data, with the numbers; asleep it holds no device memory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from buffer.columns import Columns, nbytes
from buffer.records import DataFailure, InfraFailure, Lease, Produced
from makers.config import VllmEngine
from makers.engines.engine import ScoreRequest, Scores
from makers.engines.vllm import InProcessVllm


class FrozenMaker:
    """The weights are those of the model's folder, for ever: there is no weight client."""

    stage: str
    needs = ("rollout",)

    def __init__(
        self,
        engine: VllmEngine,
        *,
        name: str,
        model_path: str,
        slots: int,
        threads: int,
        top_k: int,
        micro_batch_tokens: int,
        sleeps: bool,
    ) -> None:
        self.slots = slots
        self._name = name
        self._model_path = model_path
        self._top_k = top_k
        self._engine = InProcessVllm(
            engine, model_path, threads=threads, seed=0, recompute=False, version=0, sleeps=sleeps,
            core=lambda *args, **settings: _core(*args, **settings, top_k=top_k, micro_batch_tokens=micro_batch_tokens),
        )  # fmt: skip
        self._awake = asyncio.Event()
        self._awake.set()
        self._rows = 0
        self._tokens = 0

    async def start(self) -> None:
        """Load the model. Raises InfraFailure."""
        await self._engine.start()

    async def make(self, lease: Lease, inputs: Mapping[str, Columns]) -> tuple[Produced, Columns]:
        rollout = inputs["rollout"]
        await self._awake.wait()
        began = time.perf_counter()
        try:
            scores = await self._score(lease, rollout)
        except DataFailure as failure:
            raise DataFailure(f"row {lease.row_id} (prompt {lease.prompt.id!r}), {self.stage}: {failure}") from failure
        columns = self.columns(scores)
        self._rows += 1
        self._tokens += rollout["response_ids"].size
        produced = Produced(
            samples=len(scores),
            tokens=0,
            nbytes=nbytes(columns),
            seconds=time.perf_counter() - began,
            stats=self.stats(columns),
        )
        return produced, columns

    async def _score(self, lease: Lease, rollout: Columns) -> list[Scores]:
        prompt_ids = self.prompt_ids(lease, rollout)
        offsets = rollout["response_offsets"]
        responses = np.split(rollout["response_ids"], offsets[1:-1])
        longest, room = int(np.diff(offsets).max()), self._engine.max_model_len - 1
        if len(prompt_ids) + longest > room:
            raise DataFailure(
                f"{len(prompt_ids)} prompt tokens{self.kind_of_prompt(lease)} + {longest} response tokens exceed {room} "
                f"(engine.max_model_len {self._engine.max_model_len}, less the token that vLLM adds)"
            )
        try:
            return await self._engine.generate(ScoreRequest(prompt_ids, responses, self._top_k))  # type: ignore[arg-type, return-value]
        except ValueError as error:
            raise DataFailure(f"refused by the engine: {error}") from error

    def prompt_ids(self, lease: Lease, rollout: Columns) -> list[int]:
        ids: list[int] = rollout["prompt_ids"].tolist()
        return ids

    def kind_of_prompt(self, lease: Lease) -> str:
        return ""

    def columns(self, scores: list[Scores]) -> Columns:
        raise NotImplementedError

    def stats(self, columns: Columns) -> dict[str, float]:
        return {}

    def status(self) -> dict[str, float | int | str | None]:
        engine = self._engine.status()
        return {
            "state": engine["state"],
            "running": engine["running"],
            "rows_scored": self._rows,
            "tokens_scored": self._tokens,
            "seconds_forward": engine["seconds_generating"],
        }

    async def sleep(self, level: int) -> None:
        """See makers.maker.Sleeper. Level 1 whatever is asked: there is nowhere to bring frozen weights from again."""
        self._awake.clear()
        try:
            await self._engine.sleep(1)
        except BaseException:
            self._awake.set()
            raise

    async def wake(self) -> None:
        await self._engine.wake()
        self._awake.set()

    async def close(self) -> None:
        await self._engine.close()
        self._awake.set()


def _core(*args: Any, **settings: Any) -> Any:
    from makers.engines.vllm_scoring import ScoringCore

    return ScoringCore(*args, **settings)


def joined(parts: list[np.ndarray]) -> np.ndarray:
    """Of all samples of a row, flat."""
    return np.concatenate([part.reshape(-1) for part in parts])


def require_temperature_one(rollout: Columns) -> None:
    """Raises InfraFailure: what vLLM says of a prompt is at temperature 1, so it cannot be compared with other samples."""
    wrong = rollout["temperatures"] != 1.0
    if wrong.any():
        raise InfraFailure(
            f"sampled at temperature {rollout['temperatures'][int(np.argmax(wrong))]:g}, but vLLM gives the log-probs of a "
            "prompt at temperature 1 only: remove `engine`, so that transformers computes them"
        )
