"""A training state as one safetensors file: its tensors as they are, everything else as JSON in the file's header.

Guarantees: reading a file runs no code that it holds, whoever wrote it (nothing is pickled); what is read is equal to what
was written, in every bit and type; a file that is cut short or of another kind is refused before anything is read from it.

A state has named parts, each made of dicts (keys: texts or integers), lists and tuples of tensors, numbers, texts, booleans
and None.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

_STATE = "state"  # the key of the JSON among the header's texts
_TENSOR, _TUPLE, _DICT = "tensor", "tuple", "dict"  # the kinds of JSON objects in it


class StateFileError(ValueError):
    """A file is no state file, or is cut short."""


def to_host(tensor: Tensor) -> Tensor:
    """A copy of its own in CPU memory, contiguous. Not yet run on a GPU's tensor."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def copied(state: Any) -> Any:
    """The state with every tensor copied to CPU memory."""
    return mapped(state, to_host)


def mapped(state: Any, change: Callable[[Tensor], Any]) -> Any:
    """The state with `change` applied to every tensor."""
    if isinstance(state, Tensor):
        return change(state)
    if isinstance(state, dict):
        return {key: mapped(value, change) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(mapped(value, change) for value in state)
    return state


def write_state(file: Path, state: Mapping[str, Any]) -> None:
    """The tensors must share no memory (see `copied`). The file appears whole or not at all. Raises OSError."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps({part: _encoded(value, tensors, part) for part, value in state.items()})
    partial = file.with_name(f".{file.name}.partial")
    try:
        save_file(tensors, partial, metadata={_STATE: text})
        with partial.open("rb") as written:
            os.fsync(written.fileno())
    except SafetensorError as error:  # how it tells of a full disk
        partial.unlink(missing_ok=True)
        raise OSError(f"{file}: {error}") from error
    partial.rename(file)


class StateFile:
    """An open state file. Tensors are read when they are asked for. Raises StateFileError."""

    def __init__(self, file: Path) -> None:
        try:
            self._file: Any = safe_open(file, framework="pt")
            self._parts = json.loads((self._file.metadata() or {})[_STATE])
        except FileNotFoundError:
            raise StateFileError(f"{file.name} is missing") from None
        except (SafetensorError, OSError) as error:
            raise StateFileError(f"{file.name} is cut short, or no safetensors file ({error})") from error
        except (KeyError, ValueError) as error:
            raise StateFileError(f"{file.name} is a safetensors file, but not of a training state") from error
        self._name = file.name

    def read(self) -> dict[str, Any]:
        """The whole state."""
        return {part: self.part(part) for part in self._parts}

    def part(self, name: str, read: Callable[[str], Any] | None = None) -> Any:
        """One part of the state; with `read(name)`, where given, in place of each tensor. Names are for `get` and `slice`."""
        try:
            return _decoded(self._parts[name], read or self.get)
        except (KeyError, TypeError, ValueError, SafetensorError) as error:
            raise StateFileError(f"{self._name} cannot be read: {type(error).__name__}: {error}") from error

    def get(self, name: str) -> Tensor:
        return self._file.get_tensor(name)  # type: ignore[no-any-return]

    def slice(self, name: str) -> Any:
        """A tensor as safetensors gives it when only parts of it are wanted, by indexing."""
        return self._file.get_slice(name)


def seed_generators(seed: int) -> None:
    """Every generator of this process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """Of every generator of this process: Python, NumPy, torch, and torch's on its GPU (not yet run on one)."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    state = {
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
    }
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def set_random_state(state: dict[str, Any]) -> None:
    """Undo what was drawn since `random_state`. One of a process without a GPU leaves the GPU's generator alone."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _encoded(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """As JSON; tensors go to `tensors`, and their names in."""
    if isinstance(value, Tensor):
        name = f"{len(tensors)} {where}"
        tensors[name] = value
        return {_TENSOR: name}
    if isinstance(value, dict):
        if wrong := [key for key in value if type(key) not in (str, int)]:
            raise TypeError(f"{where}: a state has keys of text or integers, not {wrong[0]!r}")
        return {_DICT: [[key, _encoded(item, tensors, f"{where}.{key}")] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        items = [_encoded(item, tensors, f"{where}.{number}") for number, item in enumerate(value)]
        return items if isinstance(value, list) else {_TUPLE: items}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"{where}: a {type(value).__name__} cannot be part of a state")


def _decoded(value: Any, read: Callable[[str], Any]) -> Any:
    if isinstance(value, list):
        return [_decoded(item, read) for item in value]
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    if kind == _TENSOR:
        return read(content)
    if kind == _TUPLE:
        return tuple(_decoded(item, read) for item in content)
    if kind == _DICT:
        return {key: _decoded(item, read) for key, item in content}
    raise ValueError(f"unknown kind {kind!r}")
