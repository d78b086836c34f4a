"""Whether a newcomer computes what the others compute: the same prompt, greedily, under the same weights. Pure.

Two engines of one model agree on the log-probs of the tokens they prefer, up to rounding, until they first prefer another
token; a transposed weight, a missing bias or another model shows at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

TEXT = "The numbers from one to ten are: one, two, three,"
TOKENS = 12
BOUND = 0.2  # nats, on average over the compared tokens: bfloat16 against float32 of a small model is below 0.05


@dataclass(frozen=True)
class Probe:
    """What a maker answers to TEXT with the weights of one version: its tokens, and how sure it was of each."""

    version: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def difference(one: Probe, other: Probe) -> float:
    """Mean absolute difference of log-probs, nats, up to and with the first token in which they differ."""
    same = [a == b for a, b in zip(one.token_ids, other.token_ids, strict=False)]
    compared = same.index(False) + 1 if False in same else len(same)
    apart = np.abs(np.subtract(one.logprobs[:compared], other.logprobs[:compared]))
    return float(apart.mean()) if compared else float("inf")
