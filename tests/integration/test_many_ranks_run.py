"""Whole runs of several ranks and makers, from the shipped configs: real Ray, real vLLM, real Megatron-core, a tiny model.

One run of two data-parallel ranks is stopped midway and goes on as two tensor-parallel ranks, with one more group of
makers. It is compared, step by step, with a run of one rank that nothing interrupted.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from tests import command_line
from tests.command_line import Command, assert_nothing_left, lines, processes_of, status, wait_for

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
ENDLESS = "trainers.policy.steps=100000"
BEFORE, SHORT = 2, 5  # steps at least before the stop; max_tokens of the group that joins at the resume
# In float32 and on-policy, so that runs of one seed are the same but for rounding; with samples of many lengths, so that
# the ranks have different numbers of tokens.
EXACT = (
    "trainers.policy.backend.dtype=float32",
    "makers.rollout.engine.dtype=float32",
    "makers.rollout.sampling.max_tokens=24",
    "makers.rollout.sampling.stop=[a, e, i, o, u]",
    "trainers.policy.optimizer.lr=5.0e-4",
    "buffer.max_staleness=0",
    "rows.every=1",
)
RANKS = ["trainer/policy/rank/0", "trainer/policy/rank/1"]

pytestmark = pytest.mark.timeout(300)  # mostly the start of processes, on a busy machine


def tandem(folder: Path, *args: str) -> None:
    done = command_line.tandem(folder, *args)
    assert done.returncode == 0, f"{args} exited with {done.returncode}\n{done.stdout}\n{done.stderr}"


def config(name: str) -> str:
    return str(CONFIGS / f"{name}.yaml")


def sets(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def metrics(folder: Path, name: str) -> dict[int, dict[str, Any]]:
    return {step["step"]: step for step in lines(folder / "runs" / name / "metrics.jsonl")}


def reached(folder: Path, name: str, step: int) -> bool:
    found = status(folder, name)
    assert found["state"] not in ("failed", "stopped"), found
    return found["step"] >= step


def pids(found: dict[str, Any]) -> dict[str, int]:
    return {actor["name"]: actor["pid"] for actor in found["actors"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("runs")
    yield folder
    for process in processes_of(folder / "runs"):
        process.kill()


@pytest.fixture(scope="module")
def stopped(folder: Path) -> dict[str, Any]:
    """The status of 1m2t (two data-parallel ranks) after it was stopped midway."""
    tandem(folder, "run", config("1m2t"), "--detach", *sets(*EXACT, ENDLESS))
    wait_for(lambda: reached(folder, "1m2t", BEFORE), 120, f"step {BEFORE}")
    tandem(folder, "stop", "1m2t")
    return status(folder, "1m2t")


@pytest.fixture(scope="module")
def resumed(folder: Path, stopped: dict[str, Any]) -> dict[str, Any]:
    """The status of the same run after it went on as two tensor-parallel ranks, for three steps, to its end."""
    layout = ("trainers.policy.backend.data_parallel=1", "trainers.policy.backend.tensor_parallel=2")
    tandem(folder, "resume", "runs/1m2t", *sets(*layout, f"trainers.policy.steps={stopped['step'] + 3}"))
    return status(folder, "1m2t")


@pytest.fixture(scope="module")
def single(folder: Path, resumed: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The steps of 1m1t (one rank) with the same settings, not interrupted."""
    tandem(folder, "run", config("1m1t"), *sets(*EXACT, f"trainers.policy.steps={resumed['steps']}"))
    return metrics(folder, "1m1t")


def test_a_run_of_two_data_parallel_ranks_stops_midway_with_a_checkpoint(folder: Path, stopped: dict[str, Any]) -> None:
    assert (stopped["state"], stopped["steps"]) == ("stopped", 100000)
    assert [name for name in pids(stopped) if "/rank/" in name] == RANKS
    assert len({pids(stopped)[rank] for rank in RANKS}) == 2
    meta = json.loads((folder / f"runs/1m2t/checkpoints/step-{stopped['step']:06d}/meta.json").read_text())
    assert meta["step"] == stopped["step"] >= BEFORE


def test_it_goes_on_as_tensor_parallel_ranks_from_that_step_to_its_end(
    folder: Path, stopped: dict[str, Any], resumed: dict[str, Any]
) -> None:
    assert (resumed["state"], resumed["step"]) == ("done", stopped["step"] + 3)
    assert [name for name in pids(resumed) if "/rank/" in name] == RANKS
    steps = [step["step"] for step in lines(folder / "runs/1m2t/metrics.jsonl")]
    assert steps == list(range(1, stopped["step"] + 4)), "each step once"
    assert_nothing_left(folder / "runs/1m2t")


def test_the_makers_take_every_version_before_and_after_the_resume(folder: Path, resumed: dict[str, Any]) -> None:
    for number, step in metrics(folder, "1m2t").items():
        assert (step["version/trainer"], step["staleness/max"]) == (number, 0)
        rows = parquet.read_table(folder / f"runs/1m2t/rows/step-{number:06d}.parquet").to_pylist()
        assert {version for row in rows for version in row["policy_versions"]} == {number - 1}
    assert resumed["versions"] == {"trainer": resumed["steps"], "maker_min": resumed["steps"], "maker_max": resumed["steps"]}


def test_in_every_step_makers_and_ranks_agree_on_the_log_probs(folder: Path, resumed: dict[str, Any]) -> None:
    assert all(step["mismatch/kl"] < 1e-9 for step in metrics(folder, "1m2t").values())


def test_two_ranks_train_as_one_does(folder: Path, stopped: dict[str, Any], single: dict[int, dict[str, Any]]) -> None:
    """The same rows in every step, whatever the layout, and the first two steps equal but for rounding."""
    several = metrics(folder, "1m2t")
    for number in (1, 2):
        for name in ("loss", "grad_norm", "entropy"):
            assert several[number][name] == pytest.approx(single[number][name], rel=1e-5, abs=1e-6), (number, name)
        assert several[number]["reward/std"] > 0 < several[number]["grad_norm"]


def test_interrupted_and_resumed_in_another_layout_equals_uninterrupted(
    folder: Path, stopped: dict[str, Any], single: dict[int, dict[str, Any]]
) -> None:
    several = metrics(folder, "1m2t")
    for number in range(stopped["step"] + 1, stopped["step"] + 4):
        for name in ("reward/mean", "response_length/mean"):
            assert several[number][name] == single[number][name], (number, name)
        assert several[number]["grad_norm"] == pytest.approx(single[number]["grad_norm"], rel=1e-3), number


def test_killing_one_of_two_ranks_ends_the_run_in_seconds_with_its_name(folder: Path) -> None:
    """Of 2m2t (two makers, two tensor-parallel ranks): the other rank, which waits for it, does not keep the run up."""
    with Command(folder, "run", config("2m2t"), *sets(ENDLESS)) as process:
        wait_for(lambda: (folder / "runs/2m2t/status.json").exists() and reached(folder, "2m2t", 4), 120, "step 4")
        found = status(folder, "2m2t")
        assert {"maker/rollout/0", "maker/rollout/1", *RANKS} <= pids(found).keys()
        os.kill(pids(found)[RANKS[1]], signal.SIGKILL)
        killed = time.monotonic()
        output, _ = process.communicate(timeout=60)
    assert time.monotonic() - killed < 20
    assert process.returncode == 3
    last = output.strip().splitlines()[-1]
    assert last.startswith(f"run 2m2t failed: {RANKS[1]}: its process died"), output
    assert all(step["mismatch/kl"] < 1e-3 and step["grad_norm"] > 0 for step in metrics(folder, "2m2t").values())
    assert_nothing_left(folder / "runs/2m2t")
