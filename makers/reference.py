"""The reference maker: log-probs of a row's sampled tokens under a policy that never changes.

Guarantees:
1. `reference_logprobs[t]` belongs to `response_ids[t]`: one for each response token of the row, in their order.
2. They are of the distribution tempered at the sample's `temperatures`, as `behaviour_logprobs` are, so that the two can
   be compared term by term.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from buffer.columns import Columns
from makers.config import ReferenceMaker as ReferenceMakerConfig
from makers.threaded import ThreadedMaker

if TYPE_CHECKING:
    from makers.scoring import FrozenModel


class ReferenceMaker(ThreadedMaker):
    """Fills the stage `reference`: `reference_logprobs` float32 [response tokens]."""

    stage = "reference"
    what = "reference model"

    def __init__(self, config: ReferenceMakerConfig, *, name: str, model_path: str) -> None:
        super().__init__(name=name, model_path=model_path, slots=config.slots, threads=config.cpu_threads)
        self._config = config

    def load(self) -> FrozenModel:
        from makers.scoring import Scorer

        config = self._config
        self._scorer = Scorer(self._model_path, dtype=config.dtype, micro_batch_tokens=config.micro_batch_tokens)
        return self._scorer

    def columns(self, rollout: Columns) -> Columns:
        logprobs = np.empty(rollout["response_ids"].size, np.float32)
        for sample in self._scorer.score(rollout):
            logprobs[sample.span] = sample.log_probs.gather(-1, sample.targets[:, None])[:, 0].cpu().numpy()
        return {"reference_logprobs": logprobs}
