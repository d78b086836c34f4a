"""Whole runs of several ranks and makers, from the shipped configs: real Ray, real vLLM, real Megatron-core, a tiny model.

One run of 1m2t (two data-parallel ranks) loses a rank midway, and goes on from its checkpoint as 2m2t: two makers and two
tensor-parallel ranks. It is compared, step by step, with a run of one rank, colocated with its maker, that nothing interrupted.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from tests import command_line
from tests.command_line import Command, assert_nothing_left, lines, processes_of, status, wait_for
from trainers.checkpoints import find_latest

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
ENDLESS = "trainers.policy.steps=100000"
MORE = 3  # steps after the resume
# In float32 and on-policy, so that runs of one seed are the same but for rounding; with samples of many lengths, so that
# the ranks have different numbers of tokens.
EXACT = (
    "trainers.policy.backend.dtype=float32",
    "makers.rollout.engine.dtype=float32",
    "makers.rollout.sampling.max_tokens=24",
    "makers.rollout.sampling.stop=[a, e, i, o, u]",
    "trainers.policy.optimizer.lr=5.0e-4",
    "buffer.max_staleness=0",
    "checkpoint.every=2",
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


def pids(found: dict[str, Any]) -> dict[str, int]:
    return {actor["name"]: actor["pid"] for actor in found["actors"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("runs")
    yield folder
    for process in processes_of(folder / "runs"):
        process.kill()


@dataclass(frozen=True)
class Killed:
    before: dict[str, Any]  # the status just before the kill
    code: int
    output: str
    seconds: float  # from the kill to the end of the command
    checkpoint: int  # the step of the newest one


@pytest.fixture(scope="module")
def killed(folder: Path) -> Killed:
    """1m2t without restarts, after one of its two ranks was killed midway."""
    with Command(folder, "run", config("1m2t"), *sets(*EXACT, ENDLESS, "limits.restarts=0")) as process:
        wait_for((folder / "runs/1m2t/checkpoints/latest").exists, 150, "a checkpoint")
        before = status(folder, "1m2t")
        os.kill(pids(before)[RANKS[1]], signal.SIGKILL)
        since = time.monotonic()
        output, _ = process.communicate(timeout=60)
        seconds = time.monotonic() - since
    return Killed(before, process.returncode, output, seconds, find_latest(folder / "runs/1m2t/checkpoints").step)


@pytest.fixture(scope="module")
def resumed(folder: Path, killed: Killed) -> dict[str, Any]:
    """The status of the same run after it went on as 2m2t to its end."""
    layout = ("trainers.policy.backend.data_parallel=1", "trainers.policy.backend.tensor_parallel=2")
    steps = f"trainers.policy.steps={killed.checkpoint + MORE}"
    tandem(folder, "resume", "runs/1m2t", *sets("makers.rollout.replicas=2", *layout, steps))
    return status(folder, "1m2t")


@pytest.fixture(scope="module")
def single(folder: Path, resumed: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The steps of colocated (one maker and one rank, in turns) with the same settings, not interrupted."""
    tandem(folder, "run", config("colocated"), *sets(*EXACT, f"trainers.policy.steps={resumed['steps']}"))
    return metrics(folder, "colocated")


def test_a_killed_rank_ends_the_run_in_seconds_with_its_name(folder: Path, killed: Killed) -> None:
    """The other rank, which waits for it in a collective, does not keep the run up."""
    assert [name for name in pids(killed.before) if "/rank/" in name] == RANKS
    assert pids(killed.before)[RANKS[0]] != pids(killed.before)[RANKS[1]]
    assert killed.code == 3
    assert killed.seconds < 20
    last = killed.output.strip().splitlines()[-1]
    assert last.startswith(f"run 1m2t failed: {RANKS[1]}: its process died"), killed.output
    assert "logs/trainer-policy-rank-1.log" in last


def test_it_goes_on_with_other_makers_and_ranks_from_its_checkpoint_to_its_end(
    folder: Path, killed: Killed, resumed: dict[str, Any]
) -> None:
    assert (resumed["state"], resumed["step"]) == ("done", killed.checkpoint + MORE)
    assert {"maker/rollout/0", "maker/rollout/1", *RANKS} <= pids(resumed).keys()
    written = [step["step"] for step in lines(folder / "runs/1m2t/metrics.jsonl")]
    assert written[-MORE:] == [killed.checkpoint + more for more in range(1, MORE + 1)]
    assert sorted(set(written)) == list(range(1, max(written) + 1))
    assert_nothing_left(folder / "runs/1m2t")


def test_the_makers_take_every_version_before_and_after_the_resume(folder: Path, resumed: dict[str, Any]) -> None:
    for number in range(1, resumed["steps"] + 1):
        step = metrics(folder, "1m2t")[number]
        assert (step["version/trainer"], step["staleness/max"]) == (number, 0)
        rows = parquet.read_table(folder / f"runs/1m2t/rows/step-{number:06d}.parquet").to_pylist()
        assert {version for row in rows for version in row["policy_versions"]} == {number - 1}
    makers = [actor["version"] for actor in resumed["actors"] if actor["name"].startswith("maker/rollout/")]
    assert makers == [resumed["steps"]] * 2


def test_in_every_step_makers_and_ranks_agree_on_the_log_probs(folder: Path, resumed: dict[str, Any]) -> None:
    assert all(step["mismatch/kl"] < 1e-9 for step in metrics(folder, "1m2t").values())


def test_two_ranks_train_as_one_does(folder: Path, resumed: dict[str, Any], single: dict[int, dict[str, Any]]) -> None:
    """Rounding gives differences of 1e-7 here."""
    several = metrics(folder, "1m2t")
    for number in (1, 2):
        assert several[number]["reward/std"] > 0
        for name in ("loss", "grad_norm", "entropy"):
            assert several[number][name] == pytest.approx(single[number][name], rel=1e-5, abs=1e-6), (number, name)


def test_killed_and_resumed_in_another_layout_equals_uninterrupted(
    folder: Path, resumed: dict[str, Any], single: dict[int, dict[str, Any]]
) -> None:
    """Weights, optimizer and prompts go on where the checkpoint left them. Rounding gives differences below 1e-6 here."""
    several = metrics(folder, "1m2t")
    for number in range(resumed["steps"] - MORE + 1, resumed["steps"] + 1):
        for name in ("reward/mean", "response_length/mean"):
            assert several[number][name] == single[number][name], (number, name)
        assert several[number]["grad_norm"] == pytest.approx(single[number]["grad_norm"], rel=1e-3), number
