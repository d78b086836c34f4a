"""Divergences of a student p from a teacher q over buckets of the vocabulary, as terms of a sum, with their slopes.

A bucket is a token, or the tail: everything outside a teacher's top-k. With log p and log q of each bucket in nats:

    forward_kl   KL(q || p) = sum q (log q - log p)
    reverse_kl   KL(p || q) = sum p (log p - log q)
    jsd          beta KL(q || m) + (1 - beta) KL(p || m),  m = beta q + (1 - beta) p     (arXiv 2306.13649, section 3)

The slope of a term is a = p * d term / d p: finite where p is 0, and d D / d logit_v = a_v - p_v * sum(a) for a token v that is
a bucket of its own, p_v * (a_t / p_t - sum(a)) for a token in the tail t.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trainers.config import CriticConfig, TrainerConfig

NOTHING = 1e-6  # a tail of less is what float32 cannot tell from 0: the teacher's is then 0, and its log that of this
LEAST_LOG = -69.0  # log of the least mass that the student's tail is taken to have


@dataclass(frozen=True, slots=True)
class Divergence:
    """`beta` is read by `jsd` alone. Logits of both sides are divided by `temperature` first."""

    kind: Literal["forward_kl", "reverse_kl", "jsd"]
    beta: float = 0.5
    temperature: float = 1.0

    def terms(self, p: Tensor, log_p: Tensor, q: Tensor, log_q: Tensor) -> Tensor:
        """The summands, of the shape of the arguments."""
        if self.kind == "forward_kl":
            return q * (log_q - log_p)
        if self.kind == "reverse_kl":
            return p * (log_p - log_q)
        log_m = self._log_mixture(log_p, log_q)
        return self.beta * q * (log_q - log_m) + (1.0 - self.beta) * p * (log_p - log_m)

    def slopes(self, p: Tensor, log_p: Tensor, q: Tensor, log_q: Tensor) -> Tensor:
        """p * d term / d p, of the shape of the arguments."""
        if self.kind == "forward_kl":
            return -q
        if self.kind == "reverse_kl":
            return p * (log_p - log_q + 1.0)
        return (1.0 - self.beta) * p * (log_p - self._log_mixture(log_p, log_q))

    def _log_mixture(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return torch.logaddexp(log_q + math.log(self.beta), log_p + math.log1p(-self.beta))


def divergence_of(config: TrainerConfig | CriticConfig) -> Divergence | None:
    """What a trainer compares its policy with a teacher by; None where it has no teacher."""
    distill = config.distill if isinstance(config, TrainerConfig) else None
    return None if distill is None else Divergence(distill.divergence, distill.beta, distill.temperature)


@dataclass(frozen=True, slots=True)
class Buckets:
    """A teacher's top-k as buckets: `ids` int64 [R, K], -1 for a repeated id, whose mass its first occurrence has; `q` and
    `log_q` float32 [R, K]; of the tail `tail` and `log_tail` float32 [R]."""

    ids: Tensor
    q: Tensor
    log_q: Tensor
    tail: Tensor
    log_tail: Tensor

    @classmethod
    def of(cls, ids: Tensor, log_probs: Tensor) -> Buckets:
        """From token ids and log-probs [R, K]. The tail is what is left of a mass of 1."""
        log_probs = log_probs.float()
        tail = 1.0 - log_probs.exp().sum(-1)
        log_tail = tail.clamp(min=NOTHING).log()
        ids, log_probs = merged(ids.long(), log_probs)
        gone = ids < 0
        q = log_probs.exp().masked_fill(gone, 0.0)
        return cls(
            ids,
            q,
            log_probs.masked_fill(gone, 0.0),
            torch.where(tail < NOTHING, torch.zeros_like(tail), tail),
            log_tail,
        )

    def __getitem__(self, rows: slice) -> Buckets:
        return Buckets(self.ids[rows], self.q[rows], self.log_q[rows], self.tail[rows], self.log_tail[rows])


def merged(ids: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """Each id of a row once, with the mass of all its occurrences; the others become -1."""
    if ids.size(-1) < 2:
        return ids, log_probs
    ids, order = ids.sort(dim=-1, stable=True)
    log_probs = log_probs.gather(-1, order)
    repeated = torch.zeros_like(ids, dtype=torch.bool)
    repeated[:, 1:] = ids[:, 1:] == ids[:, :-1]
    if not repeated.any():
        return ids, log_probs
    group = (~repeated).cumsum(-1) - 1  # which distinct id of its row an entry belongs to
    masses = torch.zeros_like(log_probs).scatter_add_(-1, group, log_probs.exp())
    log_masses = masses.clamp(min=torch.finfo(masses.dtype).tiny).log()
    return ids.masked_fill(repeated, -1), torch.where(repeated, log_probs, log_masses.gather(-1, group))


def dense_top_k(logits: Tensor, buckets: Buckets, divergence: Divergence) -> Tensor:
    """[R] of a student with `logits` [R, V] of the whole vocabulary; autograd does the rest. The plain reference."""
    every = (logits / divergence.temperature).log_softmax(-1)
    present = buckets.ids >= 0
    log_p = every.gather(-1, buckets.ids.clamp(min=0)).masked_fill(~present, 0.0)
    p = log_p.exp() * present
    counts = torch.zeros_like(every).scatter_add_(-1, buckets.ids.clamp(min=0), present.to(every.dtype))
    log_tail = every.masked_fill(counts > 0, -1e4).logsumexp(-1)
    tail = log_tail.exp()
    top = divergence.terms(p, log_p, buckets.q, buckets.log_q).sum(-1)
    return top + divergence.terms(tail, log_tail.clamp(min=LEAST_LOG), buckets.tail, buckets.log_tail)


def dense_full(logits: Tensor, teacher_logits: Tensor, divergence: Divergence) -> Tensor:
    """[R] over the whole vocabulary, from logits [R, V] of both sides."""
    log_p = (logits / divergence.temperature).log_softmax(-1)
    log_q = (teacher_logits / divergence.temperature).log_softmax(-1)
    return divergence.terms(log_p.exp(), log_p, log_q.exp(), log_q).sum(-1)
