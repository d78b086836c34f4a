"""The reward model maker: what a frozen classification checkpoint says of each sample, or of each token.

Guarantees: token ids in, as they were sampled, never text; the scores are the model's own, neither weighed nor put on a scale,
and finite. What they are worth is for the reward maker to say, which adds them up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from buffer.columns import Columns
from makers.config import RewardModelMaker as RewardModelConfig
from makers.threaded import ThreadedMaker

if TYPE_CHECKING:
    from makers.scoring import FrozenModel


class RewardModelMaker(ThreadedMaker):
    """Fills the stage `reward/GROUP`: `scores` float32 [samples], or `token_scores` float32 [response tokens]."""

    what = "reward model"

    def __init__(self, config: RewardModelConfig, *, name: str, stage: str, model_path: str) -> None:
        super().__init__(name=name, model_path=model_path, slots=config.slots, threads=config.cpu_threads)
        self.stage = stage
        self._config = config

    def load(self) -> FrozenModel:
        from makers.reward_scoring import RewardScorer

        config = self._config
        self._scorer = RewardScorer(
            self._model_path,
            per_token=config.granularity == "token",
            dtype=config.dtype,
            micro_batch_tokens=config.micro_batch_tokens,
        )
        return self._scorer

    def columns(self, rollout: Columns) -> Columns:
        name = "token_scores" if self._config.granularity == "token" else "scores"
        return {name: self._scorer.score(rollout)}
