"""Trained tokens a second of each algorithm's trainer step (forward, backward, loss) against GRPO's, at least 0.9.

The same rows and advantages for all, the Megatron learner, one process for each measurement, one after the other. PPO's
figure is of its policy alone. What an algorithm does on the controller (advantages, refills) is not in it.
"""

from __future__ import annotations

import statistics
from functools import partial

from benchmarks import workload
from benchmarks.harness import CORES, Result, alternate, describe, free_port, ratio_of_medians, run_json
from topology.models import resolve_model
from trainers.memory import KEEP_FREED_MEMORY

BASELINE = "grpo"
ALGORITHMS = ("dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_plus_plus", "ppo")
TARGET = 0.9
ROUNDS = 2  # processes of each algorithm
REPEAT = 2  # measurements in one process
MICRO_BATCH_TOKENS = 4096
TIMEOUT = 300.0  # seconds for one process


def run() -> list[Result]:
    model = str(resolve_model(workload.MODEL))
    rates = alternate({name: partial(_rate, model, name) for name in (BASELINE, *ALGORITHMS)}, ROUNDS)
    return [
        Result(
            f"algorithms/{name}",
            ratio_of_medians(rates, name, BASELINE),
            TARGET,
            "grpo",
            "trained tokens/s",
            f"{describe({side: rates[side] for side in (name, BASELINE)})}; {CORES} threads, without optimizer",
        )
        for name in ALGORITHMS
    ]


def _rate(model: str, algorithm: str) -> float:
    answer = run_json(
        "benchmarks.sides.learner_megatron",
        *("--model", model, "--algorithm", algorithm, "--shape", "ragged", "--dtype", workload.DTYPE, "--share-prompt"),
        *("--threads", str(CORES), "--repeat", str(REPEAT), "--micro-batch-tokens", str(MICRO_BATCH_TOKENS)),
        *("--port", str(free_port())),
        timeout=TIMEOUT,
        env=KEEP_FREED_MEMORY,
    )
    return float(answer["tokens"] / statistics.median(answer["seconds"]))
