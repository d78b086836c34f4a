"""Group relative policy optimisation (DeepSeekMath, arXiv 2402.03300), and those of its descendants that share its loss.

The loss is PPO's with KL to a reference in it. Asymmetric clipping and token normalisation are DAPO's (arXiv
2503.14476), constant normalisation is Dr.GRPO's (arXiv 2503.20783). RLOO and REINFORCE++ differ in their advantages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainers.algorithms.base import REFERENCE, TokenBatch
from trainers.algorithms.gae import MAX_LOG_RATIO
from trainers.algorithms.ppo import ClippedLoss
from trainers.config import GroupPolicy


class GrpoLoss(ClippedLoss):
    """Per token: PPO's loss + kl_coef * KL."""

    def __init__(self, config: GroupPolicy) -> None:
        super().__init__(config)
        self.kl_coef, self.kl_estimator = config.kl_coef, config.kl_estimator
        self.penalised = config.penalises_loss
        self.needs_reference = config.penalises_loss and config.reference == "start"

    def penalty(self, batch: TokenBatch) -> tuple[float, Tensor] | None:
        if not self.penalised:
            return None
        reference = batch.reference if self.needs_reference else batch.labels[REFERENCE]
        assert reference is not None
        return self.kl_coef, kl_estimate(batch.current, reference, self.kl_estimator)


def kl_estimate(policy: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """KL(policy || reference) per token from samples of the policy (Schulman, "Approximating KL divergence", 2020).

    k1 is unbiased, can be negative, and as a loss has a gradient of mean zero; k2 has the right gradient on policy; k3
    is unbiased, never negative, of low variance.
    """
    log_ratio = (policy - reference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    return torch.expm1(-log_ratio) + log_ratio
