"""Checkpoints of a Megatron learner: model, optimizer and random states, through Megatron's distributed checkpoint.

Guarantees: a folder appears complete or not at all; restoring continues bit by bit; a folder that is missing, incomplete
(by the sizes of its files) or of another model is refused with the reason before anything is loaded from it.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch.distributed.checkpoint.api import CheckpointException

from trainers.checkpoints import CheckpointError
from trainers.megatron.optimizer import load_state, materialise_state

MODEL_FILE = "model.json"


def save(folder: Path, model: Any, optimizer: Any, hf_config: Any) -> None:
    """Collective. Raises CheckpointError when it cannot be written (a full disk); what was there before stays as it was."""
    partial = folder.with_name(f".{folder.name}.partial")
    if _is_first():
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    materialise_state(optimizer)
    metadata = _metadata()
    stored = {name: value for name, value in metadata.items() if name != "dp_cp_group"}
    state = _sharded_state(model, optimizer, metadata, loading=False)
    try:
        dist_checkpointing.save(state, str(partial), ("torch_dist", 1), content_metadata=stored)
    except (OSError, RuntimeError, CheckpointException) as error:  # the last is not an Exception
        free = shutil.disk_usage(partial).free / 2**20
        raise CheckpointError(
            f"{partial.parent} cannot be written, its disk has {free:.1f} MiB free: {_last_line(error)}"
        ) from error
    dist.barrier()
    if _is_first():
        files = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
        description = {"model": fingerprint(hf_config), "layout": _layout(), "files": files}
        (partial / MODEL_FILE).write_text(json.dumps(description, indent=1))
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(partial, folder)
    dist.barrier()


def restore(folder: Path, model: Any, optimizer: Any, hf_config: Any) -> None:
    """Collective. Raises CheckpointError. A file that fails while it is read leaves the learner unusable.

    The layout of the ranks may be another than at `save`; the random states of the ranks then start anew.
    """
    check(folder, hf_config)
    same_layout = json.loads((folder / MODEL_FILE).read_text())["layout"] == _layout()
    materialise_state(optimizer)
    metadata = _metadata()
    try:
        wanted = _sharded_state(model, optimizer, metadata, loading=True)
        if not same_layout:
            del wanted["random"]
        state = dist_checkpointing.load(wanted, str(folder))
    except (Exception, CheckpointException) as error:  # the latter is not an Exception
        raise CheckpointError(f"{folder} cannot be read ({type(error).__name__}: {error})") from error
    model.load_state_dict(state["model"])
    load_state(optimizer, state["optimizer"])
    if same_layout:
        random = state["random"][0]
        torch.set_rng_state(random["torch"])
        tensor_parallel.get_cuda_rng_tracker().set_states(random["tracker"])


def check(folder: Path, hf_config: Any) -> None:
    """Refuse what is no checkpoint of this model, before anything is loaded."""
    file = folder / MODEL_FILE
    if not file.is_file():
        raise CheckpointError(f"{folder} is not a complete checkpoint of a learner: it has no {MODEL_FILE}")
    try:
        stored = json.loads(file.read_text())
        there, files, _ = stored["model"], stored["files"], stored["layout"]
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{file} is broken ({type(error).__name__}: {error})") from error
    here = fingerprint(hf_config)
    different = [f"{name} {there.get(name)} there, {here[name]} here" for name in here if there.get(name) != here[name]]
    if different:
        raise CheckpointError(f"{folder} is of another model: {', '.join(different)}")
    for name, size in files.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else 0
        if found != size:
            raise CheckpointError(f"{folder} is incomplete: {name} has {found} bytes, {size} were written")


def fingerprint(hf_config: Any) -> dict[str, Any]:
    """What must be equal for a checkpoint to fit a model."""
    names = (
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "tie_word_embeddings",
        "num_experts",
        "moe_intermediate_size",
    )
    return {name: getattr(hf_config, name) for name in names if hasattr(hf_config, name)}


def _sharded_state(model: Any, optimizer: Any, metadata: dict[str, Any], *, loading: bool) -> dict[str, Any]:
    random = {"torch": torch.get_rng_state(), "tracker": tensor_parallel.get_cuda_rng_tracker().get_states()}
    state: dict[str, Any] = {"model": model.sharded_state_dict(metadata=metadata)}
    state["optimizer"] = optimizer.sharded_state_dict(state["model"], is_loading=loading, metadata=metadata)
    state["random"] = ShardedObject("random", [random], (dist.get_world_size(),), (dist.get_rank(),))
    return state


def _layout() -> dict[str, int]:
    """What must be equal for every rank to find its own random state."""
    return {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "context": parallel_state.get_context_parallel_world_size(),
        "data": parallel_state.get_data_parallel_world_size(),
        "expert": parallel_state.get_expert_model_parallel_world_size(),
    }


def _metadata() -> dict[str, Any]:
    """The layout of the optimizer's state that reshards to any parallelism."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _last_line(error: BaseException) -> str:
    """Megatron's own errors repeat the tracebacks of its writers; the last line says what went wrong."""
    return str(error).strip().rpartition("\n")[2] or type(error).__name__


def _is_first() -> bool:
    return dist.get_rank() == 0
