"""The reference maker on vLLM: `reference_logprobs` of a frozen policy, where samples are drawn at temperature 1.

Faster than the transformers form where vLLM is (on GPUs); that one also has other temperatures.
"""

from __future__ import annotations

from buffer.columns import Columns
from buffer.records import Lease
from makers.config import ReferenceMaker as ReferenceMakerConfig
from makers.config import VllmEngine
from makers.engines.engine import Scores
from makers.scored_by_engine import EngineScoredMaker, joined, require_temperature_one


class EngineReferenceMaker(EngineScoredMaker):
    """Fills the stage `reference`: `reference_logprobs` float32 [response tokens]."""

    stage = "reference"

    def __init__(
        self, config: ReferenceMakerConfig, engine: VllmEngine, *, name: str, model_path: str, sleeps: bool
    ) -> None:
        super().__init__(
            engine, name=name, model_path=model_path, slots=config.slots, top_k=0, sleeps=sleeps,
            threads=config.resources.threads(engine.threads), micro_batch_tokens=config.micro_batch_tokens,
        )  # fmt: skip

    def prompt_ids(self, lease: Lease, rollout: Columns) -> list[int]:
        require_temperature_one(rollout)
        return super().prompt_ids(lease, rollout)

    def columns(self, scores: list[Scores]) -> Columns:
        return {"reference_logprobs": joined([score.logprobs for score in scores])}
