"""Context parallelism: the rows of a micro-batch are dealt out one by one over the ranks of a group.

Rank r of n holds rows r, r + n, r + 2n, ... ("striped attention", arXiv 2311.09431). Neighbouring rows attend to nearly
the same keys, so all ranks have the same work whatever the segments. Before attention, keys and values are gathered from
all ranks; their gradients are summed on the way back. Behind the model the log-probs of all targets are put together on
every rank, so that a loss need not know how rows were split.

Plain torch and Megatron's collectives, no Transformer Engine. Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor

from trainers.megatron.attention import DENSE_TOKENS, PackedLayout, SegmentAttention, additive, segment_mask
from trainers.packing import Segment

BLOCK_ROWS = 1024  # of one masked call on a long run: bounds the mask, and leaves out the keys behind the block


@dataclass(frozen=True, slots=True)
class Stripe:
    """Every `step`-th row from `first`, counted from some place in the packed rows."""

    first: int
    step: int

    def count(self, rows: int) -> int:
        """How many of the next `rows` rows belong to it."""
        return len(range(self.first, rows, self.step))

    def behind(self, rows: int) -> Stripe:
        """The same rows, counted from `rows` further on."""
        return Stripe((self.first - rows) % self.step, self.step)


def own_stripe() -> Stripe:
    return Stripe(parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size())


def put_together(values: Tensor, own: Tensor, count: int) -> Tensor:
    """[k, own] on every rank -> [k, count] of all ranks. Every rank must then compute the same with it: the gradient of a
    rank's own values is taken from its own result, not summed over ranks."""
    full = values.new_zeros((values.size(0), count)).index_copy(1, own, values)
    return reduce_from_tensor_model_parallel_region(full, group=parallel_state.get_context_parallel_group())  # type: ignore[no-any-return]


class StripedAttention(SegmentAttention):
    """`core_attention` for a stripe: query [own rows, heads, d], key and value [own rows, groups, d]."""

    def _by_segment(self, layout: PackedLayout, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        key, value = _gather(key, value)
        pieces = _split([segment.tokens for segment in layout.segments], own_stripe(), query, key, value)
        return [self._striped(layout, index, *piece) for index, piece in enumerate(pieces)]

    def _striped(
        self, layout: PackedLayout, index: int, stripe: Stripe, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        segment = layout.segments[index]
        if query.size(0) == 0:
            return query
        if segment.tokens > DENSE_TOKENS:
            return self._by_run(segment, stripe, query, key, value)
        if index not in layout.masks:
            every = segment_mask(segment, query.dtype, query.device)
            layout.masks[index] = every[stripe.first :: stripe.step].contiguous()
        return self._attend(query, key, value, layout.masks[index])

    def _by_run(self, segment: Segment, stripe: Stripe, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """A run is the prompt or one response; a response sees the prompt too."""
        outputs = []
        prompt = key[: segment.prompt], value[: segment.prompt]
        runs = _split([segment.prompt, *segment.responses], stripe, query, key, value)
        for number, (held, q, k, v) in enumerate(runs):
            before = segment.prompt if number else 0
            keys, values = (torch.cat([prompt[0], k]), torch.cat([prompt[1], v])) if number else (k, v)
            for start in range(0, q.size(0), BLOCK_ROWS):
                block = q[start : start + BLOCK_ROWS]
                row = torch.arange(start, start + block.size(0), device=q.device) * held.step + held.first + before
                stop = before + held.first + held.step * (start + block.size(0) - 1) + 1
                visible = torch.arange(stop, device=q.device)[None] <= row[:, None]
                outputs.append(self._attend(block, keys[:stop], values[:stop], additive(visible, q.dtype)))
        return torch.cat(outputs)


def _gather(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """[own rows, groups, d] each -> [packed, groups, d] each, in the order of the rows."""
    group = parallel_state.get_context_parallel_group()
    by_rank = gather_from_sequence_parallel_region(torch.stack([key, value], dim=1), group=group)
    every = by_rank.unflatten(0, (group.size(), -1)).transpose(0, 1).flatten(0, 1)
    return every[:, 0], every[:, 1]


def _split(
    sizes: list[int], stripe: Stripe, query: Tensor, key: Tensor, value: Tensor
) -> Iterator[tuple[Stripe, Tensor, Tensor, Tensor]]:
    """Cut all rows of key and value into consecutive pieces of these sizes, and query into the own rows of each."""
    held = 0
    for size, k, v in zip(sizes, key.split(sizes), value.split(sizes), strict=True):
        count = stripe.count(size)
        yield stripe, query[held : held + count], k, v
        held += count
        stripe = stripe.behind(size)
