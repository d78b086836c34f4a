"""Trained tokens a second of a distillation step (forward, backward, loss) against a GRPO step's, at least 1 / 1.15.

The same rows and one policy (Megatron) in one process, the two in turn: each round has both within seconds of each other. The
distillation is from the 64 likeliest tokens of a teacher on makers, whose columns are made up. The optimizer is not in it.
"""

from __future__ import annotations

from benchmarks import workload
from benchmarks.harness import CORES, Result, describe, free_port, median_of_ratios, run_json
from topology.models import resolve_model

TARGET = 1 / 1.15
TOP_K = 64
ROUNDS = 7
MICRO_BATCH_TOKENS = 4096
TIMEOUT = 300.0  # seconds


def run() -> list[Result]:
    answer = run_json(
        "benchmarks.sides.distillation_step",
        *("--model", str(resolve_model(workload.MODEL)), "--top-k", str(TOP_K), "--rounds", str(ROUNDS)),
        *("--threads", str(CORES), "--micro-batch-tokens", str(MICRO_BATCH_TOKENS), "--port", str(free_port())),
        timeout=TIMEOUT,
    )
    rates = {name: [answer["tokens"] / taken for taken in seconds] for name, seconds in answer["seconds"].items()}
    note = f"{describe(rates)}; K = {TOP_K}, {CORES} threads, without optimizer; median of the rounds' ratios"
    ratio = median_of_ratios(rates, "distill", "grpo")
    return [Result("distillation_step", ratio, TARGET, "grpo", "trained tokens/s", note)]
