"""Checkpoints of a Megatron learner: model, optimizer and the random states of every rank.

Guarantees: restoring continues bit by bit; nothing that is read can run code (see `trainers.megatron.shards`); a folder that
is missing, incomplete or of another model is refused with the reason before anything is loaded from it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from trainers.checkpoints import CheckpointError
from trainers.megatron import shards
from trainers.megatron.optimizer import load_state, materialise_state
from trainers.state_files import StateFile, StateFileError, copied, random_state, set_random_state, write_state

MODEL_FILE = "model.json"
RANDOM = "random"  # the part of a rank's file


def stage(model: Any, optimizer: Any, hf_config: Any) -> Callable[[Path], None]:
    """Collective: copy the state to CPU memory. What is returned writes this rank's copy below a folder, whenever, without
    the other ranks. It raises CheckpointError when it cannot (a full disk)."""
    materialise_state(optimizer)
    rank = dist.get_rank()
    state = shards.take(_sharded_state(model, optimizer, loading=False), first=rank == 0)
    state[RANDOM] = copied({"process": random_state(), "tracker": tensor_parallel.get_cuda_rng_tracker().get_states()})
    description = {"model": fingerprint(hf_config), "layout": _layout(), "ranks": dist.get_world_size()}

    def write(folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_state(folder / shards.file_name(rank), state)
            if rank == 0:
                (folder / MODEL_FILE).write_text(json.dumps(description, indent=1))
        except OSError as error:
            free = shutil.disk_usage(folder).free / 2**20
            raise CheckpointError(f"{folder} cannot be written, its disk has {free:.1f} MiB free: {error}") from error

    return write


def restore(folder: Path, model: Any, optimizer: Any, hf_config: Any) -> None:
    """Collective. Raises CheckpointError. A file that fails while it is read leaves the learner unusable.

    The layout of the ranks may be another than that of those who wrote it; their random states then start anew.
    """
    description, files = check(folder, hf_config)
    materialise_state(optimizer)
    try:
        state = shards.put(_sharded_state(model, optimizer, loading=True), files)
        random = files[dist.get_rank()].part(RANDOM) if description["layout"] == _layout() else None
    except Exception as error:
        raise CheckpointError(f"{folder} cannot be read ({type(error).__name__}: {error})") from error
    model.load_state_dict(state["model"])
    load_state(optimizer, state["optimizer"])
    if random is not None:
        set_random_state(random["process"])
        tensor_parallel.get_cuda_rng_tracker().set_states(random["tracker"])


def check(folder: Path, hf_config: Any) -> tuple[dict[str, Any], list[StateFile]]:
    """The description of the state and its open files. Refuses what is no checkpoint of this model."""
    file = folder / MODEL_FILE
    if not file.is_file():
        raise CheckpointError(f"{folder} is not a complete checkpoint of a learner: it has no {MODEL_FILE}")
    try:
        description = json.loads(file.read_text())
        there, ranks, _ = description["model"], int(description["ranks"]), description["layout"]
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{file} is broken ({type(error).__name__}: {error})") from error
    here = fingerprint(hf_config)
    different = [f"{name} {there.get(name)} there, {here[name]} here" for name in here if there.get(name) != here[name]]
    if different:
        raise CheckpointError(f"{folder} is of another model: {', '.join(different)}")
    try:
        return description, shards.open_files(folder, ranks)
    except StateFileError as error:
        raise CheckpointError(f"{folder} is incomplete: {error}") from error


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


def _sharded_state(model: Any, optimizer: Any, *, loading: bool) -> dict[str, Any]:
    metadata = _metadata()
    state: dict[str, Any] = {"model": model.sharded_state_dict(metadata=metadata)}
    state["optimizer"] = optimizer.sharded_state_dict(state["model"], is_loading=loading, metadata=metadata)
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
