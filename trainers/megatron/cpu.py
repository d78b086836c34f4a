"""Lets Megatron-core run without CUDA.

Megatron-core has no CPU path: it names `torch.cuda` and `device="cuda"` throughout. `install()` gives every loaded
module of `megatron.core` and `mbridge` its own `torch`, whose `cuda` and `device="cuda"` mean the CPU. The real
`torch.cuda` stays as it is for everyone else; only two methods change for the whole process, and harmlessly so:
`Tensor.cuda` and `Module.cuda` return their object, and `Tensor.type()` says `torch.cuda.FloatTensor`, which is what
Megatron compares with. Nothing here is used where CUDA is available.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

_PACKAGES = ("megatron.core", "mbridge")
_IMPORTED_LATE = (  # modules that Megatron imports on first use: they must be there to be given their torch
    "megatron.core.optimizer_param_scheduler",
    "megatron.core.models.gpt",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "megatron.core.dist_checkpointing.strategies.async_utils",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
)
_FACTORIES = ("tensor", "zeros", "ones", "empty", "empty_like", "zeros_like", "arange", "full")


class _Stream:
    """A stream on a device that has only one. A class, because Megatron uses it in annotations."""

    def wait_stream(self, *_: Any) -> None:
        """Nothing runs beside."""

    wait_event = wait = synchronize = wait_stream

    def record_event(self, *_: Any) -> _Stream:
        return self


def install() -> None:
    """Call it after the imports of Megatron and mbridge. Calling it again covers modules that were imported since."""
    for name in _IMPORTED_LATE:
        importlib.import_module(name)
    substitute = _torch_on_cpu()
    for name, module in list(sys.modules.items()):
        if name.startswith(_PACKAGES) and getattr(module, "__dict__", {}).get("torch") is torch:
            module.torch = substitute  # type: ignore[attr-defined]
    _patch_random_state()
    _patch_experts()
    _patch_tensor_methods()
    warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS")


@functools.cache
def _torch_on_cpu() -> types.ModuleType:
    substitute = types.ModuleType("torch")
    substitute.__getattr__ = lambda name: getattr(torch, name)  # type: ignore[method-assign]
    substitute.cuda = _cuda_on_cpu()  # type: ignore[attr-defined]
    for name in _FACTORIES:
        setattr(substitute, name, _allocate_on_cpu(getattr(torch, name)))
    return substitute


def _cuda_on_cpu() -> types.ModuleType:
    cpu = torch.device("cpu")
    stream = _Stream()
    cuda = types.ModuleType("torch.cuda")
    cuda.__dict__.update(vars(torch.cuda))
    cuda.__dict__.update(
        Stream=_Stream,
        current_stream=lambda *_: stream,
        default_stream=lambda *_: stream,
        stream=lambda *_: contextlib.nullcontext(),
        current_device=lambda: cpu,
        synchronize=lambda *_: None,
        empty_cache=lambda: None,
        set_device=lambda *_: None,
        get_rng_state=lambda *_: torch.get_rng_state(),
        set_rng_state=lambda state, *_: torch.set_rng_state(state),
        manual_seed=torch.manual_seed,
    )
    return cuda


def _allocate_on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def allocate(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return allocate


def _patch_random_state() -> None:
    """Megatron's tracker of random states works on the one generator that the CPU has."""
    from megatron.core.tensor_parallel import random as megatron_random

    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _patch_experts() -> None:
    """Routing looks for Transformer Engine's matrix product, which is no name without it, and copies counts to the host."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def as_on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)
    token_dispatcher.maybe_move_tensor_to_cpu = as_on_host


def _patch_tensor_methods() -> None:
    if hasattr(torch.Tensor.type, "__wrapped__"):
        return
    original = torch.Tensor.type

    @functools.wraps(original)
    def named_like_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        return result if args or kwargs else result.replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = named_like_cuda  # type: ignore[method-assign]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
