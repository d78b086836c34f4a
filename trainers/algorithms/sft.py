"""Supervised fine-tuning: the cross entropy of given completions.

Per token: -log p(token | prompt, tokens before it), averaged over the tokens of the minibatch, or over those of a sample and
then over samples. The metric `sft/nll` is the mean over tokens in either case; exp of it is the perplexity.
"""

from __future__ import annotations

from trainers.algorithms.base import LossTerms, TokenBatch, token_weights
from trainers.config import Sft


class CrossEntropy:
    needs_reference = False
    entropy_gradient = False

    def __init__(self, config: Sft) -> None:
        self._normalise = config.normalise

    def __call__(self, batch: TokenBatch) -> LossTerms:
        loss = -(batch.current * token_weights(batch, self._normalise)).sum()
        return LossTerms(loss, {"sft/nll": -batch.current.detach().sum(), "entropy": batch.entropy.detach().sum()}, {})
