"""The reference learner: a Hugging Face model, one sample at a time, plain AdamW. Slow and obvious on purpose.

Same protocol as the Megatron learner, which must match it in loss, gradients and weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainers.checkpoints import CheckpointError
from trainers.config import CriticConfig, Optimizer, TorchBackend, TrainerConfig
from trainers.distillation.columns import TARGET
from trainers.distillation.divergence import Buckets, Divergence, dense_full, dense_top_k, divergence_of
from trainers.huggingface import save_huggingface
from trainers.packing import PackedBatch
from trainers.snapshots import Snapshot, substituted, take
from trainers.state_files import StateFile, copied, random_state, seed_generators, set_random_state, write_state
from trainers.step import LossFunction
from trainers.stepping import SteppingLearner

STATE_FILE = "learner.safetensors"


class TorchLearner(SteppingLearner):
    """Implements `trainers.learner.Learner` in one process."""

    policy: TorchPolicy

    def start(self) -> None:
        seed_generators(self._seed)
        self._begin()

    def _load(self) -> TorchPolicy:
        return TorchPolicy(self._config, self._model_path)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """A tied output layer is no parameter of its own, so it is not named."""
        yield from self.policy.by_folder_name({n: p.detach() for n, p in self.policy.model.named_parameters()})

    def stage(self) -> Callable[[Path], None]:
        state = copied(self.policy.state())

        def write(folder: Path) -> None:
            folder.mkdir(parents=True, exist_ok=True)
            write_state(folder / STATE_FILE, state)

        return write

    def restore(self, folder: Path) -> None:
        try:
            self.policy.load_state(StateFile(folder / STATE_FILE).read())
        except Exception as error:
            raise CheckpointError(f"{folder} cannot be restored ({type(error).__name__}: {error})") from error

    def export_huggingface(self, folder: Path) -> None:
        save_huggingface(folder, self.weights(), self._model_path, write=True)

    def offload(self) -> None:
        self._move(torch.device("cpu"))

    def onload(self) -> None:
        self._move(self.policy.device)

    def _move(self, device: torch.device) -> None:
        self._stepper.move_snapshots(device)
        self.policy.move(device)

    def close(self) -> None:
        """There is no group to leave."""


class TorchPolicy:
    """Implements `trainers.step.Policy`."""

    share_prompt = False
    data_parallel_rank = 0

    def __init__(self, config: TrainerConfig | CriticConfig, folder: Path) -> None:
        assert isinstance(config.backend, TorchBackend)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._dtype = getattr(torch, config.backend.dtype)
        self._divergence = divergence_of(config)
        self.model = self._load(folder)
        settings = config.teacher if isinstance(config, TrainerConfig) else None
        self._top_k = None if settings is None else settings.top_k
        self._teacher: Any = None if settings is None else pretrained(settings.model, settings.dtype).to(self.device)
        self._optimizer = build_adamw(self.model, config.optimizer)

    def snapshot(self, into: Snapshot | None = None) -> Snapshot:
        return take(self.model, into)

    def log_probs(self, batches: Sequence[PackedBatch], weights: Snapshot | None = None) -> list[Tensor]:
        with torch.no_grad(), substituted(self.model, weights or {}):
            return [self._forward(batch)[0] for batch in batches]

    def accumulate_gradients(
        self, batches: Sequence[PackedBatch], loss: LossFunction, *, entropy_gradient: bool
    ) -> None:
        self._optimizer.zero_grad()
        for number, batch in enumerate(batches):
            log_probs, entropy, *more = self._forward(batch, self._divergence)
            loss(number, torch.stack([log_probs, entropy if entropy_gradient else entropy.detach(), *more])).backward()

    def gradient_norm(self) -> float:
        return float(torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None]))

    def apply_gradients(self, norm: float, max_norm: float, lr: float) -> None:
        torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), max_norm, torch.tensor(norm))
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()

    def reduce(
        self, sums: Mapping[str, Tensor], maxima: Mapping[str, Tensor]
    ) -> tuple[dict[str, float], dict[str, float]]:
        return {k: float(v) for k, v in sums.items()}, {k: float(v) for k, v in maxima.items()}

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The accumulated gradients by Hugging Face name."""
        yield from self.by_folder_name({n: p.grad.clone() for n, p in self.model.named_parameters()})

    def by_folder_name(self, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """From the parameters' names to those of the checkpoint folder: transformers stacks the experts of a layer."""
        from transformers.core_model_loading import revert_weight_conversion

        yield from revert_weight_conversion(self.model, tensors).items()

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "random": random_state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        set_random_state(state["random"])

    def move(self, device: torch.device) -> None:
        """The model without its gradients, and the optimizer's state. Not yet run on a GPU."""
        self._optimizer.zero_grad()
        self.model.to(device)
        for state in self._optimizer.state.values():
            state.update({name: value.to(device) for name, value in state.items() if isinstance(value, Tensor)})
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _load(self, folder: Path) -> Any:
        return pretrained(folder, self._dtype).to(self.device)

    def _forward(self, batch: PackedBatch, divergence: Divergence | None = None) -> Tensor:
        """Figures of each target [k, targets], each segment by itself: its row i predicts token i + 1. See LossFunction."""
        outputs = [torch.zeros(2 if divergence is None else 6, 0, device=self.device)]
        start = 0
        for segment in batch.segments:
            stop = start + segment.tokens
            rows = (batch.logit_rows >= start) & (batch.logit_rows < stop)
            ids = torch.as_tensor(batch.token_ids[start:stop], device=self.device)
            at = torch.as_tensor(batch.logit_rows[rows] - start, device=self.device)
            targets = torch.as_tensor(batch.targets[rows], device=self.device)
            temperatures = torch.as_tensor(batch.temperatures[rows], device=self.device)
            if divergence is None:
                outputs.append(self._outputs(ids, at, targets, temperatures))
            else:
                outputs.append(self._compared(ids, at, targets, temperatures, self._top(batch, rows), divergence))
            start = stop
        return torch.cat(outputs, dim=1)

    def _outputs(self, ids: Tensor, rows: Tensor, targets: Tensor, temperatures: Tensor) -> Tensor:
        """Log-probs and entropies, float32 [2, targets], at the `rows` of one sequence of `ids`."""
        return _figures(self.model(input_ids=ids[None]).logits[0][rows].float(), targets, temperatures)

    def _top(self, batch: PackedBatch, rows: np.ndarray) -> tuple[Tensor, ...] | None:
        """Ids, log-probs and the targets' log-probs of the makers' teacher; None: that of this process is asked."""
        if self._teacher is not None:
            return None
        assert batch.teacher is not None
        arrays = batch.teacher.ids, batch.teacher.log_probs, batch.labels[TARGET]
        return tuple(torch.as_tensor(array[rows], device=self.device) for array in arrays)

    def _compared(
        self,
        ids: Tensor,
        rows: Tensor,
        targets: Tensor,
        temperatures: Tensor,
        top: tuple[Tensor, ...] | None,
        divergence: Divergence,
    ) -> Tensor:
        """As `_outputs`, with what `with_comparison` names [6, targets]."""
        logits = self.model(input_ids=ids[None]).logits[0][rows].float()
        if top is None:
            with torch.no_grad():
                theirs = self._teacher(input_ids=ids[None]).logits[0][rows].float()
            every = (theirs / divergence.temperature).log_softmax(-1)
            of_targets = every.gather(-1, targets[:, None])[:, 0]
            if self._top_k is None:
                value, ones = dense_full(logits, theirs, divergence), torch.ones_like(of_targets)
                comparison = torch.stack([value, -ones, of_targets, ones])
                return torch.cat([_figures(logits, targets, temperatures), comparison])
            best = every.topk(self._top_k, dim=-1)
            top = best.indices, best.values, of_targets
        buckets = Buckets.of(top[0], top[1])
        present = buckets.ids >= 0
        own = logits.detach().topk(present.size(-1)).indices
        found = ((buckets.ids[:, :, None] == own[:, None]).any(-1) & present).sum(-1) / present.sum(-1)
        comparison = torch.stack([dense_top_k(logits, buckets, divergence), found, top[2], 1.0 - buckets.tail])
        return torch.cat([_figures(logits, targets, temperatures), comparison])


def _figures(logits: Tensor, targets: Tensor, temperatures: Tensor) -> Tensor:
    every = (logits / temperatures[:, None]).log_softmax(-1)
    return torch.stack([every.gather(-1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)])


def pretrained(folder: Path | str, dtype: torch.dtype | str) -> Any:
    """The model of a checkpoint folder; a dtype by its name or torch's."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    safe = {"trust_remote_code": False, "use_safetensors": True, "local_files_only": True}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **safe)


def build_adamw(model: torch.nn.Module, settings: Optimizer) -> torch.optim.AdamW:
    """Decoupled weight decay on matrices only."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)
