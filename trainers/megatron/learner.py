"""The Megatron-core learner: one rank of a policy under training.

Guarantees, all asserted by tests: loss and gradients equal those of plain torch (`trainers/torch_learner.py`) whatever
the layout of the micro-batches, and a restored checkpoint continues bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from trainers.config import CriticConfig, MegatronBackend, TrainerConfig
from trainers.distillation.columns import TARGET
from trainers.distillation.divergence import Buckets, divergence_of
from trainers.huggingface import save_huggingface
from trainers.learner import Rendezvous
from trainers.megatron import checkpoint, cpu, offload, optimizer
from trainers.megatron.attention import PackedLayout
from trainers.megatron.layout import place
from trainers.megatron.model import (
    PolicyModel,
    build_bridge,
    build_model,
    check_layout,
    export_weights,
    load_weights,
    read_config,
)
from trainers.megatron.process_group import from_last_stage, join, leave, reduce_over_data_parallel_ranks
from trainers.megatron.teacher import MegatronTeacher
from trainers.megatron.vocab_divergence import Distillation, TopK
from trainers.packing import PackedBatch
from trainers.snapshots import Snapshot, substituted, take
from trainers.step import LossFunction
from trainers.stepping import SteppingLearner


class MegatronLearner(SteppingLearner):
    """Implements `trainers.learner.Learner`."""

    policy: MegatronPolicy

    def __init__(
        self,
        config: TrainerConfig | CriticConfig,
        model_path: Path,
        rendezvous: Rendezvous,
        *,
        failures_folder: Path | None = None,
        **settings: Any,
    ) -> None:
        assert isinstance(config.backend, MegatronBackend)
        # All ranks have the same batch: one keeps it.
        super().__init__(
            config, model_path, failures_folder=failures_folder if rendezvous.rank == 0 else None, **settings
        )
        self._rendezvous = rendezvous
        self._hf_config = read_config(model_path)
        check_layout(config.backend, self._hf_config)

    def start(self) -> None:
        backend = self._config.backend
        if not torch.cuda.is_available():
            cpu.install()
        optimizer.install_checkpoint_fixes()
        join(self._rendezvous, backend, self._seed)
        try:
            self._begin()
        except BaseException:
            leave()
            raise

    def _load(self) -> MegatronPolicy:
        return MegatronPolicy(self._config, self._model_path, self._hf_config)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return export_weights(self.policy.bridge, self.policy.model)

    def stage(self) -> Callable[[Path], None]:
        return checkpoint.stage(self.policy.module, self.policy.optimizer, self._hf_config)

    def restore(self, folder: Path) -> None:
        checkpoint.restore(folder, self.policy.module, self.policy.optimizer, self._hf_config)

    def export_huggingface(self, folder: Path) -> None:
        save_huggingface(folder, self.weights(), self._model_path, write=self._rendezvous.rank == 0)

    def offload(self) -> None:
        offload.offload(self.policy.model, self.policy.optimizer)
        self._stepper.move_snapshots(torch.device("cpu"))

    def onload(self) -> None:
        offload.onload(self.policy.model, self.policy.optimizer)
        self._stepper.move_snapshots(self.policy.device)

    def close(self) -> None:
        leave()


class MegatronPolicy:
    """Implements `trainers.step.Policy`: the model in DDP with its optimizer, and Megatron's schedule over micro-batches."""

    def __init__(self, config: TrainerConfig | CriticConfig, folder: Path, hf_config: Any) -> None:
        backend = config.backend
        assert isinstance(backend, MegatronBackend)
        dtype = getattr(torch, backend.dtype)
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        )
        self.share_prompt = backend.share_prompt
        self._divergence = divergence_of(config)
        self.data_parallel_rank = parallel_state.get_data_parallel_rank()
        self.bridge = build_bridge(
            hf_config, dtype, recompute=backend.recompute, sequence_parallel=backend.sequence_parallel
        )
        self.module = self._build(folder)
        self.model = optimizer.wrap(self.module, distributed_optimizer=backend.distributed_optimizer)
        self.optimizer = optimizer.build_optimizer(
            config.optimizer, self.model, dtype, distributed_optimizer=backend.distributed_optimizer
        )
        settings = config.teacher if isinstance(config, TrainerConfig) else None
        self._teacher = None if settings is None else MegatronTeacher(settings, backend, self.device)
        self.module.config.finalize_model_grads_func = _sum_gradients
        self._forward_backward = get_forward_backward_func()

    def _build(self, folder: Path) -> PolicyModel:
        model = build_model(self.bridge)
        load_weights(self.bridge, model, folder)
        return model

    def snapshot(self, into: Snapshot | None = None) -> Snapshot:
        return take(self.module, into)

    def log_probs(self, batches: Sequence[PackedBatch], weights: Snapshot | None = None) -> list[Tensor]:
        results: list[Tensor] = []

        def collect(output: Tensor, non_loss_data: bool = False) -> Tensor:
            results.append(output[0])
            return output[0]

        with torch.no_grad(), substituted(self.module, weights or {}):
            self._run(batches, lambda _: collect, forward_only=True)
        return from_last_stage(results, [batch.targets.size for batch in batches], self.device)

    def accumulate_gradients(
        self, batches: Sequence[PackedBatch], loss: LossFunction, *, entropy_gradient: bool
    ) -> None:
        def loss_of(number: int) -> Any:
            def compute(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
                return loss(number, output), torch.tensor(1, dtype=torch.int), {}

            return compute

        self.module.entropy_gradient = entropy_gradient
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        with nullcontext() if self._teacher is None else self._teacher.serving(batches) as hidden:
            self._run(batches, loss_of, forward_only=False, hidden=hidden)

    def gradient_norm(self) -> float:
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())

    def apply_gradients(self, norm: float, max_norm: float, lr: float) -> None:
        optimizer.apply(self.optimizer, norm, max_norm, lr)

    def reduce(
        self, sums: Mapping[str, Tensor], maxima: Mapping[str, Tensor]
    ) -> tuple[dict[str, float], dict[str, float]]:
        return reduce_over_data_parallel_ranks(sums, maxima)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The accumulated float32 gradients by Hugging Face name, for tests and debugging."""
        optimizer.gather_gradients(self.model)
        gradients = {name: parameter.main_grad for name, parameter in self.module.named_parameters()}
        with substituted(self.module, gradients):
            for name, tensor in export_weights(self.bridge, self.model):
                yield name, tensor.clone()

    def _run(self, batches: Sequence[PackedBatch], loss_of: Any, *, forward_only: bool, hidden: Any = ()) -> None:
        """`hidden`: of a colocated teacher, see `MegatronTeacher.serving`."""

        def forward_step(numbers: Iterator[int], model: Any) -> tuple[Tensor, Any]:
            number = next(numbers)
            tokens, layout = place(batches[number], self.module.config, self.bridge.hf_config.rope_theta, self.device)
            if not forward_only:
                layout.distillation = self._distillation(number, batches[number], layout, hidden)
            output = model(input_ids=tokens, position_ids=None, attention_mask=None, packed_seq_params=layout)
            return output, loss_of(number)

        self._forward_backward(
            forward_step_func=forward_step,
            data_iterator=iter(range(len(batches))),
            model=[self.model],
            num_microbatches=len(batches),
            seq_length=1,  # both are ignored: every micro-batch has a length of its own
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _distillation(self, number: int, batch: PackedBatch, layout: PackedLayout, hidden: Any) -> Distillation | None:
        """What the policy is compared with where its logits are: on the last pipeline stage."""
        if self._divergence is None or not parallel_state.is_pipeline_last_stage():
            return None
        if self._teacher is not None:
            return self._teacher.distillation(hidden[number], layout, self._divergence)
        assert batch.teacher is not None
        arrays = batch.teacher.ids, batch.teacher.log_probs, batch.labels[TARGET]
        ids, top, targets = (torch.as_tensor(array, device=self.device)[layout.own] for array in arrays)
        return Distillation(TopK(Buckets.of(ids, top), targets), self._divergence)


def _sum_gradients(models: list[Any], num_tokens: Any = None, **kwargs: Any) -> None:
    """The loss is already divided by the global totals: gradients are summed over ranks, never scaled."""
    finalize_model_grads(models, None, **kwargs)
