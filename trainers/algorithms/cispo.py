"""CISPO, clipped importance sampling policy optimisation (MiniMax-M1, arXiv 2506.13585)."""

from __future__ import annotations

from torch import Tensor

from trainers.algorithms.base import TokenBatch
from trainers.algorithms.corrections import log_ratio
from trainers.algorithms.grpo import GrpoLoss


class CispoLoss(GrpoLoss):
    """Per token: -c * A * log p, c = clip(r, 1 - low, 1 + high) constant in the gradient: every token keeps one."""

    def policy_loss(self, batch: TokenBatch, proximal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        low, high = 1.0 - self.config.clip_low, 1.0 + self.config.clip_high
        ratios = log_ratio(batch.current.detach(), proximal, batch, "token").exp()
        loss = -ratios.clamp(low, high) * batch.advantages * batch.current
        return loss, ratios < low, ratios > high
