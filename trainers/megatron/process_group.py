"""Joining the other ranks of a trainer, Megatron's parallel state, and what ranks tell each other beside tensors."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor

from trainers.config import MegatronBackend
from trainers.learner import Rendezvous
from trainers.state_files import seed_generators


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
        # Experts that are shared out stay whole; else tensor parallelism splits them as it splits every layer.
        expert_tensor_parallel_size=1 if backend.expert_parallel > 1 else backend.tensor_parallel,
    )
    seed_generators(seed)
    model_parallel_cuda_manual_seed(seed)


def _store(rendezvous: Rendezvous, timeout: datetime.timedelta) -> dist.Store:
    if rendezvous.world_size == 1:
        return dist.HashStore()  # nobody to meet: no port
    host, _, port = rendezvous.address.rpartition(":")
    held = None if rendezvous.listener is None else rendezvous.listener.detach()  # the store closes it
    try:
        return dist.TCPStore(
            host, int(port), rendezvous.world_size, rendezvous.rank == 0, timeout, master_listen_fd=held
        )
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


def reduce_over_data_parallel_ranks(
    sums: Mapping[str, Tensor], maxima: Mapping[str, Tensor]
) -> tuple[dict[str, float], dict[str, float]]:
    """Sums and maxima of figures, the very same on every rank.

    Of each model one rank speaks: the first of the last pipeline stage, where log-probs and losses are. The other ranks
    of the stage compute the same figures, those of other stages have none.
    """
    mine: Any = ({k: float(v) for k, v in sums.items()}, {k: float(v) for k, v in maxima.items()})
    if dist.get_world_size() == 1:
        return mine  # type: ignore[no-any-return]
    speaks = (
        parallel_state.is_pipeline_last_stage()
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
    )
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine if speaks else ({}, {}))
    total: dict[str, float] = {}
    top: dict[str, float] = {}
    for theirs, highs in gathered:
        for name, value in theirs.items():
            total[name] = total.get(name, 0.0) + value
        for name, value in highs.items():
            top[name] = max(top.get(name, value), value)
    return total, top


def from_last_stage(tensors: Sequence[Tensor], sizes: Sequence[int], device: torch.device) -> list[Tensor]:
    """Float32 vectors of these sizes, which only the last pipeline stage has, for all stages."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return list(tensors)
    last = parallel_state.is_pipeline_last_stage()
    flat = torch.cat(list(tensors)) if last else torch.empty(sum(sizes), device=device)
    source = parallel_state.get_pipeline_model_parallel_last_rank()
    dist.broadcast(flat, source, group=parallel_state.get_pipeline_model_parallel_group())
    return list(flat.split(list(sizes)))


def all_ranks_together(names: set[str]) -> set[str]:
    """The union over all ranks."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, names)
    return set().union(*gathered)
