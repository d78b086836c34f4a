"""Which samples of a group are kept. Pure: scores [samples] in, indices out, in the order of the samples."""

from __future__ import annotations

import numpy as np

from trainers.collecting.config import BestOfN, Rejection, SelectConfig


def select(config: SelectConfig, scores: np.ndarray) -> np.ndarray:
    """Indices (int64) of the kept samples, ascending. Equal scores: the earlier sample is the better one."""
    best_first = np.argsort(-scores, kind="stable")
    if isinstance(config, BestOfN):
        return np.sort(best_first[: config.keep])
    if isinstance(config, Rejection):
        return np.sort(best_first[scores[best_first] >= config.threshold][: config.keep])
    return np.arange(len(scores))
