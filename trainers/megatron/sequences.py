"""Packed sequences of like length, padded into blocks: one call of attention for many of them.

A call for each sequence alone is too little work for two cores or more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

LONGEST_OVER_SHORTEST = 1.25  # of the sequences of one block


@dataclass(frozen=True, slots=True)
class PaddedSequences:
    """Where packed rows go. Padding, on the right, repeats a sequence's last row: no row of the sequence sees what is
    behind it, and what comes of the padding is dropped."""

    blocks: tuple[tuple[int, int], ...]  # sequences of each, and places of a sequence
    rows: Tensor | None  # int64 [places]: the packed row in each place; None when no row moves
    places: Tensor | None  # int64 [packed]: the place of each row; None when no row moves

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> PaddedSequences:
        starts = np.cumsum([0, *lengths])
        blocks, rows, kept = [], [], []
        for block in _alike(lengths):
            longest = lengths[block[-1]]
            blocks.append((len(block), longest))
            place = np.arange(longest)
            rows += [starts[index] + np.minimum(place, lengths[index] - 1) for index in block]
            kept += [place < lengths[index] for index in block]
        row_of_place, is_row = np.concatenate(rows), np.concatenate(kept)
        if np.array_equal(row_of_place, np.arange(starts[-1])):
            return cls(tuple(blocks), None, None)
        place_of_row = np.empty(starts[-1], np.int64)
        place_of_row[row_of_place[is_row]] = np.flatnonzero(is_row)
        return cls(tuple(blocks), *(torch.from_numpy(x).to(device) for x in (row_of_place, place_of_row)))

    def pad(self, x: Tensor) -> list[Tensor]:
        """[packed, heads, d] -> [sequences, places, heads, d] of each block."""
        padded = x if self.rows is None else _Pad.apply(x, self.rows, self.places)
        sizes = [count * longest for count, longest in self.blocks]
        return [piece.unflatten(0, block) for piece, block in zip(padded.split(sizes), self.blocks, strict=True)]

    def unpad(self, outputs: Sequence[Tensor]) -> Tensor:
        """The way back."""
        padded = torch.cat([output.flatten(0, 1) for output in outputs])
        return padded if self.places is None else _Unpad.apply(padded, self.places)


def _alike(lengths: Sequence[int]) -> list[list[int]]:
    """The sequences, shortest first, cut where one would be much longer than the first of its block."""
    blocks: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not blocks or lengths[index] > LONGEST_OVER_SHORTEST * lengths[blocks[-1][0]]:
            blocks.append([])
        blocks[-1].append(index)
    return blocks


class _Pad(torch.autograd.Function):
    """Its gradient is a plain selection: what reaches the padding belongs to nobody (and is zero)."""

    @staticmethod
    def forward(ctx, x, rows, places):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(places)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (places,) = ctx.saved_tensors
        return gradient.index_select(0, places), None, None


class _Unpad(torch.autograd.Function):
    """torch's own gradient of a selection adds row by row; here every place is named once."""

    @staticmethod
    def forward(ctx, x, places):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(places)
        ctx.padded = x.size(0)
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (places,) = ctx.saved_tensors
        return gradient.new_zeros((ctx.padded, *gradient.shape[1:])).index_copy_(0, places, gradient), None
