"""The teacher maker: what another model (or the same one, told more) thinks of each token of a row.

Guarantees:
1. Entry t of a column belongs to `response_ids[t]`; the K likeliest tokens stand best first, and the sampled one apart.
2. Log-probs are at temperature 1, whatever temperature the samples were drawn at.
3. A row with a non-empty `teacher_prompt` (text or chat messages) is scored behind that prompt, any other behind its own; the
   response tokens are the same, never encoded again.
4. Behind a prompt that ends otherwise than with the policy's generation prompt no row is scored: the response would not
   follow what it followed when it was sampled. Such a row, and one that is too long, fails as data.
"""

from __future__ import annotations

import asyncio

import numpy as np

from buffer.columns import Columns
from buffer.records import DataFailure, InfraFailure, Lease, Prompt
from makers.config import TeacherMaker as TeacherMakerConfig
from makers.engines.engine import Scores
from makers.prompt_ids import PromptEncoder
from makers.scored_by_engine import EngineScoredMaker, joined

PRIVILEGED = "teacher_prompt"  # the column of the prompts
MAX_MASS = 1 + 1e-3  # above it the log-probs are of something else


class TeacherMaker(EngineScoredMaker):
    """Fills the stage `teacher`; see buffer/columns.py for its columns."""

    stage = "teacher"

    def __init__(self, config: TeacherMakerConfig, *, name: str, model_path: str, sleeps: bool) -> None:
        if config.top_k is None:
            raise ValueError("top_k: null, the full vocabulary, is offered by a colocated teacher only")
        super().__init__(
            config.engine, name=name, model_path=model_path, slots=config.slots, top_k=config.top_k, sleeps=sleeps,
            threads=config.resources.threads(config.engine.threads), micro_batch_tokens=config.micro_batch_tokens,
        )  # fmt: skip
        self._encoder: PromptEncoder

    async def start(self) -> None:
        await super().start()
        self._encoder = await asyncio.to_thread(PromptEncoder, self._model_path)

    def prompt_ids(self, lease: Lease, rollout: Columns) -> list[int]:
        plain = super().prompt_ids(lease, rollout)
        content = lease.prompt.fields.get(PRIVILEGED)
        if not content:
            return plain
        privileged = self._encoder.encode(Prompt(lease.prompt.id, content))
        end = self._encoder.generation_prompt
        if end and not plain[-len(end) :] == privileged[-len(end) :] == end:
            raise DataFailure(
                f"the prompt and its {PRIVILEGED} do not both end with the generation prompt {end} of the teacher's chat "
                f"template: they end with {plain[-len(end) :]} and {privileged[-len(end) :]}"
            )
        return privileged

    def kind_of_prompt(self, lease: Lease) -> str:
        return f" ({PRIVILEGED})" if lease.prompt.fields.get(PRIVILEGED) else ""

    def columns(self, scores: list[Scores]) -> Columns:
        mass = np.concatenate([np.exp(score.top_logprobs.astype(np.float64)).sum(axis=1) for score in scores])
        if mass.max() > MAX_MASS:
            raise InfraFailure(
                f"{self._name}: the {self._top_k} likeliest tokens have a probability of {mass.max():.4f}"
            )
        return {
            "teacher_ids": joined([score.top_ids for score in scores]),
            "teacher_logprobs": joined([score.top_logprobs for score in scores]),
            "teacher_mass": np.minimum(mass, 1.0).astype(np.float32),
            "teacher_target_logprobs": joined([score.logprobs for score in scores]),
        }

    def stats(self, columns: Columns) -> dict[str, float]:
        return {"teacher_mass": float(columns["teacher_mass"].mean())}
