"""Advantages from rewards, one small function for each estimator. Free of torch: the controller calls this.

An estimator takes the rewards of all rows of a step, float64 [n] each, and their masks, bool [n] each (False: the sample is
left out of the loss), and gives float32 [n] for each row. Guarantees: masked samples get 0 and take no part in a baseline or
a deviation; the order of the samples does not matter; a group whose rewards are all equal gets exactly 0 from every
estimator with a baseline of the group, and so does a group of one sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from trainers.algorithms.config import Grpo, ReinforcePlusPlus, Rloo

EPSILON = 1e-6  # added to a standard deviation, in units of reward

Rows = Sequence[np.ndarray]
Estimator = Callable[[Rows, Rows, Rows], list[np.ndarray]]  # rewards [n], masks [n], response lengths [n] of each row


def estimator_of(algorithm: object) -> Estimator:
    """Of the settings of an algorithm; that of GRPO for an algorithm of one's own."""
    if isinstance(algorithm, Rloo):
        return leave_one_out
    if isinstance(algorithm, ReinforcePlusPlus):
        return lambda rewards, masks, lengths: normalised_over_step(
            rewards, masks, lengths, baseline=algorithm.baseline == "group"
        )
    scale = algorithm.scale_rewards if isinstance(algorithm, Grpo) else "group"
    return lambda rewards, masks, lengths: group_relative(rewards, masks, lengths, scale=scale)


def group_relative(rewards: Rows, masks: Rows, lengths: Rows, *, scale: str) -> list[np.ndarray]:
    """Reward minus the group's mean, divided by a sample standard deviation (n - 1).

    `scale` group: that of the group (GRPO, DeepSeekMath, arXiv 2402.03300, section 4.1). none: not divided (Dr.GRPO, arXiv
    2503.20783: the division favours groups that are nearly solved or nearly hopeless). batch: that of all rewards of the
    step (arXiv 2508.08221).
    """
    deviation = deviation_of(rewards, masks) if scale == "batch" else 0.0
    found = []
    for values, mask in zip(rewards, masks, strict=True):
        advantages = centred(values, mask)
        if scale == "group" and advantages.any():
            advantages /= values[mask].std(ddof=1) + EPSILON
        elif scale == "batch":
            advantages /= deviation + EPSILON
        found.append(advantages.astype(np.float32))
    return found


def leave_one_out(rewards: Rows, masks: Rows, lengths: Rows) -> list[np.ndarray]:
    """Reward minus the mean of the group's other samples (arXiv 2402.14740): n / (n - 1) times the centred reward."""
    found = []
    for values, mask in zip(rewards, masks, strict=True):
        count = int(mask.sum())
        found.append((centred(values, mask) * (count / max(count - 1, 1))).astype(np.float32))
    return found


def normalised_over_step(rewards: Rows, masks: Rows, lengths: Rows, *, baseline: bool) -> list[np.ndarray]:
    """To mean 0 and deviation 1 over the step's tokens (REINFORCE++, arXiv 2501.03262), each sample counting with its length.

    With `baseline` the group's mean is taken off first.
    """
    raw = [centred(values, mask) if baseline else values for values, mask in zip(rewards, masks, strict=True)]
    weights = np.concatenate([size * mask for size, mask in zip(lengths, masks, strict=True)]).astype(np.float64)
    values, total = np.concatenate(raw), weights.sum()
    if total == 0:
        return [np.zeros(row.shape, dtype=np.float32) for row in raw]
    mean = (values * weights).sum() / total
    deviation = np.sqrt((np.square(values - mean) * weights).sum() / total)
    if deviation <= EPSILON * max(1.0, abs(mean)):
        return [np.zeros(row.shape, dtype=np.float32) for row in raw]
    return [
        np.where(mask, (row - mean) / (deviation + EPSILON), 0.0).astype(np.float32)
        for row, mask in zip(raw, masks, strict=True)
    ]


def centred(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Minus the mean of the samples that count; exactly 0 where there is no difference between them. Float64 [n]."""
    result = np.zeros(values.shape)
    chosen = values[mask]
    if has_signal(values, mask):
        result[mask] = chosen - chosen.mean()
    return result


def has_signal(values: np.ndarray, mask: np.ndarray) -> bool:
    """Whether the rewards of a group differ among the samples that count."""
    chosen = values[mask]
    return bool(chosen.size >= 2 and np.any(chosen != chosen[0]))


def deviation_of(rewards: Rows, masks: Rows) -> float:
    """Sample standard deviation of all rewards that count."""
    chosen = np.concatenate([values[mask] for values, mask in zip(rewards, masks, strict=True)])
    return float(chosen.std(ddof=1)) if chosen.size >= 2 else 0.0


def checked_rewards(rewards: np.ndarray) -> np.ndarray:
    """Float64 [n]. Raises ValueError, naming the sample, when a reward is not finite."""
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"rewards of a group have shape {values.shape}, need one per sample [n]")
    if not np.isfinite(values).all():
        bad = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ValueError(f"reward of sample {bad} is {values[bad]}, need a finite number")
    return values
