"""Samples a second of the whole loop: `tandem run` against TRL's GRPOTrainer, at least 3.

Both: the same model, prompts, group size, samples a step, completion budget, temperature and learning rate, on the same
cores. TRL runs with parameters in bfloat16 (faster here than float32), no gradient checkpointing, the 64 samples in one
batch, and `generate` of transformers. vLLM in TRL's process was tried: it generates for one step and then cannot take new
weights on CPU, because TRL loads them into linear layers whose weight vLLM has packed away. Tandem leaves samples whose
advantage is 0 out of the backward pass, TRL computes them; the gradient is the same.
"""

from __future__ import annotations

import statistics

from benchmarks import workload
from benchmarks.harness import CORES, Result, run_json, say
from benchmarks.tandem_run import STEPS, measure
from benchmarks.trl_env import PINS, trl_python
from topology.models import resolve_model

TARGET = 3.0
TRL_STEPS = 5
WARM_UP = 1  # steps of TRL that are not counted
TIMEOUT = 600.0  # seconds for TRL's process


def run() -> list[Result]:
    model = str(resolve_model(workload.MODEL))
    python = trl_python()
    tandem = measure(1)
    say(f"TRL, {TRL_STEPS} steps")
    trl = run_json(
        "benchmarks.sides.trl",
        *("--model", model, "--steps", str(TRL_STEPS), "--threads", str(CORES)),
        python=python,
        timeout=TIMEOUT,
    )
    trl_rate = trl["samples"] / statistics.median(trl["seconds"][WARM_UP:])
    note = (
        f"tandem {tandem.samples_per_second:.3g} ({STEPS} steps, {tandem.response_length:.1f} tokens a response), "
        f"TRL {trl_rate:.3g} ({TRL_STEPS} steps, {trl['response_length']:.1f} tokens); {workload.GROUPS} groups x "
        f"{workload.SAMPLES}, at most {workload.MAX_TOKENS} tokens, {CORES} cores, max_staleness 1"
    )
    baseline = f"TRL {_pinned('trl')} GRPOTrainer, transformers {_pinned('transformers')}"
    return [Result("loop", tandem.samples_per_second / trl_rate, TARGET, baseline, "samples/s", note)]


def _pinned(package: str) -> str:
    return next(line.split("==")[1] for line in PINS.read_text().splitlines() if line.startswith(f"{package}=="))
