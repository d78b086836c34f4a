"""The terms that a teacher adds to a policy's loss.

Per token, weighted as the algorithm's `normalise` says:

    the algorithm's own loss, with advantages A + advantage_alpha * (log p_teacher - log p_student)
    + coef * divergence(teacher, student)
    - sft_alpha * log p_student(own token), on rows that no policy sampled

The student's log-prob in an advantage is that of the proximal policy: a constant, as an advantage is.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from trainers.algorithms.base import Algorithm, LossTerms, TokenBatch, token_weights
from trainers.distillation.columns import DEMONSTRATED, MASS, TARGET

# Labels of the tokens, beside those of the columns; the last is what the makers' teacher says where the ranks have one too.
DIVERGENCE, OVERLAP, ON_MAKERS = "divergence", "topk_overlap", "teacher_on_makers"


def with_comparison(labels: dict[str, Tensor], outputs: Tensor) -> dict[str, Tensor]:
    """Labels of the columns, and what a policy found when it was compared with its teacher, [4, tokens] or [0, tokens]:
    divergence, overlap of the top-k (-1: not measured), the teacher's log-prob of the token, the mass of what is known."""
    if not outputs.size(0):
        return labels
    divergence, overlap, target, mass = outputs
    compared = {DIVERGENCE: divergence, OVERLAP: overlap, TARGET: target.detach(), MASS: mass.detach()}
    return labels | ({ON_MAKERS: labels[TARGET]} if TARGET in labels else {}) | compared


class DistillLoss:
    """`policy`: the algorithm whose loss it is added to, if there is one. `on_ranks`: whether the teacher is there, so that
    one on makers is a second, which is compared with it."""

    def __init__(
        self,
        policy: Algorithm | None,
        *,
        coef: float,
        sft_alpha: float,
        advantage_alpha: float,
        normalise: str,
        on_ranks: bool,
    ) -> None:
        self._policy = policy
        self._coef, self._sft_alpha, self._advantage_alpha = coef, sft_alpha, advantage_alpha
        self._normalise = normalise
        self._on_ranks = on_ranks
        self.needs_reference = policy is not None and policy.needs_reference
        self.entropy_gradient = policy is not None and policy.entropy_gradient

    def __call__(self, batch: TokenBatch) -> LossTerms:
        weights = token_weights(batch, self._normalise)
        parts = {"distill": self._coef * (batch.labels[DIVERGENCE] * weights).sum()}
        sums, maxima = {"entropy": batch.entropy.detach().sum()}, {}
        if self._sft_alpha:
            parts["sft"] = -self._sft_alpha * (batch.current * batch.labels[DEMONSTRATED] * weights).sum()
        if self._policy is not None:
            terms = self._policy(self._with_teachers_advantages(batch))
            parts["policy"] = terms.loss
            sums, maxima = dict(terms.sums), dict(terms.maxima)
        loss = torch.stack(list(parts.values())).sum()
        sums |= {f"loss/{name}": part.detach() for name, part in parts.items()}
        return LossTerms(loss, sums | self._figures(batch), maxima)

    def _with_teachers_advantages(self, batch: TokenBatch) -> TokenBatch:
        if not self._advantage_alpha:
            return batch
        gap = batch.labels[TARGET] - batch.proximal.detach()
        return replace(batch, advantages=batch.advantages + self._advantage_alpha * gap)

    def _figures(self, batch: TokenBatch) -> dict[str, Tensor]:
        overlap = batch.labels[OVERLAP].detach()
        measured = overlap >= 0
        figures = {
            "distill/kl": batch.labels[DIVERGENCE].detach().sum(),
            "distill/teacher_mass": batch.labels[MASS].sum(),
            "topk_overlap/tokens": measured.sum(),
            "topk_overlap/sum": overlap[measured].sum(),
        }
        if self._on_ranks and ON_MAKERS in batch.labels:
            figures["distill/mismatch"] = (batch.labels[ON_MAKERS] - batch.labels[TARGET]).abs().sum()
        return figures
