"""Group sequence policy optimisation (arXiv 2507.18071)."""

from __future__ import annotations

from torch import Tensor

from trainers.algorithms.base import TokenBatch
from trainers.algorithms.corrections import log_ratio
from trainers.algorithms.grpo import GrpoLoss
from trainers.algorithms.ppo import clipped_policy_loss


class GspoLoss(GrpoLoss):
    """Per sample: -min(s * A, clip(s, 1 - low, 1 + high) * A), s the geometric mean of its tokens' ratios.

    It stands at each token of the sample, so that `normalise: sequence` gives the mean over samples of the paper.
    """

    def policy_loss(self, batch: TokenBatch, proximal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ratios = log_ratio(batch.current, proximal, batch, "geometric").exp()
        return clipped_policy_loss(ratios, batch.advantages, self.config.clip_low, self.config.clip_high)
