"""The algorithm that a config names."""

from __future__ import annotations

import importlib

from trainers.algorithms.base import Algorithm
from trainers.algorithms.cispo import CispoLoss
from trainers.algorithms.config import Cispo, Gspo
from trainers.algorithms.dpo import DpoLoss
from trainers.algorithms.grpo import GrpoLoss
from trainers.algorithms.gspo import GspoLoss
from trainers.algorithms.ppo import ClippedLoss, ValueLoss
from trainers.algorithms.sft import CrossEntropy
from trainers.config import (
    ClippedPolicy,
    CriticConfig,
    CustomAlgorithm,
    DistillAlgorithm,
    Dpo,
    GroupPolicy,
    Ppo,
    Sft,
    TrainerConfig,
    ValueRegression,
)
from trainers.distillation.loss import DistillLoss


def build_loss(config: TrainerConfig | CriticConfig) -> Algorithm:
    """The whole loss of a trainer: of its algorithm, with what a teacher adds. Raises ValueError as `build_algorithm`."""
    distill = config.distill if isinstance(config, TrainerConfig) else None
    if distill is None:
        return build_algorithm(config.algorithm)
    alone = isinstance(config.algorithm, DistillAlgorithm) and not distill.advantage_alpha
    return DistillLoss(
        None if alone else build_algorithm(config.algorithm),
        coef=distill.coef,
        sft_alpha=distill.sft_alpha,
        advantage_alpha=distill.advantage_alpha,
        normalise=config.algorithm.normalise if isinstance(config.algorithm, ClippedPolicy) else "token",
        on_ranks=distill.teacher is not None,
    )


def build_algorithm(
    config: GroupPolicy | Ppo | Sft | Dpo | DistillAlgorithm | ValueRegression | CustomAlgorithm,
) -> Algorithm:
    """Raises ValueError when a dotted path leads nowhere or to something that is no algorithm."""
    if isinstance(config, GroupPolicy):
        loss = GspoLoss if isinstance(config, Gspo) else CispoLoss if isinstance(config, Cispo) else GrpoLoss
        return loss(config)
    if isinstance(config, Ppo | DistillAlgorithm):
        return ClippedLoss(config)
    if isinstance(config, ValueRegression):
        return ValueLoss(config)
    if isinstance(config, Sft):
        return CrossEntropy(config)
    if isinstance(config, Dpo):
        return DpoLoss(config)
    module, _, name = config.type.partition(":")
    try:
        factory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"algorithm.type {config.type!r} cannot be imported: {error}") from error
    try:
        algorithm: Algorithm = factory(**config.options)
    except TypeError as error:
        raise ValueError(
            f"algorithm.type {config.type!r} cannot be made with options {config.options}: {error}"
        ) from error
    missing = [name for name in ("needs_reference", "entropy_gradient", "__call__") if not hasattr(algorithm, name)]
    if missing:
        raise ValueError(
            f"algorithm.type {config.type!r} gives {type(algorithm).__name__}, which is no algorithm: "
            f"it lacks {', '.join(missing)}"
        )
    return algorithm
