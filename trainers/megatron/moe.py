"""Mixture-of-experts models on Megatron's plain-torch experts.

mbridge knows the experts under the names that Transformer Engine's grouped layer gives them
(`experts.linear_fc1.weight3`); Megatron's sequential experts, which need no Transformer Engine, are modules of their own
(`experts.local_experts.3.linear_fc1.weight`). The bridge here shows mbridge such a model under the names it knows, so
that its loading and exporting over expert-parallel ranks works as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from mbridge.core.util import unwrap_model
from mbridge.models.qwen3moe import Qwen3MoEBridge
from torch import Tensor

_EXPERT = re.compile(r"\.local_experts\.(\d+)\.(linear_fc[12])\.weight")


class SequentialExpertsBridge(Qwen3MoEBridge):
    """Qwen3's experts, one after another instead of in one grouped matrix product."""

    def _build_config(self) -> Any:
        # No load-balancing loss: it belongs to pretraining, and pulls a policy away from what its rewards say. The
        # router follows the Hugging Face model, dtype included, as the rollout engine's does.
        self.extra_args |= {
            "moe_grouped_gemm": False,
            "moe_aux_loss_coeff": 0.0,
            "moe_router_pre_softmax": not self.hf_config.norm_topk_prob,
            "moe_router_bias_update_rate": 0.0,
        }
        return super()._build_config()

    def load_weights(self, models: list[Any], weights_path: str, memory_efficient: bool = False) -> None:
        super().load_weights([_grouped(model) for model in models], weights_path, memory_efficient)

    def export_weights(self, models: list[Any]) -> Iterator[tuple[str, Tensor]]:
        return super().export_weights([_grouped(model) for model in models])  # type: ignore[no-any-return]

    def _weight_name_mapping_mcore_local_to_global(self, model: Any, consider_ep: bool = True) -> dict[str, str]:
        return super()._weight_name_mapping_mcore_local_to_global(_grouped(model), consider_ep)  # type: ignore[no-any-return]


class _GroupedNames:
    """A model under the names of grouped experts, as far as mbridge looks at a model."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.decoder = model.decoder

    def state_dict(self) -> dict[str, Tensor]:
        return {_grouped_name(name): tensor for name, tensor in self._model.state_dict().items()}

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for name, parameter in self._model.named_parameters():
            yield _grouped_name(name), parameter


def _grouped(model: Any) -> Any:
    return model if isinstance(model, _GroupedNames) else _GroupedNames(unwrap_model(model))


def _grouped_name(name: str) -> str:
    return _EXPERT.sub(r".\2.weight\1", name)


def set_experts_apart(model: torch.nn.Module) -> None:
    """Give experts gradient buffers and an optimizer of their own even where every rank has all of them, as Megatron does
    where ranks share them out: a checkpoint then has one form for every layout of the ranks."""
    for name, parameter in model.named_parameters():
        if _EXPERT.search(name):
            parameter.allreduce = False
