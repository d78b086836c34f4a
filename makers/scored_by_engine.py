"""What a maker with a frozen model on vLLM has in common, whichever columns it makes of the scores.

Guarantees: token ids in, the same token ids scored; one result for each response token, in their order; a row that is too
long for the engine fails as data.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from buffer.columns import Columns
from buffer.records import DataFailure, InfraFailure, Lease
from makers.config import VllmEngine
from makers.engines.engine import ScoreRequest, Scores
from makers.engines.vllm import InProcessVllm
from makers.frozen import FrozenMaker


class EngineScoredMaker(FrozenMaker):
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
        super().__init__(name=name, model_path=model_path, slots=slots)
        self._top_k = top_k
        self._engine = InProcessVllm(
            engine, model_path, threads=threads, seed=0, recompute=False, version=0, sleeps=sleeps,
            core=lambda *args, **settings: _core(*args, **settings, top_k=top_k, micro_batch_tokens=micro_batch_tokens),
        )  # fmt: skip

    async def start(self) -> None:
        """Load the model. Raises InfraFailure."""
        await self._engine.start()

    def prompt_ids(self, lease: Lease, rollout: Columns) -> list[int]:
        ids: list[int] = rollout["prompt_ids"].tolist()
        return ids

    def kind_of_prompt(self, lease: Lease) -> str:
        return ""

    def columns(self, scores: list[Scores]) -> Columns:
        raise NotImplementedError

    async def score(self, lease: Lease, rollout: Columns) -> tuple[Columns, float]:
        began = time.perf_counter()
        scores = await self._scores(lease, rollout)
        return self.columns(scores), time.perf_counter() - began

    async def _scores(self, lease: Lease, rollout: Columns) -> list[Scores]:
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

    def status(self) -> dict[str, float | int | str | None]:
        engine = self._engine.status()
        return {
            "state": engine["state"],
            "running": engine["running"],
            "rows_scored": self._rows,
            "tokens_scored": self._tokens,
            "seconds_forward": engine["seconds_generating"],
        }

    async def leave_device(self) -> None:
        await self._engine.sleep(1)

    async def take_device(self) -> None:
        await self._engine.wake()

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
