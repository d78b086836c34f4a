"""One step of training, for every backend: proximal policy, reference, probe, loss, gradient, optimizer, figures.

Guarantees, all asserted by tests:

1. The proximal log-probs are those of the weights at the start of the step, in all its minibatches.
2. An optimizer step is taken only with a finite loss and a finite gradient, and only if the minibatch has a valid token.
   What was not taken is reported with its reason.
3. All ranks decide alike: they decide on figures that were summed over the ranks.
4. Every step measures how far trainer and makers are apart at equal version, unless no remembered version made its rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from trainers.algorithms.base import Algorithm, LossTerms, TokenBatch
from trainers.algorithms.metrics import MetricSums, finish, mismatch
from trainers.batch import Columns, StepPlan
from trainers.config import Optimizer
from trainers.distillation.loss import with_comparison
from trainers.learner import StepResult
from trainers.packing import GroupBatch, PackedBatch, check_rollouts, pack, pack_minibatch
from trainers.probe import PROBE_TOKENS, choose_samples, choose_version, measured_anyway
from trainers.schedule import learning_rate
from trainers.snapshots import Snapshot

# (number of the micro-batch, outputs [k, targets]) -> scalar loss. The outputs: log-probs with gradient, entropies; and where
# there is a teacher the divergence with gradient, and what `with_comparison` names.
LossFunction = Callable[[int, Tensor], Tensor]


class Policy(Protocol):
    """A model with gradients and an optimizer, as a step needs it. Every method is collective."""

    device: torch.device
    share_prompt: bool
    data_parallel_rank: int

    def snapshot(self, into: Snapshot | None = None) -> Snapshot:
        """This rank's copy of the weights as they are now, in the memory of `into` when given."""

    def log_probs(self, batches: Sequence[PackedBatch], weights: Snapshot | None = None) -> list[Tensor]:
        """float32 [targets] for each micro-batch, without gradient; of the present weights, or of a snapshot."""

    def accumulate_gradients(
        self, batches: Sequence[PackedBatch], loss: LossFunction, *, entropy_gradient: bool
    ) -> None:
        """Replace the gradients by those of the sum of `loss` over the micro-batches and the data-parallel ranks."""

    def gradient_norm(self) -> float:
        """Euclidean norm over all ranks."""

    def apply_gradients(self, norm: float, max_norm: float, lr: float) -> None:
        """Scale the gradients by min(1, max_norm / norm) and take one optimizer step."""

    def reduce(
        self, sums: Mapping[str, Tensor], maxima: Mapping[str, Tensor]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Sums and maxima over the data-parallel ranks, equal on every rank. Ranks may name different figures."""


class Stepper:
    """Runs steps on a policy, whose weights are the start weights when this is made.

    `failures_folder` receives the batch of a step in which an optimizer step was skipped. `past_versions` is the number
    of versions whose weights are remembered for the probe. `proximal`: whether a step of several minibatches computes what
    the model gave at its start.
    """

    def __init__(
        self,
        policy: Policy,
        algorithm: Algorithm,
        optimizer: Optimizer,
        *,
        steps: int,
        past_versions: int = 1,
        proximal: bool = True,
        failures_folder: Path | None = None,
    ) -> None:
        self._policy = policy
        self._algorithm = algorithm
        self._optimizer = optimizer
        self._steps = steps
        self._past_versions = past_versions
        self._proximal = proximal
        self._failures_folder = failures_folder
        self._start_weights = policy.snapshot() if algorithm.needs_reference else None
        self._past: dict[int, Snapshot] = {}  # by version, oldest first

    def run(self, plan: StepPlan, rollouts: Sequence[Columns]) -> StepResult:
        return _Step(self, plan, rollouts).run()

    def remember(self, version: int) -> None:
        """Keep the present weights, which are those of `version`, and forget the oldest of too many."""
        if version in self._past or self._past_versions == 0:
            return
        full = len(self._past) == self._past_versions
        self._past[version] = self._policy.snapshot(self._past.pop(next(iter(self._past))) if full else None)

    def move_snapshots(self, device: torch.device) -> None:
        """The remembered weights, all of them, to the memory of a device."""
        for snapshot in (self._start_weights or {}, *self._past.values()):
            snapshot.update({name: tensor.to(device) for name, tensor in snapshot.items()})


class _Step:
    """The state of one step while it runs."""

    def __init__(self, stepper: Stepper, plan: StepPlan, rollouts: Sequence[Columns]) -> None:
        self.stepper = stepper
        self.policy = stepper._policy
        self.algorithm = stepper._algorithm
        self.optimizer = stepper._optimizer
        self.failures_folder = stepper._failures_folder
        self.plan, self.rollouts = plan, rollouts
        self.lr = learning_rate(stepper._optimizer, plan.step, stepper._steps)
        self.figures = MetricSums()
        self.seconds: dict[str, float] = {}
        self.skipped: list[str] = []
        self.taken = 0
        self.norm = math.nan

    def run(self) -> StepResult:
        with self._clock("pack"):
            groups = check_rollouts(self.plan, self.rollouts)
            minibatches = [
                pack_minibatch(
                    groups, self.plan, i, self.policy.data_parallel_rank, share_prompt=self.policy.share_prompt
                )
                for i in range(len(self.plan.minibatches))
            ]
        several = self.stepper._proximal and len(minibatches) > 1
        proximal = self._fixed_log_probs("proximal", minibatches, None, wanted=several)
        reference = self._fixed_log_probs(
            "reference", minibatches, self.stepper._start_weights, wanted=self.algorithm.needs_reference
        )
        with self._clock("probe"):
            self._probe(groups)
        for index, batches in enumerate(minibatches):
            self._minibatch(index, batches, proximal[index], reference[index])
        return self._result(minibatches)

    def _fixed_log_probs(
        self, phase: str, minibatches: list[list[PackedBatch]], weights: Snapshot | None, *, wanted: bool
    ) -> list[list[Tensor] | None]:
        if not wanted:
            return [None] * len(minibatches)
        with self._clock(phase):
            return [self.policy.log_probs(batches, weights) for batches in minibatches]

    def _probe(self, groups: list[GroupBatch]) -> None:
        """Compare with the makers at equal version, and remember the present weights if they are a version."""
        past = self.stepper._past
        version = None if measured_anyway(groups, self.plan) else choose_version(groups, past)
        if version is not None:
            ranks = len(self.plan.minibatches[0].ranks)
            parts = choose_samples(groups, version, self.policy.data_parallel_rank, ranks, PROBE_TOKENS)
            packed = pack(groups, parts, self.plan.minibatches[0].totals, share_prompt=self.policy.share_prompt)
            [log_probs] = self.policy.log_probs([packed], past[version])
            figures = MetricSums()
            self._compare(figures, log_probs, packed, version)
            self._add(figures)
        if self.plan.version is not None:
            self.stepper.remember(self.plan.version)

    def _compare(self, figures: MetricSums, log_probs: Tensor, packed: PackedBatch, version: int) -> None:
        at_version = torch.as_tensor(packed.versions == version, device=self.policy.device)
        figures.add(*mismatch(log_probs, torch.as_tensor(packed.behaviour, device=self.policy.device), at_version))

    def _add(self, figures: MetricSums) -> dict[str, float]:
        """Add figures of this rank to those of the step. Returns their sums over the ranks."""
        sums, maxima = self.policy.reduce(figures.sums, figures.maxima)
        self.figures.add({k: torch.tensor(v) for k, v in sums.items()}, {k: torch.tensor(v) for k, v in maxima.items()})
        return sums

    def _minibatch(
        self, index: int, batches: list[PackedBatch], proximal: list[Tensor] | None, reference: list[Tensor] | None
    ) -> None:
        if self.plan.minibatches[index].totals.tokens == 0:
            self.skipped.append(f"minibatch {index}: no valid token")
            return
        figures = MetricSums()

        def loss(number: int, outputs: Tensor) -> Tensor:
            batch = self._tokens(
                batches[number],
                outputs,
                outputs[0].detach() if proximal is None else proximal[number],
                None if reference is None else reference[number],
            )
            terms = self.algorithm(batch)
            self._record(figures, terms, batches[number])
            if self.plan.version is not None and (index == 0 or proximal is not None):  # else of no version any more
                self._compare(figures, batch.proximal, batches[number], self.plan.version)
            return terms.loss

        with self._clock("train"):
            self.policy.accumulate_gradients(batches, loss, entropy_gradient=self.algorithm.entropy_gradient)
        with self._clock("optimizer"):
            self._optimizer_step(index, figures)

    def _tokens(self, packed: PackedBatch, outputs: Tensor, proximal: Tensor, reference: Tensor | None) -> TokenBatch:
        def on_device(array: np.ndarray) -> Tensor:
            return torch.as_tensor(array, device=self.policy.device)

        return TokenBatch(
            current=outputs[0],
            proximal=proximal,
            behaviour=on_device(packed.behaviour),
            reference=reference,
            entropy=outputs[1],
            advantages=on_device(packed.advantages),
            samples=on_device(packed.samples),
            lengths=on_device(packed.lengths),
            totals=packed.totals,
            labels=with_comparison({name: on_device(values) for name, values in packed.labels.items()}, outputs[2:]),
        )

    def _record(self, figures: MetricSums, terms: LossTerms, packed: PackedBatch) -> None:
        figures.add({"tokens": torch.tensor(packed.targets.size)}, {})
        figures.add_terms(terms)

    def _optimizer_step(self, index: int, figures: MetricSums) -> None:
        sums = self._add(figures)
        self.norm = self.policy.gradient_norm()
        for name, value in (("loss", sums.get("loss", 0.0)), ("gradient norm", self.norm)):
            if not math.isfinite(value):
                self.skipped.append(f"minibatch {index}: {name} is {value}")
                return
        self.policy.apply_gradients(self.norm, self.optimizer.max_grad_norm, self.lr)
        self.taken += 1

    def _result(self, minibatches: list[list[PackedBatch]]) -> StepResult:
        packed = sum(batch.token_ids.size for batches in minibatches for batch in batches)
        reduced, _ = self.policy.reduce({"packed": torch.tensor(float(packed))}, {})
        if self.skipped and self.failures_folder is not None:
            save_batch(self.failures_folder / f"step-{self.plan.step:06d}.npz", self.plan, self.rollouts)
        sums = {name: float(value) for name, value in self.figures.sums.items()}
        maxima = {name: float(value) for name, value in self.figures.maxima.items()}
        return StepResult(
            step=self.plan.step,
            loss=sums.get("loss", 0.0) / max(len(minibatches), 1),
            grad_norm=self.norm,
            lr=self.lr,
            metrics={
                name: value / len(minibatches) if name.startswith("loss/") else value
                for name, value in finish(sums, maxima).items()
            },
            tokens=int(sums.get("tokens", 0)),
            packed_tokens=int(reduced["packed"]),
            optimizer_steps=self.taken,
            seconds=self.seconds,
            skipped="; ".join(self.skipped) or None,
        )

    @contextmanager
    def _clock(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


def save_batch(file: Path, plan: StepPlan, rollouts: Sequence[Columns]) -> None:
    """Everything a step was computed from, for looking at it later: `ROW/COLUMN`, `ROW/advantages`, `ROW/LABEL`."""
    arrays = {f"{row}/{name}": values for row, columns in enumerate(rollouts) for name, values in columns.items()}
    arrays |= {f"{row}/advantages": values for row, values in enumerate(plan.advantages)}
    arrays |= {f"{row}/{name}": values for name, rows in plan.labels.items() for row, values in enumerate(rows)}
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez(file, **arrays)
