"""What an algorithm sees and what it returns: flat tensors over the response tokens of one micro-batch.

Three policies are named everywhere. *behaviour* sampled the tokens; *proximal* is the policy at the start of the step,
fixed for all its optimizer steps; *current* is being optimised and alone carries gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from trainers.batch import Totals

REFERENCE = "reference"  # label of the plan: log-probs of a reference maker


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Response tokens of one micro-batch; every tensor is float32 [tokens] unless said otherwise."""

    current: Tensor  # log-probs, with gradient; of a critic its values, and no policy's figures mean anything then
    proximal: Tensor
    behaviour: Tensor
    reference: Tensor | None  # of the start weights; None unless the algorithm needs it
    entropy: Tensor  # of the current policy in nats; with gradient when the algorithm asks for it
    advantages: Tensor
    samples: Tensor  # int64: which sample of the micro-batch a token belongs to
    lengths: Tensor  # tokens of that sample
    totals: Totals  # of the whole minibatch: all micro-batches and ranks
    labels: Mapping[str, Tensor] = field(default_factory=dict)  # `StepPlan.labels` of these tokens


@dataclass(frozen=True, slots=True)
class LossTerms:
    """`loss` is a scalar, already divided by the totals of the minibatch, so that micro-batches and data-parallel ranks
    add up. `sums` are sums over tokens (their mean becomes the metric), `maxima` are maxima over tokens; detached."""

    loss: Tensor
    sums: Mapping[str, Tensor]
    maxima: Mapping[str, Tensor]


class Algorithm(Protocol):
    """A loss. Custom ones are named by dotted path and constructed with their options as keyword arguments."""

    needs_reference: bool  # compute the log-probs of the start weights
    entropy_gradient: bool  # let the loss differentiate the entropy

    def __call__(self, batch: TokenBatch) -> LossTerms: ...


def token_weights(batch: TokenBatch, normalise: str) -> Tensor:
    """What each token's loss is multiplied with, float32 [tokens], so that the sum over a step is the normalised loss.

    `sequence`: mean over the tokens of a sample, then over samples (GRPO, arXiv 2402.03300). `constant`: divided by the
    completion budget and the samples (Dr.GRPO, arXiv 2503.20783). `token`: mean over all tokens (DAPO, arXiv 2503.14476).
    """
    totals = batch.totals
    if normalise == "sequence":
        return 1.0 / (batch.lengths * totals.samples)
    count = totals.tokens if normalise == "token" else totals.samples * totals.max_response_tokens
    return torch.full_like(batch.advantages, 1.0 / max(count, 1))
