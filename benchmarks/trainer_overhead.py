"""How much of a trainer's step its ranks work: SmolLM2-135M on two data-parallel ranks, in a real run.

A step counts from its rows being there to the next one's being asked for. The ranks' own seconds are `time/compute` of
metrics.jsonl: training, and packing the weights. All the rest is overhead: rows to the controller and on to the ranks,
planning, the way of the answers and of the weights, metrics and files of rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks import workload
from benchmarks.harness import CORES, Result
from benchmarks.tandem_run import run_steps

TARGET = 0.95
RANKS = 2
STEPS = 6
WARM_UP = 2  # steps that are not counted
SETTINGS = (
    f"trainers.policy.steps={STEPS}",
    f"trainers.policy.backend.data_parallel={RANKS}",
    f"trainers.policy.backend.threads={CORES // RANKS}",
    "buffer.max_staleness=0",  # the makers do not work meanwhile
)


def run() -> list[Result]:
    steps = run_steps("bench-overhead", STEPS, SETTINGS)[WARM_UP:]
    ratio = statistics.median(step["time/compute"] / _own(step) for step in steps)
    shown = {
        name: statistics.median(step[f"time/{name}"] for step in steps) for name in ("compute", "train", "publish")
    }
    seconds = ", ".join(f"{name} {value:.3f}" for name, value in shown.items())
    note = (
        f"{seconds} of {statistics.median(map(_own, steps)):.3f}; medians of {len(steps)} steps of {workload.GROUPS} x "
        f"{workload.SAMPLES} samples, {RANKS} ranks"
    )
    return [Result("trainer_overhead", ratio, TARGET, "the whole step without waiting for rows", "s of a step", note)]


def _own(step: Mapping[str, Any]) -> float:
    """Seconds of the trainer's own."""
    return step["time/step"] - step["time/wait_for_batch"]
