"""The clipped losses of proximal policy optimisation (arXiv 1707.06347): of the policy, and of the value model.

The correction for stale samples is decoupled (arXiv 2205.00035): the clipped ratio is between current and proximal
policy, and an importance weight leads from the behaviour to the proximal one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainers.algorithms.base import LossTerms, TokenBatch, token_weights
from trainers.algorithms.corrections import correction, log_ratio, proximal_of
from trainers.algorithms.gae import RETURNS, VALUES
from trainers.config import ClippedPolicy, ValueRegression


class ClippedLoss:
    """Per token: -w * min(r * A, clip(r, 1 - low, 1 + high) * A) - entropy_coef * H.

    r = exp(current - proximal); w, constant in the gradient, is what `trainers.algorithms.corrections` makes of
    exp(proximal - behaviour), by default its truncation.
    """

    needs_reference = False
    kl_estimator = ""  # of `penalty`

    def __init__(self, config: ClippedPolicy) -> None:
        self.config = config
        self.entropy_gradient = config.entropy_coef != 0

    def __call__(self, batch: TokenBatch) -> LossTerms:
        config = self.config
        proximal = proximal_of(batch, config.corrections)
        weight, figures, maxima = correction(batch, proximal, config.corrections)
        policy, clipped_low, clipped_high = self.policy_loss(batch, proximal)
        per_token = weight * policy
        sums = {
            "clip_frac/low": clipped_low.float().sum(),
            "clip_frac/high": clipped_high.float().sum(),
            "entropy": batch.entropy.detach().sum(),
            **figures,
        }
        if (penalty := self.penalty(batch)) is not None:
            coefficient, divergence = penalty
            per_token = per_token + coefficient * divergence
            sums["kl"] = sums[f"kl/{self.kl_estimator}"] = divergence.detach().sum()
        if self.entropy_gradient:
            per_token = per_token - config.entropy_coef * batch.entropy
        loss = (per_token * token_weights(batch, config.normalise)).sum()
        return LossTerms(loss, sums, maxima)

    def policy_loss(self, batch: TokenBatch, proximal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Per token [tokens], and where the lower and the upper clip took the gradient."""
        ratios = log_ratio(batch.current, proximal, batch, "token").exp()
        return clipped_policy_loss(ratios, batch.advantages, self.config.clip_low, self.config.clip_high)

    def penalty(self, batch: TokenBatch) -> tuple[float, Tensor] | None:
        """Weight and KL [tokens] of a penalty in the loss; PPO has its penalty in the reward."""
        return None


class ValueLoss:
    """Per token: 0.5 * max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), divided by the tokens of the minibatch.

    V is the model's output, R the return, V_old the value at the start of the step. The larger of the two errors: a value
    that was moved too far gets no gradient that moves it further, as in the policy's loss.
    """

    needs_reference = False
    entropy_gradient = False

    def __init__(self, config: ValueRegression) -> None:
        self.clip = config.clip

    def __call__(self, batch: TokenBatch) -> LossTerms:
        values, returns, old = batch.current, batch.labels[RETURNS], batch.labels[VALUES]
        error = (values - returns).square()
        clipped = torch.zeros_like(error, dtype=torch.bool)
        if self.clip is not None:
            limited = (torch.clamp(values, old - self.clip, old + self.clip) - returns).square()
            clipped = limited > error
            error = torch.maximum(error, limited)
        loss = 0.5 * (error * token_weights(batch, "token")).sum()
        return LossTerms(loss, {"value/clip_frac": clipped.float().sum()}, {})


def clipped_policy_loss(ratios: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor, Tensor]:
    """PPO's pessimistic loss per token, and where the lower and the upper clip took the gradient."""
    clipped = ratios.clamp(1.0 - low, 1.0 + high)
    loss = -torch.minimum(ratios * advantages, clipped * advantages)
    return loss, (ratios < 1.0 - low) & (advantages < 0), (ratios > 1.0 + high) & (advantages > 0)
