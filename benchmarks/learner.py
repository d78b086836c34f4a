"""Trained tokens a second: the Megatron learner against plain transformers, forward and backward, at least 1.0.

Neither side's figure holds the optimizer: Megatron's keeps float32 main parameters, which plain AdamW does not. A token
counts once for each sample that has it, however a side computes it. Three comparisons, each with the baseline on the same
rows: responses of equal length (nothing to pad), responses of 1 to MAX_TOKENS tokens, and these with the prompt of a
group computed once. The baseline keeps only the logits it needs and sorts samples by length.
"""

from __future__ import annotations

import statistics
from functools import partial
from importlib.metadata import version

from benchmarks import batches, workload
from benchmarks.harness import CORES, Result, alternate, describe, free_port, ratio_of_medians, run_json
from topology.models import resolve_model

TARGET = 1.0
ROUNDS = 2  # processes of each side
REPEAT = 2  # measurements in one process
TIMEOUT = 300.0  # seconds for one process
MICRO_BATCH = 16  # samples, of the baseline
MICRO_BATCH_TOKENS = 4096  # of the Megatron learner


def run() -> list[Result]:
    model = str(resolve_model(workload.MODEL))
    megatron = partial(_megatron, model)
    equal = {"megatron": partial(megatron, "equal", False), "transformers": partial(_transformers, model, "equal")}
    ragged = {
        "megatron": partial(megatron, "ragged", False),
        "shared": partial(megatron, "ragged", True),
        "transformers": partial(_transformers, model, "ragged"),
    }
    equal_rates, ragged_rates = alternate(equal, ROUNDS), alternate(ragged, ROUNDS)
    return [
        _result("learner/equal-lengths", equal_rates, "megatron"),
        _result("learner/ragged", ragged_rates, "megatron"),
        _result("learner/ragged-shared-prompt", ragged_rates, "shared"),
    ]


def _result(name: str, rates: dict[str, list[float]], candidate: str) -> Result:
    pair = {side: rates[side] for side in (candidate, "transformers")}
    note = (
        f"{describe(pair)}; {workload.GROUPS} groups x {workload.SAMPLES}, {batches.PROMPT_TOKENS} prompt tokens, at most "
        f"{workload.MAX_TOKENS} response tokens, {workload.DTYPE}, {CORES} threads, without optimizer"
    )
    baseline = f"transformers {version('transformers')} forward and backward"
    return Result(name, ratio_of_medians(rates, candidate, "transformers"), TARGET, baseline, "trained tokens/s", note)


def _megatron(model: str, shape: str, share_prompt: bool) -> float:
    arguments = ["--micro-batch-tokens", str(MICRO_BATCH_TOKENS), "--port", str(free_port())]
    return _rate("learner_megatron", model, shape, [*arguments, *(["--share-prompt"] if share_prompt else [])])


def _transformers(model: str, shape: str) -> float:
    return _rate("learner_transformers", model, shape, ["--micro-batch", str(MICRO_BATCH)])


def _rate(side: str, model: str, shape: str, arguments: list[str]) -> float:
    common = ["--model", model, "--shape", shape, "--dtype", workload.DTYPE, "--threads", str(CORES)]
    answer = run_json(
        f"benchmarks.sides.{side}",
        *common,
        "--repeat",
        str(REPEAT),
        *arguments,
        timeout=TIMEOUT,
    )
    return answer["tokens"] / statistics.median(answer["seconds"])
