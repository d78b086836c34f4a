"""One whole run of Tandem with the demo's config on the shared workload, and how many samples a second it trained."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import workload
from benchmarks.harness import ROOT, SideFailed, run_side, say

CONFIG = ROOT / "configs" / "demo.yaml"
STEPS = 12
WARM_UP = 2  # steps that are not counted: the first fills the pipe
TIMEOUT = 420.0  # seconds for a run
STOP_TIMEOUT = 60.0
OVERRIDES = (
    "evaluation=null",
    "checkpoint.every=null",
    "checkpoint.at_end=false",
    f"model.path={workload.MODEL}",
    f"prompts.seed={workload.SEED}",
    f"prompts.config={json.dumps(workload.CHAIN_SUM)}",
    f"makers.rollout.sampling.n={workload.SAMPLES}",
    f"makers.rollout.sampling.temperature={workload.TEMPERATURE}",
    f"makers.rollout.sampling.max_tokens={workload.MAX_TOKENS}",
    f"trainers.policy.groups_per_step={workload.GROUPS}",
    f"trainers.policy.optimizer.lr={workload.LEARNING_RATE}",
    "trainers.policy.optimizer.schedule=constant",
    "trainers.policy.optimizer.min_lr=0",
    "trainers.policy.algorithm.entropy_coef=0",  # the baseline has no entropy bonus
)


@dataclass(frozen=True, slots=True)
class Measured:
    samples_per_second: float
    response_length: float  # tokens, mean over the counted steps
    bound_by: str  # of most counted steps


@functools.cache
def measure(max_staleness: int) -> Measured:
    """Run once in a process of this bench, however many results need it. Raises SideFailed."""
    settings = (f"trainers.policy.steps={STEPS}", f"buffer.max_staleness={max_staleness}")
    return _summary(run_steps(f"bench-staleness-{max_staleness}", STEPS, settings))


def run_steps(name: str, steps: int, settings: tuple[str, ...]) -> list[dict[str, Any]]:
    """The metrics of each step of a run with the demo's config on the shared workload, and `settings`. Raises SideFailed."""
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        options = [word for setting in (*OVERRIDES, *settings) for word in ("--set", setting)]
        say(f"tandem run {name}, {steps} steps")
        run_side(
            tandem("run", CONFIG, "--name", name, *options),
            cwd=Path(folder),
            timeout=TIMEOUT,
            stop=lambda: stop(Path(folder), name),
        )
        lines = (Path(folder) / "runs" / name / "metrics.jsonl").read_text().splitlines()
    if len(lines) != steps:
        raise SideFailed(f"the run wrote metrics of {len(lines)} steps, not {steps}")
    return [json.loads(line) for line in lines]


def _summary(steps: list[dict[str, Any]]) -> Measured:
    seconds = statistics.median(
        after["time"] - before["time"] for before, after in itertools.pairwise(steps[WARM_UP - 1 :])
    )
    counted = steps[WARM_UP:]
    return Measured(
        samples_per_second=workload.GROUPS * workload.SAMPLES / seconds,
        response_length=statistics.mean(step["response_length/mean"] for step in counted),
        bound_by=str(statistics.mode(step["bound_by"] for step in counted)),
    )


def stop(folder: Path, name: str) -> None:
    """The run goes on without the command that started it, so it is told to end."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(
            [str(word) for word in tandem("stop", name, "--now")],
            cwd=folder,
            timeout=STOP_TIMEOUT,
            check=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def tandem(*words: str | Path) -> list[str | Path]:
    return [Path(sys.executable).with_name("tandem"), *words]
