"""The algorithm that a config names."""

from __future__ import annotations

import importlib

from trainers.algorithms.base import Algorithm
from trainers.algorithms.grpo import GrpoLoss
from trainers.config import CustomAlgorithm, Grpo


def build_algorithm(config: Grpo | CustomAlgorithm) -> Algorithm:
    """Raises ValueError when a dotted path leads nowhere or to something that is no algorithm."""
    if isinstance(config, Grpo):
        return GrpoLoss(config)
    module, _, name = config.type.partition(":")
    try:
        factory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"algorithm.type {config.type!r} cannot be imported: {error}") from error
    algorithm = factory(**config.options)
    missing = [field for field in ("needs_reference", "entropy_gradient") if not hasattr(algorithm, field)]
    if missing or not callable(algorithm):
        raise ValueError(
            f"algorithm.type {config.type!r} gives {type(algorithm).__name__}, which is not an algorithm: it must be "
            f"callable and have needs_reference and entropy_gradient{' (missing: ' + ', '.join(missing) + ')' if missing else ''}"
        )
    return algorithm
