"""The learning rate as a function of the step. It has no state, so a checkpoint needs none."""

from __future__ import annotations

import math

from trainers.config import Optimizer


def learning_rate(config: Optimizer, step: int, steps: int) -> float:
    """Of step `step` (from 1) of `steps`: linear warm-up over `warmup_steps`, then the schedule down to `min_lr`, which
    is reached in the last step."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    remaining = max(steps - config.warmup_steps, 1)
    progress = min((step - config.warmup_steps) / remaining, 1.0)
    share = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.min_lr + (config.lr - config.min_lr) * share
