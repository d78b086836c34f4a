"""Log-probs, entropy and the divergence from a teacher in one pass over logits whose vocabulary is split over ranks.

Guarantees, all asserted by tests:

1. Values and gradients equal those of the dense formulas in `trainers.distillation.divergence`, at any tensor-parallel size.
2. The student's and the teacher's logits exist for one chunk of rows at a time; the backward pass computes them again (but
   for the student's last chunk, where both temperatures are equal).
3. The tail of a teacher's top-k is summed over the other tokens, never taken as 1 - sum: no mass is lost to cancellation.
4. Padding of the vocabulary takes no part, repeated ids of a teacher accumulate.

The sampling temperatures apply to log-probs and entropy, the divergence's own to the divergence. Where they are equal one
softmax serves both. Shape names as in `trainers.megatron.vocab`; K teacher's entries of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainers.distillation.divergence import LEAST_LOG, Buckets, Divergence
from trainers.megatron.vocab import (
    Softmax,
    VocabShard,
    WeightGradient,
    chunks_of,
    d_logits_of,
    local_columns,
    logits_of,
    softmax_of,
)

OVERLAP_ROWS = 32  # of each micro-batch, on which the student's own top-k is looked up
UNMEASURED = -1.0


class TopK:
    """A teacher that is known by the top of its distributions, and by its log-probs of the targets [R]."""

    def __init__(self, buckets: Buckets, target_log_probs: Tensor) -> None:
        self._buckets = buckets
        self._target_log_probs = target_log_probs

    def measure(
        self, rows: slice, softmax: Softmax, targets: Tensor, divergence: Divergence, shard: VocabShard
    ) -> tuple[Tensor, Any]:
        """Divergence, overlap, the teacher's log-prob of the target and its mass [4, R]; and what `gradient` needs."""
        own = self._buckets[rows]
        local, mine = local_of_each(own.ids, shard)
        shifted = softmax.shifted.gather(-1, local).masked_fill_(~mine, 0.0)
        flat = (local + torch.arange(local.size(0), device=local.device)[:, None] * shard.size)[mine]
        exponentials = softmax.exponentials.view(-1)
        kept = exponentials[flat]
        exponentials[flat] = 0.0
        tail = softmax.exponentials.sum(-1)
        exponentials[flat] = kept
        sums = torch.cat([shifted, tail[:, None]], dim=-1)
        if shard.parallel:
            dist.all_reduce(sums, group=shard.group)
        shifted, tail = sums[:, :-1], sums[:, -1]
        absent, log_partition = own.ids < 0, softmax.partition.log()
        log_p = (shifted - log_partition[:, None]).masked_fill(absent, 0.0)
        p = log_p.exp().masked_fill(absent, 0.0)
        p_tail, log_tail = tail / softmax.partition, (tail.log() - log_partition).clamp(min=LEAST_LOG)
        value = divergence.terms(p, log_p, own.q, own.log_q).sum(-1)
        value = value + divergence.terms(p_tail, log_tail, own.tail, own.log_tail)
        slopes = divergence.slopes(p, log_p, own.q, own.log_q)
        slope_of_tail = divergence.slopes(p_tail, log_tail, own.tail, own.log_tail)
        in_tail = torch.where(log_tail > LEAST_LOG, slope_of_tail / p_tail, torch.zeros_like(p_tail))
        state = in_tail - slopes.sum(-1) - slope_of_tail, (slopes - p * in_tail[:, None]).masked_fill(~mine, 0.0), local
        overlap = torch.full_like(value, UNMEASURED)
        if rows.start == 0:
            measured = slice(0, OVERLAP_ROWS)
            overlap[measured] = self._overlap(softmax.shifted[measured], shifted[measured], absent[measured], shard)
        return torch.stack([value, overlap, self._target_log_probs[rows], 1.0 - own.tail]), state

    def gradient(self, rows: slice, state: Any, d: Tensor, *_: Any) -> tuple[Tensor, Any]:
        """For the logits: what multiplies the probabilities [R], and what is to be added, as a function of the gradient."""
        factor, corrections, local = state

        def add(gradient: Tensor, probabilities: Tensor) -> None:
            gradient.scatter_add_(-1, local, (corrections * d[:, None]).to(gradient.dtype))

        return factor * d, add

    def _overlap(self, every: Tensor, picked: Tensor, absent: Tensor, shard: VocabShard) -> Tensor:
        """Which fraction of the teacher's tokens is among as many of the student's likeliest."""
        count = picked.size(-1)
        best = _every_rank(every.topk(min(count, every.size(-1)), dim=-1).values, shard).topk(count, dim=-1).values
        found = (picked >= best[:, -1:]) & ~absent
        return found.sum(-1) / (~absent).sum(-1).clamp(min=1)


class WholeVocabulary:
    """A teacher on the same ranks: `hidden` [R, H'] before its output layer, of which `weight` [V, H'] is this rank's part."""

    def __init__(self, hidden: Tensor, weight: Tensor) -> None:
        self._hidden = hidden
        self._weight = weight

    def measure(
        self, rows: slice, softmax: Softmax, targets: Tensor, divergence: Divergence, shard: VocabShard
    ) -> tuple[Tensor, Any]:
        """As of `TopK`. The overlap is of no top, and not measured."""
        of_teacher, figures = softmax_of(self._logits(rows, divergence, shard), targets, shard)
        log_q = of_teacher.shifted.sub_(of_teacher.partition.log()[:, None])
        log_p = softmax.shifted - softmax.partition.log()[:, None]
        p, q = log_p.exp(), of_teacher.exponentials.div_(of_teacher.partition[:, None])
        sums = torch.stack(
            [divergence.terms(p, log_p, q, log_q).sum(-1), divergence.slopes(p, log_p, q, log_q).sum(-1)]
        )
        if shard.parallel:
            dist.all_reduce(sums, group=shard.group)
        value, slope = sums
        every = torch.stack([value, torch.full_like(value, UNMEASURED), figures[0], torch.ones_like(value)])
        return every, (slope, figures[2])

    def gradient(
        self, rows: slice, state: Any, d: Tensor, divergence: Divergence, shard: VocabShard, targets: Tensor
    ) -> tuple[Tensor, Any]:
        slope, log_partition = state

        def add(gradient: Tensor, probabilities: Tensor) -> None:
            log_q = self._logits(rows, divergence, shard).sub_(log_partition[:, None])
            p = probabilities.float()
            log_p = p.clamp(min=torch.finfo(torch.float32).tiny).log()
            gradient.add_((divergence.slopes(p, log_p, log_q.exp(), log_q) * d[:, None]).to(gradient.dtype))

        return -slope * d, add

    def _logits(self, rows: slice, divergence: Divergence, shard: VocabShard) -> Tensor:
        hidden = self._hidden[rows]
        temperatures = torch.full((hidden.size(0),), divergence.temperature, device=hidden.device)
        return logits_of(hidden, self._weight, temperatures, shard)


def top_of(hidden: Tensor, weight: Tensor, targets: Tensor, shard: VocabShard, count: int, temperature: float) -> TopK:
    """The `count` likeliest tokens of a teacher on these ranks. Arguments as of `WholeVocabulary`."""
    found = [
        (_top_of_chunk(hidden[rows], weight, targets[rows], shard, count, temperature))
        for rows in chunks_of(hidden.size(0), shard)
    ]
    if not found:
        nothing = hidden.new_zeros((0, count), dtype=torch.float32)
        return TopK(Buckets.of(nothing.long(), nothing), nothing[:, 0])
    ids, log_probs, of_targets = (torch.cat(parts) for parts in zip(*found, strict=True))
    return TopK(Buckets.of(ids, log_probs), of_targets)


def _top_of_chunk(
    hidden: Tensor, weight: Tensor, targets: Tensor, shard: VocabShard, count: int, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    temperatures = torch.full((hidden.size(0),), temperature, device=hidden.device)
    softmax, figures = softmax_of(logits_of(hidden, weight, temperatures, shard), targets, shard)
    best, ids = softmax.shifted.topk(min(count, shard.size), dim=-1)
    best, ids = _every_rank(best, shard), _every_rank(ids + shard.start, shard)
    best, order = best.topk(count, dim=-1)
    return ids.gather(-1, order), best - softmax.partition.log()[:, None], figures[0]


def _every_rank(own: Tensor, shard: VocabShard) -> Tensor:
    """[R, n] of each rank -> [R, n * ranks]."""
    if not shard.parallel:
        return own
    assert shard.group is not None
    parts = [torch.empty_like(own) for _ in range(shard.group.size())]
    dist.all_gather(parts, own.contiguous(), group=shard.group)
    return torch.cat(parts, dim=-1)


Teacher = TopK | WholeVocabulary


@dataclass(frozen=True, slots=True)
class Distillation:
    """What a micro-batch is compared with, and how."""

    teacher: Teacher
    divergence: Divergence


def log_probs_and_divergence(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    shard: VocabShard,
    distillation: Distillation,
    *,
    entropy_gradient: bool,
) -> Tensor:
    """float32 [6, R]: log-prob, entropy, divergence, overlap of the top-k (-1: not measured), the teacher's log-prob of the
    target (at the divergence's temperature) and the mass of what is known of it.

    Arguments as of `trainers.megatron.vocab.log_probs`. The first three are differentiable (the entropy on demand).
    """
    return _Figures.apply(hidden, weight, targets, temperatures, shard, distillation, entropy_gradient)  # type: ignore[no-any-return]


class _Figures(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperatures, shard, distillation, entropy_gradient):  # type: ignore[no-untyped-def]
        divergence, teacher, rows = distillation.divergence, distillation.teacher, hidden.size(0)
        together = bool((temperatures == divergence.temperature).all())
        result = hidden.new_empty((6, rows), dtype=torch.float32)
        partitions = hidden.new_empty((2, rows), dtype=torch.float32)  # logs: of sampling, of the divergence
        kept, states = hidden.new_empty((0, weight.size(0))), []
        for chunk in chunks_of(rows, shard):
            own = _own_temperatures(temperatures[chunk], divergence)
            logits = logits_of(hidden[chunk], weight, own, shard)
            if not together:
                rescaled = logits * (own / temperatures[chunk])[:, None]
                _, figures = softmax_of(rescaled, targets[chunk], shard)
                result[:2, chunk], partitions[0, chunk] = figures[:2], figures[2]
                del rescaled
            softmax, figures = softmax_of(logits, targets[chunk], shard)
            partitions[1, chunk] = figures[2]
            if together:
                result[:2, chunk], partitions[0, chunk] = figures[:2], figures[2]
            result[2:, chunk], state = teacher.measure(chunk, softmax, targets[chunk], divergence, shard)
            states.append(state)
            if together and chunk.stop == rows:
                kept = softmax.exponentials.div_(softmax.partition[:, None]).to(hidden.dtype)
        ctx.settings = shard, distillation, entropy_gradient, together, states
        ctx.save_for_backward(hidden, weight, targets, temperatures, result, partitions, kept)
        return result.clone()

    @staticmethod
    def backward(ctx, d_result):  # type: ignore[no-untyped-def]
        hidden, weight, targets, temperatures, result, partitions, kept = ctx.saved_tensors
        shard, distillation, entropy_gradient, together, states = ctx.settings
        divergence, teacher = distillation.divergence, distillation.teacher
        d_hidden, d_weight = torch.zeros_like(hidden), WeightGradient(weight)
        for chunk, state in zip(chunks_of(hidden.size(0), shard), states, strict=True):
            own = _own_temperatures(temperatures[chunk], divergence)
            d_logprob, d_entropy, d_divergence = d_result[0, chunk], d_result[1, chunk], d_result[2, chunk]
            arguments = targets[chunk], result[1, chunk], d_logprob, d_entropy if entropy_gradient else None, shard
            factor, add = teacher.gradient(chunk, state, d_divergence, divergence, shard, targets[chunk])
            last = together and chunk.stop == hidden.size(0)
            logits = None if last else logits_of(hidden[chunk], weight, own, shard)
            probabilities = kept if last else (logits - partitions[1, chunk, None]).exp_().to(hidden.dtype)
            if together:
                d_logits = d_logits_of(probabilities, *arguments, factor)
            else:
                d_logits = probabilities * factor[:, None].to(hidden.dtype)
            add(d_logits, probabilities)
            d_logits.div_(divergence.temperature)
            if not together:
                sampled = logits.mul_((own / temperatures[chunk])[:, None]).sub_(partitions[0, chunk, None]).exp_()
                of_sampling = d_logits_of(sampled.to(hidden.dtype), *arguments)
                d_logits.add_(of_sampling.div_(temperatures[chunk, None].to(d_logits.dtype)))
            torch.mm(d_logits, weight, out=d_hidden[chunk])
            d_weight.add(d_logits, hidden[chunk])
        if shard.parallel:  # every rank has seen only its part of the vocabulary
            dist.all_reduce(d_hidden, group=shard.group)
        return d_hidden, d_weight.result(), None, None, None, None, None


def _own_temperatures(temperatures: Tensor, divergence: Divergence) -> Tensor:
    return torch.full_like(temperatures, divergence.temperature)


def local_of_each(ids: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Columns in this rank's part and whether they are there, both [R, K]; an id of -1 is nowhere."""
    local, mine = local_columns(ids.reshape(-1), shard)
    mine = mine.view(ids.shape) & (ids >= 0)
    return local.view(ids.shape).masked_fill(~mine, 0), mine
