"""Trained tokens a second of each algorithm's trainer step (forward, backward, loss) against GRPO's, at least 0.9.

The same rows and advantages for all and one policy (Megatron) in one process, the algorithms in turn: each round has them all
within seconds of each other. PPO's figure is of its policy alone, DPO's of a reference maker's log-probs. What an algorithm
does on the controller (advantages, refills) is not in it.
"""

from __future__ import annotations

from benchmarks import workload
from benchmarks.harness import CORES, Result, describe, free_port, median_of_ratios, run_json
from topology.models import resolve_model

BASELINE = "grpo"
ALGORITHMS = ("dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_plus_plus", "ppo", "sft", "dpo")
TARGET = 0.9
ROUNDS = 5
MICRO_BATCH_TOKENS = 4096
TIMEOUT = 450.0  # seconds


def run() -> list[Result]:
    answer = run_json(
        "benchmarks.sides.algorithm_steps",
        *("--model", str(resolve_model(workload.MODEL)), "--algorithms", ",".join((BASELINE, *ALGORITHMS))),
        *("--threads", str(CORES), "--rounds", str(ROUNDS), "--micro-batch-tokens", str(MICRO_BATCH_TOKENS)),
        *("--port", str(free_port())),
        timeout=TIMEOUT,
    )
    rates = {name: [answer["tokens"] / taken for taken in seconds] for name, seconds in answer["seconds"].items()}
    return [_result(name, {side: rates[side] for side in (name, BASELINE)}) for name in ALGORITHMS]


def _result(name: str, rates: dict[str, list[float]]) -> Result:
    note = f"{describe(rates)}; {CORES} threads, without optimizer; median of the rounds' ratios"
    return Result(
        f"algorithms/{name}", median_of_ratios(rates, name, BASELINE), TARGET, BASELINE, "trained tokens/s", note
    )
