"""Scores of different functions on one scale, before they are weighed. Pure.

Guarantees: equal scores of a row become exactly 0 within the group; a scale without spread yet gives 0, never NaN.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

EPSILON = 1e-6  # added to the standard deviation, in units of the score


def within_group(scores: np.ndarray) -> np.ndarray:
    """Minus the mean of the row's samples [n], over their (population) standard deviation."""
    centred = scores - scores.mean()
    if np.all(scores == scores[0]):
        return np.zeros_like(scores)
    return centred / (scores.std() + EPSILON)


class Running:
    """The z-score against every score seen so far, the present row's among them (Chan's update of mean and variance)."""

    def __init__(self) -> None:
        self._count = 0
        self._mean = 0.0
        self._squares = 0.0  # sum of squared distances from the mean

    def __call__(self, scores: np.ndarray) -> np.ndarray:
        count, mean = len(scores), float(scores.mean())
        total, apart = self._count + count, mean - self._mean
        self._squares += float(((scores - mean) ** 2).sum()) + apart * apart * self._count * count / total
        self._mean += apart * count / total
        self._count = total
        return (scores - self._mean) / (np.sqrt(self._squares / total) + EPSILON)


def make_scale(normalise: str) -> Callable[[np.ndarray], np.ndarray]:
    """The scale of one function; `running` remembers what it has seen."""
    return {"none": lambda: lambda scores: scores, "group": lambda: within_group, "running": Running}[normalise]()
