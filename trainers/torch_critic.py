"""The reference learner of a critic: a Hugging Face model with a value head. Slow and obvious on purpose.

As with Megatron, the body starts from the policy's folder and the head at zero.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainers.stepping import Valuing
from trainers.torch_learner import TorchLearner, TorchPolicy


class ValueModel(torch.nn.Module):
    """`model`: a Hugging Face body; `score`: the head."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.model = body
        self.score = torch.nn.Linear(body.config.hidden_size, 1, bias=False, dtype=body.dtype)
        torch.nn.init.zeros_(self.score.weight)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids [tokens] in, float32 values [tokens] out."""
        hidden = self.model(input_ids=ids[None]).last_hidden_state[0]
        return torch.nn.functional.linear(hidden.float(), self.score.weight.float())[:, 0]


class TorchValues(TorchPolicy):
    """Implements `trainers.step.Policy` with values where a policy has log-probs."""

    def _load(self, folder: Path) -> Any:
        return ValueModel(super()._load(folder).model).to(self.device)

    def _outputs(self, ids: Tensor, rows: Tensor, targets: Tensor, temperatures: Tensor) -> Tensor:
        values = self.model(ids)[rows]
        return torch.stack([values, torch.zeros_like(values)])


class TorchCritic(Valuing, TorchLearner):
    """Implements `trainers.learner.ValueLearner` in one process."""

    def _load(self) -> TorchPolicy:
        return TorchValues(self._config, self._model_path)
