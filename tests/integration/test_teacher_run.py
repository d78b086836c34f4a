"""On-policy distillation of a tiny student by teachers that come, die and hang, through the command line."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.command_line import assert_nothing_left, events, lines, processes_of, tandem, wait_for
from topology.runs import read_json

pytestmark = pytest.mark.timeout(300)
CONFIG = """
name: tiny
model: {path: tiny-llama-first-1}
prompts: {type: reasoning_gym, dataset: chain_sum, size: 2000, seed: 1}
makers:
  rollout: {kind: rollout, engine: {max_model_len: 256}, sampling: {n: 2, max_tokens: 8}}
  teacher: {kind: teacher, model: {path: tiny-llama}, engine: {max_model_len: 257}, top_k: 8}
trainers:
  policy:
    algorithm: {type: distill}
    distill: {divergence: forward_kl}
    backend: {type: megatron, dtype: bfloat16}
    optimizer: {lr: 1.0e-3}
    groups_per_step: 4
    steps: 100000
buffer: {max_attempts: 20}
limits: {ping: 15}
checkpoint: {at_end: false}
"""
OTHER = "{kind: teacher, model: {path: smollm2-135m-instruct}, route: {column: x, values: [1]}, top_k: 8}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("teacher")
    (folder / "config.yaml").write_text(CONFIG)
    yield folder
    for process in processes_of(folder):
        process.kill()


def test_a_run_whose_teachers_die_or_hang_waits_says_so_and_goes_on_also_with_one_that_is_attached(
    folder: Path,
) -> None:
    done = tandem(folder, "run", "config.yaml", "--detach")
    assert done.returncode == 0, done.stdout + done.stderr
    run = folder / "runs/tiny"

    def recorded() -> dict:
        return read_json(run / "status.json") or {}

    def goes_on(steps: int = 2) -> None:
        now = recorded().get("step") or 0
        wait_for(
            lambda: (recorded().get("step") or 0) >= now + steps or recorded().get("state") == "failed", 120, "steps"
        )
        assert recorded()["state"] == "running", recorded()["cause"]

    def teachers() -> dict[str, int]:
        """The processes of those that are up, by name."""
        rows = [row for row in recorded()["actors"] if row["name"].startswith("maker/teacher/")]
        return {row["name"]: row["pid"] for row in rows if row["state"] in ("healthy", "suspect")}

    goes_on()
    os.kill(teachers()["maker/teacher/0"], signal.SIGKILL)
    wait_for(lambda: recorded()["state"] == "waiting", 20, "the run that waits")
    assert recorded()["cause"] == "no maker for teacher: maker/teacher/0 is made anew"
    done = tandem(folder, "attach", "tiny", "teacher", "--replicas", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    goes_on()
    wait_for(lambda: len(teachers()) == 2, 60, "both teachers")
    hung = teachers()
    for pid in hung.values():
        os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: recorded()["state"] == "waiting", 60, "the end of the teachers that hang")
    goes_on()
    told = {row["cause"] for row in events(folder, "tiny") if row["event"] == "death"}
    assert {f"{name}: hung, no answer for limits.ping = 15 s" for name in hung} <= told
    assert not any(psutil.pid_exists(pid) for pid in hung.values())
    (folder / "other.yaml").write_text(OTHER)
    refused = tandem(folder, "attach", "tiny", "other", "--maker", "other.yaml")
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "it would score other tokens" in refused.stdout + refused.stderr
    assert tandem(folder, "stop", "tiny").returncode == 0
    told = lines(run / "metrics.jsonl")
    assert told[-1]["distill/kl"] < told[0]["distill/kl"]
    assert all(0 < row["distill/teacher_mass"] <= 1 for row in told)
    assert_nothing_left(run)
