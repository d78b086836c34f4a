"""Sequences of like length are padded into blocks for attention; nothing of the padding may show."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trainers.megatron.sequences import LONGEST_OVER_SHORTEST, PaddedSequences

HEADS, SIZE = 2, 4
RAGGED = [7, 3, 8, 1, 20, 8, 3, 6]


def attend(x: Tensor) -> Tensor:
    """Causal, [sequences, n, heads, d]."""
    rows = x.transpose(1, 2)
    return F.scaled_dot_product_attention(rows, rows, rows, is_causal=True).transpose(1, 2)


def both_ways(lengths: list[int]) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Output and gradient, by blocks and one sequence at a time."""
    torch.manual_seed(0)
    packed = torch.randn(sum(lengths), HEADS, SIZE, dtype=torch.float64)
    weight = torch.randn_like(packed)
    padded = PaddedSequences.of(lengths, packed.device)
    blocks, alone = packed.clone().requires_grad_(), packed.clone().requires_grad_()
    first = padded.unpad([attend(block) for block in padded.pad(blocks)])
    second = torch.cat([attend(piece[None])[0] for piece in alone.split(lengths)])
    (first * weight).sum().backward()
    (second * weight).sum().backward()
    assert blocks.grad is not None
    assert alone.grad is not None
    return (first, blocks.grad), (second, alone.grad)


@pytest.mark.parametrize("lengths", [RAGGED, [5, 5, 5], [4], [1, 1, 9]])
def test_attention_by_blocks_is_attention_of_each_sequence_alone_forward_and_backward(lengths: list[int]) -> None:
    (output, gradient), (expected, expected_gradient) = both_ways(lengths)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)


def test_no_block_holds_a_sequence_much_longer_than_its_shortest() -> None:
    blocks = PaddedSequences.of(RAGGED, torch.device("cpu")).blocks
    assert blocks == ((1, 1), (2, 3), (2, 7), (2, 8), (1, 20))
    places = sum(count * longest for count, longest in blocks)
    assert places <= LONGEST_OVER_SHORTEST * sum(RAGGED)


def test_sequences_of_equal_length_are_not_moved() -> None:
    padded = PaddedSequences.of([5, 5, 5], torch.device("cpu"))
    assert padded.rows is None
    assert padded.blocks == ((3, 5),)
