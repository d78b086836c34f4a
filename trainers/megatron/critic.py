"""The Megatron-core learner of a critic: the policy's model with a value head in place of its output layer.

The body starts from the policy's folder, the head at zero: every value is 0 at first, on any layout of ranks, so the first
advantages are the plain rewards to come.

The head is one row of weights that every tensor-parallel rank holds and computes alike, behind the gathering of the hidden
states, so its gradient needs no reduction over them. It lives on the last pipeline stage. Not yet run on a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from mbridge.core.bridge import Bridge
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from trainers.megatron.attention import PackedLayout
from trainers.megatron.learner import MegatronLearner, MegatronPolicy
from trainers.megatron.model import PolicyModel, build_model, load_weights
from trainers.stepping import Valuing

HEAD, HEAD_NAME = "value_head", "score.weight"  # the latter as in transformers' models for sequence classification


class ValueHead(torch.nn.Module):
    """Hidden states [targets, hidden] in, float32 values [targets] out."""

    def __init__(self, hidden: int, device: torch.device) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden, device=device))

    def forward(self, rows: Tensor) -> Tensor:
        return torch.nn.functional.linear(rows.float(), self.weight.float())[:, 0]


class ValueModel(PolicyModel):
    """Packed tokens in; of each target the value of the state before it, and a zero in place of the entropy."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings | {"share_embeddings_and_output_weights": False})
        if self.post_process:
            del self.output_layer
            self.value_head = ValueHead(self.config.hidden_size, next(self.parameters()).device)

    def _outputs(self, rows: Tensor, layout: PackedLayout) -> Tensor:
        values = self.value_head(rows)
        return torch.stack([values, torch.zeros_like(values)])

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module: a language model's own method wants its output layer there."""
        return MegatronModule.sharded_state_dict(self, *args, **kwargs)


def load_body(bridge: Bridge, model: PolicyModel, folder: Path) -> None:
    """All weights of a policy's folder but those of its output layer. The head stays as it is."""
    head = model._modules.pop(HEAD, None)
    try:
        load_weights(bridge, model, folder, unused={"lm_head.weight"})
    finally:
        if head is not None:
            model.add_module(HEAD, head)


class MegatronValues(MegatronPolicy):
    """Implements `trainers.step.Policy` with values where a policy has log-probs."""

    def _build(self, folder: Path) -> PolicyModel:
        self.bridge._DIRECT_MAPPING[f"{HEAD}.weight"] = HEAD_NAME
        model = build_model(self.bridge, ValueModel)
        load_body(self.bridge, model, folder)
        return model


class MegatronCritic(Valuing, MegatronLearner):
    """Implements `trainers.learner.ValueLearner`."""

    def _load(self) -> MegatronPolicy:
        return MegatronValues(self._config, self._model_path, self._hf_config)
