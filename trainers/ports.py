"""What a trainer is given: its collaborators as protocols, and its settings that are not in its own config section.

Whoever builds a trainer implements these: with actors in a cluster, with plain objects in one process.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from buffer.evaluation import EvaluationResult
from buffer.records import Prompt, SampledRow
from trainers.batch import Columns


class RowSource(Protocol):
    """The buffer as a trainer sees it."""

    async def sample(self, groups: int, timeout: float) -> list[SampledRow]:
        """Raises EndOfData, TimeoutError, or what ended the run."""
        ...

    async def fetch(self, reference: Any) -> Columns: ...

    async def trained(self, row_ids: Sequence[int], step: int) -> None: ...

    async def dropped(self, row_ids: Sequence[int], reason: str) -> None: ...

    async def published(self, version: int) -> None: ...

    async def evaluate(
        self, prompts: Sequence[Prompt], *, samples: int, min_version: int, seed: int, timeout: float
    ) -> EvaluationResult: ...

    async def status(self) -> Mapping[str, Any]: ...

    async def cursor(self) -> int:
        """Where the prompts go on after a resume."""
        ...


class Publisher(Protocol):
    """The weight store as a trainer sees it. `publish` returns when the copy of the weights is made."""

    async def publish(self, version: int) -> Any: ...


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
