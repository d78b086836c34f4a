"""Writing a policy as a Hugging Face folder that `transformers` and vLLM load."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

SHARD_BYTES = 4 << 30  # of one safetensors file
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".gguf", ".pt", ".pth"}


def save_huggingface(folder: Path, weights: Iterable[tuple[str, Tensor]], source: Path, *, write: bool) -> None:
    """Walk `weights`, and, where `write`, store them with every other file of the model's `source` folder.

    The folder appears complete or not at all. Raises FileExistsError when it is there already.
    """
    if not write:
        for _ in weights:
            pass
        return
    if folder.exists():
        raise FileExistsError(f"{folder} exists: choose another folder for the exported model")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix not in _WEIGHT_SUFFIXES and not file.name.endswith(".index.json"):
            shutil.copy(file, partial / file.name)
    dtype = _write_shards(partial, weights)
    _set_dtype(partial / "config.json", dtype)
    os.replace(partial, folder)


def _write_shards(folder: Path, weights: Iterable[tuple[str, Tensor]]) -> str:
    """One file, or numbered ones with an index. Returns the dtype of the weights."""
    from safetensors.torch import save_file

    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    total = 0
    dtype = "float32"

    def flush() -> None:
        if pending:
            shards.append(list(pending))
            save_file(pending, folder / _shard_name(len(shards)), metadata={"format": "pt"})
            pending.clear()

    for name, tensor in weights:
        if sum(_nbytes(t) for t in pending.values()) + _nbytes(tensor) > SHARD_BYTES:
            flush()
        pending[name] = tensor.detach().cpu().clone().contiguous()
        total += _nbytes(tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
    flush()
    if len(shards) == 1:
        os.replace(folder / _shard_name(1), folder / "model.safetensors")
    else:
        where = {name: _shard_name(i) for i, names in enumerate(shards, 1) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return dtype


def _set_dtype(config_file: Path, dtype: str) -> None:
    config = json.loads(config_file.read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    config_file.write_text(json.dumps(config, indent=2) + "\n")


def _shard_name(number: int) -> str:
    return f"model-{number:05d}.safetensors"


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
