"""Megatron's sharded states, kept in files that hold no code.

Megatron describes a state as tensors that are parts of global tensors, and saves it through torch's distributed checkpoint,
whose files are pickled. Here every rank writes what it is the first to hold into a state file of its own, without a word to
the others; and reads from the files of all ranks whatever overlaps with its parts. So a state fits any layout of the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, merge, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    apply_factory_merges,
    is_main_replica,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from torch import Tensor

from trainers.state_files import StateFile, StateFileError, copied, to_host

SHARDS, OBJECTS, COMMON = "shards", "objects", "common"  # the parts of a state file


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def open_files(folder: Path, ranks: int) -> list[StateFile]:
    """The files of all ranks that wrote a state. Raises StateFileError."""
    return [StateFile(folder / file_name(rank)) for rank in range(ranks)]


def take(sharded_state: dict[str, Any], *, first: bool) -> dict[str, Any]:
    """This rank's parts of a sharded state, in CPU memory, for `write_state`; the `first` rank has what all have in common.

    Collective: that the parts of all ranks cover every tensor once is checked.
    """
    sharded, common = save_preprocess(sharded_state)
    own = [value for value in nested_values(sharded) if is_main_replica(value.replica_id)]
    tensors = [value for value in own if isinstance(value, ShardedTensor)]
    objects = {value.unique_key: value.data for value in own if isinstance(value, ShardedObject)}
    shards = [
        {
            "key": t.key,
            "offset": list(t.global_offset),
            "size": list(t.global_shape),
            "data": to_host(_whole(t, t.data)),
        }
        for t in tensors
    ]
    return {SHARDS: shards, OBJECTS: copied(objects)} | ({COMMON: copied(common)} if first else {})


def put(sharded_state: dict[str, Any], files: Sequence[StateFile]) -> dict[str, Any]:
    """The state that `sharded_state` describes, read from the files of all ranks, the first one's first.

    Raises StateFileError for a state that they do not hold whole.
    """
    stored: dict[str, list[_Stored]] = {}
    objects: dict[str, Any] = {}
    for file in files:
        for shard in file.part(SHARDS, read=str):
            stored.setdefault(shard["key"], []).append(_Stored(file, shard["data"], shard["offset"], shard["size"]))
        objects |= file.part(OBJECTS)

    def read(wanted: ShardedTensor | ShardedObject) -> Any:
        if isinstance(wanted, ShardedTensor):
            return _read(wanted, stored.get(wanted.key, ()))
        if wanted.unique_key not in objects:
            raise StateFileError(f"{wanted.unique_key} is not there")
        return objects[wanted.unique_key]

    wanted, own, factories = load_preprocess(sharded_state)
    wanted, _ = extract_sharded_base(wanted)
    state = merge(files[0].part(COMMON), own)
    state = merge(state, dict_list_map_inplace(read, wanted))
    return apply_factory_merges(state, factories)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Stored:
    """A part of a global tensor in a file."""

    file: StateFile
    name: str
    offset: list[int]
    size: list[int]  # of the global tensor


def _read(wanted: ShardedTensor, parts: Sequence[_Stored]) -> Tensor:
    """A part of a global tensor, put together from those parts in the files that it overlaps with."""
    for part in parts:
        if tuple(part.size) != tuple(wanted.global_shape) and not wanted.allow_shape_mismatch:
            raise StateFileError(f"{wanted.key} has shape {part.size} there, {list(wanted.global_shape)} here")
    # Where shapes may differ (a vocabulary padded to the number of ranks), what is beyond the stored tensor is zero.
    make: Callable[..., Tensor] = torch.zeros if wanted.allow_shape_mismatch else torch.empty
    result = make(wanted.local_shape, dtype=wanted.dtype)
    target = _whole(wanted, result)
    filled = 0
    for part in parts:
        file_slice = part.file.slice(part.name)
        shape = file_slice.get_shape()
        begins = [max(a, b) for a, b in zip(part.offset, wanted.global_offset, strict=True)]
        ends = [
            min(a + n, b + m) for a, n, b, m in zip(part.offset, shape, wanted.global_offset, target.shape, strict=True)
        ]
        if any(begin >= end for begin, end in zip(begins, ends, strict=True)):
            continue
        there = tuple(_slices(begins, ends, part.offset))
        value = file_slice[there] if there else part.file.get(part.name)
        target[tuple(_slices(begins, ends, wanted.global_offset))] = value
        filled += value.numel()
    bounds = parts[0].size if parts else wanted.global_shape
    expected = math.prod(
        max(0, min(offset + size, bound) - offset)
        for offset, size, bound in zip(wanted.global_offset, target.shape, bounds, strict=True)
    )
    if filled != expected:
        raise StateFileError(f"{wanted.key}: {filled} of {expected} values are there")
    return result


def _whole(sharded: ShardedTensor, local: Tensor) -> Tensor:
    """A local part with as many dimensions as the global tensor; a view of a contiguous one."""
    return local.reshape((1,) * sharded.prepend_axis_num + tuple(sharded.local_shape))


def _slices(begins: Sequence[int], ends: Sequence[int], offset: Sequence[int]) -> Iterator[slice]:
    return (slice(begin - o, end - o) for begin, end, o in zip(begins, ends, offset, strict=True))
