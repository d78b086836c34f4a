"""Copies of a model's parameters, and the model with such a copy in place of its own.

Used for the frozen policies of a step: the start weights, and past versions that makers still sample with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

Snapshot = dict[str, Tensor]  # by parameter name


def take(model: torch.nn.Module, into: Snapshot | None = None) -> Snapshot:
    """Copy this rank's parameters, into the memory of an older snapshot when one is given."""
    if into is None:
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        into[name].copy_(parameter.detach())
    return into


@contextmanager
def substituted(model: torch.nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """The model with other values for the parameters that `tensors` names, while the block runs."""
    parameters = dict(model.named_parameters())
    originals = {name: parameters[name].data for name in tensors}
    try:
        for name, tensor in tensors.items():
            parameters[name].data = tensor
        yield
    finally:
        for name, data in originals.items():
            parameters[name].data = data
