"""What a learner is to the rank process that holds it. Importing this module imports no torch.

A learner owns one model, its optimizer and its random state. Every method is collective: all ranks of a trainer call
the same methods in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trainers.batch import Columns, StepPlan

if TYPE_CHECKING:
    import socket

    import numpy as np
    import torch


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did. All ranks of a trainer return the same figures, except `seconds`.

    `metrics` has the names of the metrics file (`clip_frac/low`, `entropy`, `is/ess`, `mismatch/kl`, ...), already
    averaged over the tokens of the step; a name is missing when there was no token to measure it on. `skipped` is the
    reason why at least one optimizer step was not taken, else None; `optimizer_steps` counts those that were.
    """

    step: int
    loss: float
    grad_norm: float  # before clipping; of the last optimizer step
    lr: float
    metrics: Mapping[str, float]
    tokens: int  # response tokens whose loss was computed, over all data-parallel ranks
    packed_tokens: int  # tokens fed to the model for them, prompts included
    optimizer_steps: int
    seconds: Mapping[str, float] = field(
        default_factory=dict
    )  # by phase: pack, proximal, reference, train, optimizer, export
    skipped: str | None = None


@dataclass(frozen=True, slots=True)
class RankValues:
    """What one rank says of each response token: a critic its value, a policy its log-prob.

    `rows[row]` is float32 [T], 0 for samples that other data-parallel ranks have.
    """

    data_parallel_rank: int
    rows: list[np.ndarray]


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks of one trainer meet. `address` is `host:port` of the store that rank 0 opens.

    `listener`, of rank 0, has held that port since it was found free: importing what a rank needs takes seconds, in which
    any process of the node could be given it.
    """

    rank: int
    world_size: int
    address: str
    timeout: float  # seconds, for the meeting and for every collective after it
    listener: socket.socket | None = None


class Learner(Protocol):
    """One process of a model under training."""

    def start(self) -> None:
        """Load the start weights, and join the other ranks within the deadline of the rendezvous."""

    def train_step(self, plan: StepPlan, rollouts: Sequence[Columns]) -> StepResult:
        """`rollouts[row]` has the columns of stage `rollout` of every row of the step, in the order of the plan."""

    def log_probs(self, plan: StepPlan, rollouts: Sequence[Columns]) -> RankValues:
        """Of the present weights, for every sample that the plan computes; changes nothing."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The current policy by Hugging Face name, each name once. Every rank walks it to its end."""

    def stage(self) -> Callable[[Path], None]:
        """Copy the state from which `restore` continues bit by bit to CPU memory.

        What is returned writes the copy below a folder, at any time and in any thread, and is not collective: with those
        of all ranks the folder is complete. It raises OSError or CheckpointError.
        """

    def restore(self, folder: Path) -> None:
        """Continue from a checkpoint. Raises CheckpointError when the folder is broken or of another model."""

    def export_huggingface(self, folder: Path) -> None:
        """Write the current policy as a folder that `transformers` and vLLM load."""

    def offload(self) -> None:
        """Give device memory back: weights and optimizer state go to CPU memory, where there is a device."""

    def onload(self) -> None:
        """Undo `offload`."""

    def close(self) -> None:
        """Leave the process group."""


class ValueLearner(Learner, Protocol):
    """A learner whose model gives values. Its weights are a model of their own kind, and are never published."""

    def values(self, plan: StepPlan, rollouts: Sequence[Columns]) -> RankValues:
        """Of the present weights, for every sample that the plan computes."""
