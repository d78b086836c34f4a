"""How much of a trainer's step its ranks work: SmolLM2-135M on two data-parallel ranks, in a real run.

A step counts from its rows being there to the next one's being asked for. Its ranks' own seconds are `time/compute` of
metrics.jsonl; all the rest counts as overhead: rows to the controller and on to the ranks, planning, the way of the answers,
the publication of the weights (although the ranks do most of that work too), metrics and files of rows.
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
    seconds = {part: statistics.median(_parts(step)[part] for step in steps) for part in _parts(steps[0])}
    ratio = statistics.median(_parts(step)["ranks"] / sum(_parts(step).values()) for step in steps)
    shown = ", ".join(f"{part} {value:.3f}" for part, value in seconds.items())
    note = f"{shown}; medians of {len(steps)} steps of {workload.GROUPS} x {workload.SAMPLES} samples, {RANKS} ranks"
    return [Result("trainer_overhead", ratio, TARGET, "the whole step without waiting for rows", "s of a step", note)]


def _parts(step: Mapping[str, Any]) -> dict[str, float]:
    own = step["time/step"] - step["time/wait_for_batch"]
    publish, compute = step["time/publish"], step["time/compute"]
    calls = step["time/train"] - compute
    return {"ranks": compute, "publish": publish, "calls": calls, "rest": own - compute - publish - calls}
