"""What crosses the experience channel besides the columns themselves: small, picklable, free of ray, torch and numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from buffer.config import Route

Messages = list[dict[str, str]]


class DataFailure(Exception):
    """This row cannot be made (prompt too long, reward function raised). Another maker would fail on it too."""


class InfraFailure(Exception):
    """This maker cannot make rows now (engine broken, weights out of reach). Another maker may succeed."""


class ColumnsLost(Exception):
    """Columns that were made cannot be had any more: their node, or who owned them, is gone. `stages`: whose they were."""

    def __init__(self, text: str, stages: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.stages = tuple(stages)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as its source gives it.

    `content` is text, or chat messages (`[{"role": ..., "content": ...}, ...]`).
    `fields` holds every other column of the source (answer, metadata, ...); reward functions receive them.
    """

    id: str
    content: str | Messages
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Lease:
    """The right, and the duty, of one maker to fill one stage of one row until `timeout` seconds have passed.

    `id` is unique over every lease of a buffer, evaluations included; `row_id` only within one table. So a maker
    names its own work by `id`.
    """

    id: int
    row_id: int
    stage: str
    maker: str
    prompt: Prompt
    min_version: int  # every token must come from this policy version or a newer one
    seed: int  # differs by row and attempt; same run seed gives the same seeds; below 2**48
    samples: int  # the size of the group: a stage answers for exactly so many samples
    timeout: float  # seconds


@dataclass(frozen=True, slots=True)
class Produced:
    """The small answer that travels beside the columns of one stage of one row."""

    samples: int
    tokens: int  # response tokens of all samples; 0 for stages that make none
    nbytes: int
    min_version: int | None = None  # oldest and newest policy version among the tokens
    max_version: int | None = None
    seconds: float = 0.0  # the maker's own working time for this row
    stats: Mapping[str, float] = field(default_factory=dict)  # means over the samples, e.g. `reward_mean`, `pass_rate`


@dataclass(frozen=True, slots=True)
class MakerInfo:
    """How a maker presents itself when it is attached to a buffer."""

    name: str
    kind: str
    stage: str
    needs: tuple[str, ...]  # stages whose columns are the inputs of make(), in this order
    slots: int  # rows in flight at once
    route: Route | None = None  # the rows it takes; None: all


@dataclass(frozen=True, slots=True)
class SampledRow:
    """A complete row handed to a trainer. `columns` maps a stage to a reference (or, locally, to the value)."""

    row_id: int
    prompt: Prompt
    columns: Mapping[str, Any]
    produced: Mapping[str, Produced]
    age: int  # trainer version at sampling minus the oldest token version of the row
    makers: Mapping[str, str]  # stage -> name of the maker that filled it
