"""A frozen teacher beside the policy on its ranks, with the same parallelism.

What leaves the model is the hidden state of each target, on the last pipeline stage; its logits exist there chunk by chunk,
while the policy's are compared with them. With `offload` its layers are in CPU memory while the policy works, and so is its
output layer between steps (moving is not yet run on a GPU).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from trainers.config import ColocatedTeacher, MegatronBackend
from trainers.distillation.divergence import Divergence
from trainers.megatron.attention import PackedLayout
from trainers.megatron.layout import place
from trainers.megatron.model import PolicyModel, build_bridge, build_model, check_layout, load_weights, read_config
from trainers.megatron.vocab_divergence import Distillation, WholeVocabulary, top_of
from trainers.packing import PackedBatch


class TeacherModel(PolicyModel):
    """Packed tokens in, on the last pipeline stage the hidden states [own targets, hidden] that predict them out."""

    def _postprocess(self, hidden_states: Tensor, *_: Any, packed_seq_params: PackedLayout, **__: Any) -> Tensor:
        return self._target_rows(hidden_states, packed_seq_params) if self.post_process else hidden_states


class MegatronTeacher:
    """Raises ValueError when the model cannot be split as the policy is."""

    def __init__(self, settings: ColocatedTeacher, backend: MegatronBackend, device: torch.device) -> None:
        folder = Path(settings.model)
        self._settings, self._device = settings, device
        self._hf_config = read_config(folder)
        check_layout(backend, self._hf_config)
        bridge = build_bridge(
            self._hf_config,
            getattr(torch, settings.dtype),
            recompute=False,
            sequence_parallel=backend.sequence_parallel,
        )
        self._module = build_model(bridge, TeacherModel)
        load_weights(bridge, self._module, folder)
        self._module.requires_grad_(False)
        self._forward = get_forward_backward_func()
        self._move("cpu")

    @contextmanager
    def serving(self, batches: Sequence[PackedBatch]) -> Iterator[list[Tensor]]:
        """The hidden states of each micro-batch, on the last pipeline stage, while `distillation` may be asked for."""
        self._move(self._device)
        found = self._hidden(batches)
        self._move("cpu", keep=self._output_weight() if found else None)
        try:
            yield found
        finally:
            self._move("cpu")

    def distillation(self, hidden: Tensor, layout: PackedLayout, divergence: Divergence) -> Distillation:
        """What the targets of a micro-batch are compared with, from its hidden states."""
        weight = self._output_weight()
        shard = self._module._vocab_shard(weight.size(0))
        if self._settings.top_k is None:
            return Distillation(WholeVocabulary(hidden, weight), divergence)
        assert layout.targets is not None
        top = top_of(hidden, weight, layout.targets, shard, self._settings.top_k, divergence.temperature)
        return Distillation(top, divergence)

    def _hidden(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        results: list[Tensor] = []

        def collect(output: Tensor, non_loss_data: bool = False) -> Tensor:
            results.append(output)
            return output

        def forward_step(numbers: Iterator[int], model: Any) -> tuple[Tensor, Any]:
            batch = batches[next(numbers)]
            tokens, layout = place(batch, self._module.config, self._hf_config.rope_theta, self._device)
            output = model(input_ids=tokens, position_ids=None, attention_mask=None, packed_seq_params=layout)
            return output, collect

        with torch.no_grad():
            self._forward(
                forward_step_func=forward_step,
                data_iterator=iter(range(len(batches))),
                model=[self._module],
                num_microbatches=len(batches),
                seq_length=1,  # both are ignored, as for the policy
                micro_batch_size=1,
                forward_only=True,
                collect_non_loss_data=True,
            )
        return results

    def _output_weight(self) -> Tensor:
        if self._module.share_embeddings_and_output_weights:
            return self._module.shared_embedding_or_output_weight()  # type: ignore[no-any-return]
        return self._module.output_layer.weight  # type: ignore[no-any-return]

    def _move(self, device: torch.device | str, keep: Tensor | None = None) -> None:
        if not self._settings.offload or self._device.type == "cpu":
            return
        for parameter in self._module.parameters():
            if parameter is not keep:
                parameter.data = parameter.data.to(device)
