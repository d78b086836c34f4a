"""`ray job submit -- tandem run ...` against a local job server: real Ray, real vLLM, real Megatron-core, two nodes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import TINY, function, lines, wait_for
from tests.job_cluster import JobCluster, job_cluster
from topology.runs import JOB_CODE

pytestmark = pytest.mark.timeout(300)

# 1 where it was loaded from the second node's own copy of the job's code, 0 elsewhere.
REWARDS = """
def carried(completions, **fields):
    return [float(__file__.startswith({second!r}) and "/{folder}/" in __file__)] * len(completions)
"""
NAMED_ACTORS = """
import ray
ray.init(log_to_driver=False, logging_level="ERROR")
named = ray.util.list_named_actors(all_namespaces=True)
print([actor["name"] for actor in named if actor["namespace"].startswith("tandem/")])
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[JobCluster]:
    with job_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def code(cluster: JobCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a user has: a config and a reward function."""
    folder = tmp_path_factory.mktemp("code")
    (folder / "config.yaml").write_text(Path(TINY).read_text())
    (folder / "my_rewards.py").write_text(REWARDS.format(second=str(cluster.second), folder=JOB_CODE))
    return folder


def submit(cluster: JobCluster, code: Path, job: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Until the job has ended."""
    return cluster.ray(code, "job", "submit", f"--submission-id={job}", "--working-dir=.", "--", *command)


def state_of(cluster: JobCluster, run: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((cluster.runs / run / "status.json").read_text())
    return found


@pytest.fixture(scope="module")
def trained(cluster: JobCluster, code: Path) -> subprocess.CompletedProcess[str]:
    settings = [
        "trainers.policy.steps=2",
        "makers.reward.resources={cpus: 1, custom: {second: 1}}",
        function("my_rewards:carried"),
    ]
    words = [word for setting in settings for word in ("--set", setting)]
    return submit(cluster, code, "trained", "tandem", "run", "config.yaml", *words)


def test_a_job_trains_on_the_cluster_that_runs_it(
    cluster: JobCluster, trained: subprocess.CompletedProcess[str]
) -> None:
    assert trained.returncode == 0, trained.stdout
    found = state_of(cluster, "tiny")
    assert (found["state"], found["step"], found["steps"]) == ("done", 2, 2)
    address = json.loads((cluster.runs / "tiny" / "cluster.json").read_text())["address"]
    assert address == cluster.address


def test_the_users_code_reaches_a_maker_on_another_node(
    cluster: JobCluster, trained: subprocess.CompletedProcess[str]
) -> None:
    nodes = {actor["name"]: actor["node"] for actor in state_of(cluster, "tiny")["actors"]}
    assert nodes["maker/reward/0"] != nodes["maker/rollout/0"]
    assert [step["reward/mean"] for step in lines(cluster.runs / "tiny" / "metrics.jsonl")] == [1.0, 1.0]


def test_a_job_whose_run_fails_is_a_failed_job(cluster: JobCluster, code: Path) -> None:
    command = ("tandem", "run", "config.yaml", "--name", "failing", "--set", "limits.start=0.1")
    done = submit(cluster, code, "failing", *command)
    assert done.returncode != 0
    assert "failed with exit code 3" in done.stdout
    assert "Job 'failing' failed" in done.stdout
    assert state_of(cluster, "failing")["cause"].startswith("not ready within limits.start")


def test_stopping_the_job_drains_the_run_and_leaves_no_actor(cluster: JobCluster, code: Path) -> None:
    steps, job = cluster.runs / "stopping" / "metrics.jsonl", "stopping"
    command = ("tandem", "run", "config.yaml", "--name", "stopping", "--set", "trainers.policy.steps=100000")
    cluster.ray(code, "job", "submit", "--no-wait", f"--submission-id={job}", "--working-dir=.", "--", *command)
    wait_for(lambda: steps.exists() and lines(steps), 120, "the first step")
    cluster.ray(code, "job", "stop", job)
    wait_for(lambda: state_of(cluster, "stopping")["state"] == "stopped", 60, "the end of the run")
    assert (cluster.runs / "stopping/checkpoints/latest").exists()
    wait_for(lambda: _named_actors(cluster) == "[]", 30, "the end of all actors")


def _named_actors(cluster: JobCluster) -> str:
    environment = {**cluster.environment, "RAY_ADDRESS": cluster.address}
    command = [sys.executable, "-c", NAMED_ACTORS]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=True
    ).stdout.strip()
