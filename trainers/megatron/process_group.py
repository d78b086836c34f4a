"""Joining the other ranks of a trainer, and Megatron's parallel state."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from trainers.config import MegatronBackend
from trainers.learner import Rendezvous


def join(rendezvous: Rendezvous, backend: MegatronBackend, seed: int) -> None:
    """Meet the other ranks and build the parallel groups. Raises TimeoutError naming the address past the deadline."""
    if rendezvous.world_size != backend.ranks:
        raise ValueError(
            f"{rendezvous.world_size} ranks for tensor {backend.tensor_parallel} x pipeline {backend.pipeline_parallel} "
            f"x context {backend.context_parallel} x data {backend.data_parallel} parallel: needs {backend.ranks}"
        )
    timeout = datetime.timedelta(seconds=rendezvous.timeout)
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        store=_store(rendezvous, timeout),
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        timeout=timeout,
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=backend.tensor_parallel,
        pipeline_model_parallel_size=backend.pipeline_parallel,
        context_parallel_size=backend.context_parallel,
        expert_model_parallel_size=backend.expert_parallel,
    )
    model_parallel_cuda_manual_seed(seed)


def _store(rendezvous: Rendezvous, timeout: datetime.timedelta) -> dist.Store:
    if rendezvous.world_size == 1:
        return dist.HashStore()  # nobody to meet: no port
    host, _, port = rendezvous.address.rpartition(":")
    try:
        return dist.TCPStore(host, int(port), rendezvous.world_size, rendezvous.rank == 0, timeout)
    except dist.DistStoreError as error:
        raise TimeoutError(
            f"rank {rendezvous.rank} of {rendezvous.world_size} did not meet the others at {rendezvous.address} "
            f"within {rendezvous.timeout:g} s"
        ) from error


def leave() -> None:
    """Gloo aborts a process that exits while it is still in a group."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
