"""A trainer's state out of device memory and back, on Megatron's own calls. On a CPU nothing moves. Not yet run on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def offload(model: Any, optimizer: Any) -> None:
    """`model` is Megatron's DDP. Gradients are given up; parameters and optimizer state go to CPU memory."""
    if not torch.cuda.is_available():
        return
    torch.cuda.synchronize()
    optimizer.offload_to_cpu()
    for buffer in _buffers(model):
        buffer.offload_to_cpu()
    _move(model, "cpu")
    torch.cuda.empty_cache()


def onload(model: Any, optimizer: Any) -> None:
    if not torch.cuda.is_available():
        return
    for buffer in _buffers(model):
        buffer.reload_from_cpu()
    _move(model, "cuda")
    optimizer.restore_from_cpu()
    torch.cuda.synchronize()


def _move(model: Any, device: str) -> None:
    for parameter in _loose_parameters(model):
        parameter.data = parameter.data.to(device)


def _buffers(model: Any) -> list[Any]:
    return [*model.buffers, *model.expert_parallel_buffers]


def _loose_parameters(model: Any) -> Iterator[Tensor]:
    """Only the distributed optimizer lays parameters into the buffers."""
    for buffer in _buffers(model):
        if buffer.param_data is None:
            yield from buffer.params
