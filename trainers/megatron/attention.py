"""Attention over packed segments, through torch's scaled dot-product attention; no Transformer Engine.

A segment is a prompt followed by the responses computed with it. A response attends to the prompt and to itself, never
to its siblings, so the prompt's keys and values are computed once for a whole group. Rotary positions are applied here,
from explicit positions, because a packed row's place says nothing about its position.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from trainers.megatron.sequences import PaddedSequences
from trainers.megatron.vocab_divergence import Distillation
from trainers.packing import Segment

DENSE_TOKENS = 1024  # up to here one masked call over a whole segment is faster than one call a response


@dataclass
class PackedLayout(PackedSeqParams):
    """What every attention layer needs to know of a micro-batch. `cos`, `sin` are [own rows, 1, head_dim / 2] in the
    dtype in which attention is computed. Own rows and targets are those of this rank: all of them, unless context
    parallelism splits the rows."""

    segments: tuple[Segment, ...] = ()
    cos: Tensor | None = None
    sin: Tensor | None = None
    logit_rows: Tensor | None = None  # int64 [own targets], among the own rows: for the last pipeline stage
    targets: Tensor | None = None  # int64 [own targets]
    temperatures: Tensor | None = None  # float32 [own targets]
    own: Tensor | None = None  # int64 [own targets]: which of all targets they are
    distillation: Distillation | None = None  # of the own targets
    every_target: int = 0  # of the micro-batch, over all ranks
    masks: dict[int, Tensor] = field(default_factory=dict)  # by number of the segment, filled on first use
    sequences: PaddedSequences | None = None  # filled on first use


class SegmentAttention(MegatronModule):
    """Megatron's `core_attention`: query [packed, heads, d], key and value [packed, groups, d] -> [packed, heads * d]."""

    def __init__(self, config: Any, layer_number: int, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedLayout | None = None,
        **_: Any,
    ) -> Tensor:
        layout = packed_seq_params
        assert layout is not None, "rows must be packed"
        assert layout.cos is not None
        assert layout.sin is not None
        dtype = query.dtype
        query, key = rotate(query, layout.cos, layout.sin), rotate(key, layout.cos, layout.sin)
        return torch.cat(self._by_segment(layout, query, key, value.to(query.dtype))).flatten(1).to(dtype)

    def _by_segment(self, layout: PackedLayout, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        if all(len(segment.responses) <= 1 for segment in layout.segments):
            return [self._by_sequence(layout, query, key, value)]
        sizes = [segment.tokens for segment in layout.segments]
        pieces = zip(query.split(sizes), key.split(sizes), value.split(sizes), strict=True)
        return [self._segment(layout, index, *piece) for index, piece in enumerate(pieces)]

    def _by_sequence(self, layout: PackedLayout, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if layout.sequences is None:
            layout.sequences = PaddedSequences.of([segment.tokens for segment in layout.segments], query.device)
        blocks = zip(*map(layout.sequences.pad, (query, key, value)), strict=True)
        return layout.sequences.unpad([self._attend_each(*block, None) for block in blocks])

    def _segment(self, layout: PackedLayout, index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        segment = layout.segments[index]
        if len(segment.responses) <= 1:
            return self._attend(query, key, value, None)
        if segment.tokens <= DENSE_TOKENS:
            if index not in layout.masks:
                layout.masks[index] = segment_mask(segment, query.dtype, query.device)
            return self._attend(query, key, value, layout.masks[index])
        return self._by_response(segment, query, key, value)

    def _by_response(self, segment: Segment, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        sizes = [segment.prompt, *segment.responses]
        queries, keys, values = query.split(sizes), key.split(sizes), value.split(sizes)
        outputs = [self._attend(queries[0], keys[0], values[0], None)]
        for q, k, v in zip(queries[1:], keys[1:], values[1:], strict=True):
            if q.size(0):
                mask = response_mask(segment.prompt, q.size(0), query.dtype, query.device)
                outputs.append(self._attend(q, torch.cat([keys[0], k]), torch.cat([values[0], v]), mask))
        return torch.cat(outputs)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """[n, heads, d] -> [n, heads, d]; causal without a mask."""
        return self._attend_each(query[None], key[None], value[None], mask)[0]

    def _attend_each(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """[sequences, n, heads, d] -> [sequences, n, heads, d]; causal without a mask."""
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        output = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=k.size(1) != q.size(1)
        )
        return output.transpose(1, 2)


class _Rotate(torch.autograd.Function):
    """[x1, x2] -> [x1 * cos - x2 * sin, x2 * cos + x1 * sin]; the gradient is the rotation back."""

    @staticmethod
    def forward(ctx, x, cos, sin):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        return _rotated(x.to(cos.dtype), cos, sin)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        cos, sin = ctx.saved_tensors
        return _rotated(gradient, cos, -sin).to(ctx.dtype), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    output = torch.empty_like(x)
    (first, second), (to_first, to_second) = x.chunk(2, dim=-1), output.chunk(2, dim=-1)
    torch.mul(first, cos, out=to_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=to_second).addcmul_(first, sin)
    return output


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864), halves convention, on x [packed, heads, d]; in the dtype of `cos`."""
    return _Rotate.apply(x, cos, sin)  # type: ignore[no-any-return]


def rotary_tables(positions: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [packed, 1, head_dim / 2] of the positions [packed]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = (positions.float()[:, None] / base**exponents)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def attention_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """torch's attention on CPU is twice as fast backward in float32 as in bfloat16, and more exact."""
    return torch.float32 if device.type == "cpu" else dtype


def segment_mask(segment: Segment, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Additive mask [n, n]: a token sees the prompt and its own response, up to itself."""
    sizes = torch.tensor([segment.prompt, *segment.responses], device=device)
    owner = torch.repeat_interleave(torch.arange(sizes.numel(), device=device), sizes)
    visible = (owner[None] == 0) | (owner[:, None] == owner[None])
    return additive(visible.tril(), dtype)


def response_mask(prompt: int, response: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Additive mask [response, prompt + response]: the whole prompt, and the response up to itself."""
    visible = torch.ones(response, prompt + response, dtype=torch.bool, device=device).tril(prompt)
    return additive(visible, dtype)


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))
