"""Group relative policy optimisation (DeepSeekMath, arXiv 2402.03300) with the settings of its descendants.

Asymmetric clipping and token normalisation are DAPO's (arXiv 2503.14476), constant normalisation is Dr.GRPO's (arXiv
2503.20783). The correction for stale samples is decoupled (arXiv 2205.00035): the clipped ratio is between current and
proximal policy, and a truncated importance weight (arXiv 1802.01561) leads from the behaviour to the proximal one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainers.algorithms.base import LossTerms, TokenBatch, token_weights
from trainers.config import Grpo

MAX_LOG_RATIO = 20.0  # exp of more is a number without meaning, and soon infinite


class GrpoLoss:
    """Per token: -w * min(r * A, clip(r, 1 - low, 1 + high) * A) + kl_coef * KL - entropy_coef * H.

    r = exp(current - proximal), w = min(exp(proximal - behaviour), cap), constant in the gradient; w = 1 without
    importance sampling.
    """

    def __init__(self, config: Grpo) -> None:
        self.config = config
        self.needs_reference = config.kl_coef > 0
        self.entropy_gradient = config.entropy_coef != 0

    def __call__(self, batch: TokenBatch) -> LossTerms:
        config = self.config
        stale = ratio(batch.proximal, batch.behaviour)
        correction = config.importance_sampling
        weight = torch.ones_like(stale) if correction is None else stale.clamp(max=correction.cap)
        policy, clipped_low, clipped_high = clipped_policy_loss(
            ratio(batch.current, batch.proximal), batch.advantages, config.clip_low, config.clip_high
        )
        per_token = weight * policy
        sums = {
            "clip_frac/low": clipped_low.float().sum(),
            "clip_frac/high": clipped_high.float().sum(),
            "entropy": batch.entropy.detach().sum(),
            "is/mean": stale.sum(),
            "is/square": stale.square().sum(),
        }
        if correction is not None:
            sums["is/masked_frac"] = (stale > correction.cap).float().sum()
        if config.kl_coef > 0:
            assert batch.reference is not None
            divergence = kl_estimate(batch.current, batch.reference, config.kl_estimator)
            per_token = per_token + config.kl_coef * divergence
            sums["kl"] = divergence.detach().sum()
        if self.entropy_gradient:
            per_token = per_token - config.entropy_coef * batch.entropy
        loss = (per_token * token_weights(batch, config.normalise)).sum()
        return LossTerms(loss, sums, {"is/max": stale.max()} if stale.numel() else {})


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """exp of a difference of log-probs [tokens], bounded so that it stays finite."""
    return (numerator - denominator).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_policy_loss(ratios: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor, Tensor]:
    """PPO's pessimistic loss per token (arXiv 1707.06347), and where the lower and the upper clip took the gradient."""
    clipped = ratios.clamp(1.0 - low, 1.0 + high)
    loss = -torch.minimum(ratios * advantages, clipped * advantages)
    return loss, (ratios < 1.0 - low) & (advantages < 0), (ratios > 1.0 + high) & (advantages > 0)


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
