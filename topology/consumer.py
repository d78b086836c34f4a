"""Who takes the complete rows of a run: the trainer of the policy, or in a job (a run without trainers) the collector. Pure.

The one place that tells the two apart for whoever makes, paces and watches the actors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from buffer.config import BufferConfig
from makers.config import PromptsConfig
from topology.config import RunConfig
from topology.roles import POLICY
from trainers.collecting.config import CollectConfig

COLLECTOR: Final = "collector"


def consumer_of(config: RunConfig) -> str:
    """The name of the actor."""
    return f"trainer/{POLICY}" if config.collect is None else COLLECTOR


def steps_of(config: RunConfig) -> int | None:
    """Of a training run; a job has as many parts as its prompts give."""
    return None if config.collect is not None else config.trainers[POLICY].steps


@dataclass(frozen=True)
class Pace:
    """What the buffer is told of its consumer. `total_rows`: None where the prompts alone say it."""

    buffer: BufferConfig
    prompts: PromptsConfig
    rows: int  # taken at once
    every: int  # such takings until the next version
    total_rows: int | None


def pace_of(config: RunConfig) -> Pace:
    if config.collect is not None:
        return _of_job(config, config.collect)
    trainer = config.trainers[POLICY]
    rows = trainer.groups_per_step
    return Pace(config.buffer, config.prompts, rows, config.weights.every, trainer.steps * rows)


def _of_job(config: RunConfig, collect: CollectConfig) -> Pace:
    """There is one version, so rows never grow old, and the order is free. The data is passed over once, unless told."""
    buffer = config.buffer.model_copy(update={"order": "ready", "max_staleness": collect.parts_in_flight - 1})
    prompts = config.prompts.model_copy(update={"epochs": config.prompts.epochs or 1})
    return Pace(buffer, prompts, collect.rows_per_part, 1, None)
