"""Exact log-probs and entropy from hidden states, with the vocabulary split over tensor-parallel ranks.

Guarantees, all asserted by tests:

1. Values and gradients equal those of a log-softmax of logits / temperature over the whole vocabulary, at any
   tensor-parallel size.
2. Logits exist for at most `rows_per_chunk` tokens at a time. In the backward pass they are computed again, chunk by
   chunk, except for the last chunk, whose probabilities are kept: at most one chunk is ever held between the passes.
3. The softmax is taken in float32 whatever the dtype of the weights.
4. Padding of the vocabulary takes no probability.

Per token two small all-reduces (a maximum, and three sums) replace any gathering of logits. Shape names: R rows (tokens),
H hidden size, V size of this rank's part of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_BYTES = 256 << 20  # float32 logits of one chunk on one rank
_EXCLUDED = -1e4  # a logit that takes no probability; minus infinity would give 0 * inf in the entropy


@dataclass(frozen=True, slots=True)
class VocabShard:
    """This rank's part of the vocabulary: `size` padded entries from `start`; ids from `vocab_size` on are padding."""

    start: int
    size: int
    vocab_size: int
    group: dist.ProcessGroup | None = None  # None: the whole vocabulary is here

    @property
    def rows_per_chunk(self) -> int:
        return max(1, CHUNK_BYTES // (4 * self.size))

    @property
    def parallel(self) -> bool:
        return self.group is not None and self.group.size() > 1

    @property
    def real(self) -> int:
        """How many of this rank's entries are not padding."""
        return min(max(self.vocab_size - self.start, 0), self.size)


def log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    shard: VocabShard,
    *,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Log-probs of `targets` and entropies in nats, both float32 [R], of the softmax of logits / temperature.

    hidden [R, H], targets int64 [R] (ids of the whole vocabulary) and temperatures float32 [R] are equal on all ranks of
    the group; weight [V, H] is this rank's part. The entropy is differentiable only with `entropy_gradient`.
    """
    return _LogProbs.apply(hidden, weight, targets, temperatures, shard, entropy_gradient)  # type: ignore[no-any-return]


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperatures, shard, entropy_gradient):  # type: ignore[no-untyped-def]
        rows = hidden.size(0)
        result = hidden.new_empty((3, rows), dtype=torch.float32)  # log-prob, entropy, log of the partition sum
        kept = hidden.new_empty((0, weight.size(0)))
        for chunk in chunks_of(rows, shard):
            kept, result[:, chunk] = _forward_chunk(hidden[chunk], weight, targets[chunk], temperatures[chunk], shard)
        ctx.shard, ctx.entropy_gradient = shard, entropy_gradient
        ctx.save_for_backward(hidden, weight, targets, temperatures, result, kept)
        ctx.set_materialize_grads(False)
        logprob, entropy = result[0].clone(), result[1].clone()
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    def backward(ctx, d_logprob, d_entropy):  # type: ignore[no-untyped-def]
        hidden, weight, targets, temperatures, result, kept = ctx.saved_tensors
        if d_entropy is None or not ctx.entropy_gradient:
            d_entropy = None
        if d_logprob is None:
            d_logprob = torch.zeros_like(result[0])
        d_hidden = torch.zeros_like(hidden)
        d_weight = WeightGradient(weight)
        chunks = chunks_of(hidden.size(0), ctx.shard)
        for chunk in chunks:
            if chunk is chunks[-1]:
                probabilities = kept
            else:
                logits = logits_of(hidden[chunk], weight, temperatures[chunk], ctx.shard)
                probabilities = logits.sub_(result[2, chunk, None]).exp_().to(hidden.dtype)
            d_logits = d_logits_of(
                probabilities,
                targets[chunk],
                result[1, chunk],
                d_logprob[chunk],
                None if d_entropy is None else d_entropy[chunk],
                ctx.shard,
            )
            d_logits.div_(temperatures[chunk, None].to(d_logits.dtype))
            torch.mm(d_logits, weight, out=d_hidden[chunk])
            d_weight.add(d_logits, hidden[chunk])
        if ctx.shard.parallel:  # every rank has seen only its part of the vocabulary
            dist.all_reduce(d_hidden, group=ctx.shard.group)
        return d_hidden, d_weight.result(), None, None, None, None


class WeightGradient:
    """Sum over chunks in float32, without a float32 copy when there is only one chunk."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self._sum: Tensor | None = None

    def add(self, d_logits: Tensor, hidden: Tensor) -> None:
        part = d_logits.t() @ hidden
        self._sum = part if self._sum is None else self._sum.float().add_(part)

    def result(self) -> Tensor:
        return torch.zeros_like(self._weight) if self._sum is None else self._sum.to(self._weight.dtype)


def chunks_of(rows: int, shard: VocabShard) -> list[slice]:
    size = shard.rows_per_chunk
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def logits_of(hidden: Tensor, weight: Tensor, temperatures: Tensor, shard: VocabShard) -> Tensor:
    """float32 [R, V], a fresh buffer."""
    logits = (hidden @ weight.t()).float().div_(temperatures[:, None])
    logits[:, shard.real :] = _EXCLUDED
    return logits


def _forward_chunk(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor, shard: VocabShard
) -> tuple[Tensor, Tensor]:
    """Probabilities [R, V] in the dtype of `hidden`, and log-prob, entropy, log of the partition sum [3, R]."""
    softmax, figures = softmax_of(logits_of(hidden, weight, temperatures, shard), targets, shard)
    return softmax.exponentials.div_(softmax.partition[:, None]).to(hidden.dtype), figures


@dataclass(frozen=True, slots=True)
class Softmax:
    """Of a chunk: this rank's `shifted` logits and `exponentials` float32 [R, V], over all ranks `partition` [R]."""

    shifted: Tensor
    exponentials: Tensor
    partition: Tensor


def softmax_of(logits: Tensor, targets: Tensor, shard: VocabShard) -> tuple[Softmax, Tensor]:
    """Over the whole vocabulary, written over `logits` [R, V]; and log-prob, entropy, log of the partition sum [3, R]."""
    top = logits.amax(-1, keepdim=True)
    if shard.parallel:
        dist.all_reduce(top, dist.ReduceOp.MAX, group=shard.group)
    logits.sub_(top)
    local, mine = local_columns(targets, shard)
    picked = logits.gather(-1, local).masked_fill_(~mine, 0.0).squeeze(-1)
    exponentials = logits.exp()
    sums = torch.stack([exponentials.sum(-1), torch.linalg.vecdot(exponentials, logits), picked])
    if shard.parallel:
        dist.all_reduce(sums, group=shard.group)
    partition, weighted, picked = sums
    log_partition = partition.log()
    figures = torch.stack([picked - log_partition, log_partition - weighted / partition, log_partition + top[:, 0]])
    return Softmax(logits, exponentials, partition), figures


def d_logits_of(
    probabilities: Tensor,
    targets: Tensor,
    entropy: Tensor,
    d_logprob: Tensor,
    d_entropy: Tensor | None,
    shard: VocabShard,
    more: Tensor | float = 0.0,
) -> Tensor:
    """Gradient for the logits [R, V]: those of log-prob and entropy, and `more` [R] times the probabilities.

    d logprob / d z = onehot - p;  d entropy / d z = -p * (log p + H).
    """
    dtype = probabilities.dtype
    local, mine = local_columns(targets, shard)
    from_entropy = None
    if d_entropy is not None:
        slope = torch.xlogy(probabilities, probabilities).addcmul_(probabilities, entropy[:, None].to(dtype))
        from_entropy = slope.mul_(-d_entropy[:, None].to(dtype))
    gradient = probabilities * (more - d_logprob)[:, None].to(dtype)
    gradient.scatter_add_(-1, local, d_logprob[:, None].masked_fill(~mine, 0.0).to(dtype))
    return gradient if from_entropy is None else gradient.add_(from_entropy)


def local_columns(targets: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Column in this rank's part and whether the target is there, both [R, 1]."""
    local = (targets - shard.start)[:, None]
    mine = (local >= 0) & (local < shard.size)
    return local.masked_fill(~mine, 0), mine
