"""What a trainer is given: its collaborators as protocols, and its settings that are not in its own config section.

Whoever builds a trainer implements these: with actors in a cluster, with plain objects in one process.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from buffer.evaluation import EvaluationResult
from buffer.records import Prompt, SampledRow
from buffer.snapshot import Cut
from trainers.batch import Columns, StepRows
from trainers.learner import StepResult


class RowSource(Protocol):
    """The buffer as a trainer sees it."""

    async def sample(self, groups: int, timeout: float) -> list[SampledRow]:
        """Rows that it gave before are the trainer's no longer. Raises EndOfData, TimeoutError, or what ended the run."""
        ...

    async def fetch(self, reference: Any) -> Columns:
        """Raises ColumnsLost."""
        ...

    async def trained(self, row_ids: Sequence[int], step: int) -> None: ...

    async def dropped(self, row_ids: Sequence[int], reason: str) -> None: ...

    async def lost(self, row_id: int, stages: Sequence[str], cause: str) -> None:
        """The columns of these stages of a sampled row cannot be fetched. It waits for `sample` again when it is made anew."""
        ...

    async def published(self, version: int, step: int) -> None:
        """The weights after `step` are `version`."""
        ...

    async def evaluate(
        self, prompts: Sequence[Prompt], *, samples: int, min_version: int, seed: int, timeout: float
    ) -> EvaluationResult: ...

    async def status(self) -> Mapping[str, Any]: ...

    async def cut(self) -> Cut:
        """For a checkpoint: everything in flight as it is now. Its columns can be fetched for as long as it is held."""
        ...


class Publisher(Protocol):
    """The weight store as a trainer sees it. `publish` returns when the copy of the weights is made."""

    async def publish(self, version: int) -> Any: ...


class NumberOnly:
    """A `Publisher` where nobody pulls weights: a version counts the steps for admission, and costs nothing."""

    async def publish(self, version: int) -> None:
        return


class ValueModel(Protocol):
    """The critic as a policy's trainer sees it. `references` are those of the rollout columns, one for each row."""

    async def values(self, rows: StepRows, references: Sequence[Any]) -> list[np.ndarray]:
        """Float32 [T] for each row, of the present weights; 0 for masked samples."""
        ...

    async def train(
        self, rows: StepRows, labels: Mapping[str, tuple[np.ndarray, ...]], references: Sequence[Any]
    ) -> StepResult:
        """`labels` are `returns` and `values`. `skipped` of the result says which optimizer steps were not taken."""
        ...

    async def stage(self) -> None:
        """Copy the state to CPU memory, for a checkpoint."""
        ...

    async def write(self, folder: str) -> None:
        """Write that copy below a folder; it may train meanwhile. Raises OSError or CheckpointError."""
        ...


MakerStatuses = Callable[[], Awaitable[Mapping[str, Mapping[str, Any]]]]  # by maker name; the last known will do


@dataclass(frozen=True)
class Evaluation:
    """Held-out prompts and when to score them. `every` in steps; None: only at the start and the end."""

    prompts: Sequence[Prompt]
    samples: int
    every: int | None
    at_start: bool
    at_end: bool
    timeout: float
    seed: int = 0
    rows: Sequence[Columns] = ()  # of a dataset: their loss is asked of the ranks, and the makers have nothing to do


@dataclass(frozen=True)
class Schedule:
    """`publish_every` and `checkpoint_every` in steps; `checkpoint_every` None: only at the end."""

    publish_every: int
    checkpoint_every: int | None
    checkpoint_at_end: bool


@dataclass(frozen=True)
class Deadlines:
    """Seconds. `batch`: for complete rows. `step`: for ranks, publications and checkpoints. `call`: for the rest."""

    batch: float
    step: float
    call: float = 60.0
