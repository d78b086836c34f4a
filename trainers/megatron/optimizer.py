"""Megatron's optimizer over DDP, and what it takes to use it with torch's Adam.

Without Transformer Engine or Apex its checkpoints have five faults. The distributed optimizer's state cannot be read
before the first step (`materialise_state`), its step cannot be loaded (`_set_main_state`), and after loading all
parameters share one step tensor, so that Adam's step grows by the number of parameters each time (`load_state`). The
other optimizers leave out the step while it is 0 (`load_state`). And where the gradients lie in several buckets, as with
tied embeddings over pipeline stages, the distributed optimizer cuts the padding off each bucket when it gathers its state,
but looks for the parameters where they are with the padding: it would save shifted values (`wrap` counts the padding in).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from trainers.config import Optimizer

_gathered_state = DistributedOptimizer.sharded_param_state_fully_reshardable


def wrap(model: Any, *, distributed_optimizer: bool) -> DistributedDataParallel:
    """The model with float32 gradient buffers that are summed over data-parallel ranks."""
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer, check_for_nan_in_grad=False
    )
    wrapped = DistributedDataParallel(config=model.config, ddp_config=settings, module=model)
    for buffer in wrapped.buffers + wrapped.expert_parallel_buffers:
        buffer.numel_unpadded = buffer.numel
        for bucket in buffer.buckets:
            bucket.numel_unpadded = bucket.grad_data.numel()
    return wrapped


def build_optimizer(
    settings: Optimizer, model: DistributedDataParallel, dtype: torch.dtype, *, distributed_optimizer: bool
) -> Any:
    """AdamW with float32 main parameters; decoupled weight decay on matrices only."""
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=settings.min_lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            adam_eps=settings.eps,
            clip_grad=settings.max_grad_norm,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=distributed_optimizer,
        ),
        [model],
    )
    for inner in _parts(optimizer):
        for group in inner.optimizer.param_groups:
            group["fused"] = True  # one pass over the state instead of ten
            group["weight_decay"] = settings.weight_decay * group["wd_mult"]  # 0 for norms and biases
    return optimizer


def apply(optimizer: Any, norm: float, max_norm: float, lr: float) -> None:
    """Clip to `max_norm` and step, after `prepare_grads`."""
    for inner in _parts(optimizer):
        clip_grad_by_total_norm_fp32(inner.get_parameters(), max_norm=max_norm, total_norm=norm)
        for group in inner.param_groups:
            group["lr"] = lr
    optimizer.step_with_ready_grads()


def gather_gradients(model: DistributedDataParallel) -> None:
    """Whole gradients on every rank: with a distributed optimizer a data-parallel rank has summed only its shard."""
    for sync in model.bucket_groups + model.expert_parallel_bucket_groups:
        if sync.ddp_config.use_distributed_optimizer:
            group = sync.intra_distributed_optimizer_instance_group
            for bucket in sync.buckets:
                shards = list(bucket.grad_data.chunk(group.size()))
                dist.all_gather(shards, shards[group.rank()].clone(), group=group)


def materialise_state(optimizer: Any) -> None:
    """Give Adam the state of step 0 where it has none yet."""
    for inner in _parts(optimizer):
        for parameter in _parameters(inner):
            state = inner.optimizer.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)


def load_state(optimizer: Any, state: dict[str, Any]) -> None:
    """Load a state that was read from a checkpoint."""
    for part in state.values() if len(_parts(optimizer)) > 1 else [state]:  # experts have an optimizer of their own
        per_parameter = part.get("optimizer", part).get("state")
        if per_parameter is not None:
            per_parameter.setdefault("common_step", torch.zeros((), dtype=torch.float32))
    optimizer.load_state_dict(state)
    for inner in _parts(optimizer):
        for parameter in _parameters(inner):
            moments = inner.optimizer.state[parameter]
            moments["step"] = moments["step"].clone()


def install_checkpoint_fixes() -> None:
    DistributedOptimizer._set_main_param_and_optimizer_states = _set_main_state
    DistributedOptimizer.sharded_param_state_fully_reshardable = _sharded_state


def _sharded_state(
    self: Any, model_state: dict[str, Any], is_loading: bool = False, metadata: dict[str, Any] | None = None
) -> Any:
    """Main parameters and moments as Megatron describes them. Where there is one data-parallel rank it has them whole, and
    nothing is gathered, which takes several copies of everything."""
    if is_loading or self.data_parallel_group.size() > 1:
        return _gathered_state(self, model_state, is_loading, metadata)
    described = {value.data: value for value in nested_values(extract_sharded_tensors_and_factories(model_state)[0])}
    state: dict[int, Any] = {}
    for parameter in (parameter for buffer in self.buffers for parameter in buffer.param_index_map):
        like, parts = described[parameter], {}
        for name, flat in self._get_main_param_and_optimizer_states(parameter).items():
            if name != "step":  # it comes with the parameter groups
                kind = {"dtype": flat.dtype} if isinstance(like, ShardedTensor) else {}
                data = flat.detach().view(like.data.shape)
                parts[name] = replace(like, key=f"optimizer.state.{name}.{like.key}", data=data, **kind)
        state[len(state)] = parts
    return state


@torch.no_grad()
def _set_main_state(self: Any, model_param: Tensor, tensors: dict[str, Tensor]) -> None:
    """Load main parameter and moments; the step comes with the parameter groups and is not among `tensors`' targets."""
    group, order = self.model_param_group_index_map[model_param]
    main = self.optimizer.param_groups[group]["params"][order]
    targets = {"param": main, **self.optimizer.state[main]}
    for name, value in tensors.items():
        if name in targets and name != "step":
            targets[name].copy_(value)


def _parts(optimizer: Any) -> list[Any]:
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _parameters(inner: Any) -> Iterator[Tensor]:
    for group in inner.optimizer.param_groups:
        yield from group["params"]
