"""How much of the student's held-out KL to its teacher the shipped distillation run closes: at least half."""

from __future__ import annotations

import tempfile
from pathlib import Path

import yaml

from benchmarks.harness import CORES, ROOT, Result, run_json, run_side, say
from benchmarks.tandem_run import stop, tandem

CONFIG = ROOT / "configs" / "distill.yaml"
TARGET = 0.5
RUN_TIMEOUT = 1200.0  # seconds
SIDE_TIMEOUT = 300.0


def run() -> list[Result]:
    config = yaml.safe_load(CONFIG.read_text())
    student, teacher = config["model"]["path"], config["makers"]["teacher"]["model"]["path"]
    before = _held_out(student, teacher)
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        name, home = config["name"], Path(folder)
        say(f"tandem run {CONFIG.name}")
        run_side(tandem("run", CONFIG), cwd=home, timeout=RUN_TIMEOUT, stop=lambda: stop(home, name))
        run_side(tandem("export", home / "runs" / name, home / "student"), cwd=home, timeout=SIDE_TIMEOUT)
        after = _held_out(str(home / "student"), teacher)
    steps = config["trainers"]["policy"]["steps"]
    note = (
        f"KL(teacher, student) over the whole vocabulary: on the student's own answers {before['own']:.3g} to "
        f"{after['own']:.3g}, on the teacher's {before['teacher']:.3g} to {after['teacher']:.3g}; {steps} steps of {student}, "
        f"{CORES} cores"
    )
    closed = min(1.0 - after[whose] / before[whose] for whose in before)
    return [
        Result("distillation", closed, TARGET, "the student before (part of its KL that is gone)", "nats a token", note)
    ]


def _held_out(student: str, teacher: str) -> dict[str, float]:
    say(f"held-out KL of {student}")
    answer: dict[str, float] = run_json(
        "benchmarks.sides.held_out_kl", "--student", student, "--teacher", teacher, timeout=SIDE_TIMEOUT
    )
    return answer
