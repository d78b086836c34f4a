"""Advantages from rewards, per group. Free of torch: the controller calls this.

Guarantees: a group whose rewards are all equal gets exactly 0, a group of one sample likewise; masked samples get 0 and
take no part in the group's mean; a reward that is not finite is refused.
"""

from __future__ import annotations

import numpy as np

EPSILON = 1e-6  # added to the standard deviation, in units of reward


def group_advantages(rewards: np.ndarray, *, scale: bool, mask: np.ndarray | None = None) -> np.ndarray:
    """Reward minus the group's mean, float32 [n]; divided by the group's standard deviation when `scale`.

    With `scale` this is GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1); without it is Dr.GRPO (arXiv 2503.20783),
    which drops the division because it favours groups that are nearly solved or nearly hopeless. The standard deviation
    is the sample one (n - 1). `mask` [n] is False for samples that are left out of the loss. Raises ValueError when a
    reward is not finite.
    """
    values = checked_rewards(rewards)
    kept = np.ones(values.shape, dtype=bool) if mask is None else np.asarray(mask, dtype=bool)
    advantages = np.zeros(values.shape, dtype=np.float32)
    chosen = values[kept]
    if chosen.size < 2 or np.all(chosen == chosen[0]):
        return advantages
    centred = chosen - chosen.mean()
    if scale:
        centred /= chosen.std(ddof=1) + EPSILON
    advantages[kept] = centred
    return advantages


def checked_rewards(rewards: np.ndarray) -> np.ndarray:
    """Float64 [n]. Raises ValueError, naming the sample, when a reward is not finite."""
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"rewards of a group have shape {values.shape}, need one per sample [n]")
    if not np.isfinite(values).all():
        bad = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ValueError(f"reward of sample {bad} is {values[bad]}, need a finite number")
    return values
