"""What is done about tokens that another policy sampled: weights, masks and the choice of the proximal policy.

Everything is constant in the gradient. A ratio of a sample is the same at each of its tokens: its product (`sequence`) or
its geometric mean (`geometric`), over the sample's tokens, which are all in one micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainers.algorithms.base import TokenBatch
from trainers.algorithms.config import Corrections
from trainers.algorithms.gae import MAX_LOG_RATIO


def per_sample(values: Tensor, batch: TokenBatch, *, mean: bool) -> Tensor:
    """Sum, or mean, over the tokens of a sample, at each of its tokens [tokens]; gradients flow."""
    count = int(batch.samples.max()) + 1 if batch.samples.numel() else 0
    sums = torch.zeros(count, dtype=values.dtype, device=values.device).index_add(0, batch.samples, values)
    found = sums[batch.samples]
    return found / batch.lengths if mean else found


def log_ratio(numerator: Tensor, denominator: Tensor, batch: TokenBatch, level: str) -> Tensor:
    """Difference of log-probs [tokens] at a level, bounded so that its exponential stays finite."""
    difference = numerator - denominator
    if level != "token":
        difference = per_sample(difference, batch, mean=level == "geometric")
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def proximal_of(batch: TokenBatch, corrections: Corrections) -> Tensor:
    """Log-probs [tokens] of the proximal policy.

    Interpolated (arXiv 2512.06547, here with a fixed weight): log-linear between behaviour and current policy.
    """
    if corrections.interpolation is None:
        return batch.proximal
    return torch.lerp(batch.current.detach(), batch.behaviour, corrections.interpolation)


def correction(
    batch: TokenBatch, proximal: Tensor, corrections: Corrections
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """The weight of each token's policy loss [tokens], with sums and maxima for the metrics `is/*`."""
    level = "token" if corrections.truncate is None else corrections.truncate.level
    ratios = log_ratio(proximal, batch.behaviour, batch, level).exp()
    weight, cut = torch.ones_like(ratios), torch.zeros_like(ratios, dtype=torch.bool)
    if corrections.truncate is not None:
        weight, cut = ratios.clamp(max=corrections.truncate.cap), ratios > corrections.truncate.cap
    kept = torch.ones_like(cut)
    if (band := corrections.band) is not None:
        inside = log_ratio(proximal, batch.behaviour, batch, band.level).exp()
        kept = (inside >= band.low) & (inside <= band.high)
    if corrections.mask_off_policy is not None:
        drift = per_sample(batch.behaviour - batch.current.detach(), batch, mean=True)
        kept &= ~((drift > corrections.mask_off_policy) & (batch.advantages < 0))
    sums = {"is/mean": ratios.sum(), "is/square": ratios.square().sum()}
    if corrections.truncate is not None or corrections.band is not None or corrections.mask_off_policy is not None:
        sums["is/masked_frac"] = (cut | ~kept).float().sum()
    return weight * kept, sums, {"is/max": ratios.max()} if ratios.numel() else {}
