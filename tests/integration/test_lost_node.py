"""A node of the cluster goes without a word: what was on it comes back on another, and the rest of the run goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import TINY, events, status, tandem, wait_for
from tests.simulated_cluster import SimulatedCluster, simulated_cluster

pytestmark = pytest.mark.timeout(400)
HEAD, FIRST, SECOND, THIRD = (f"127.0.3.{number}" for number in range(1, 5))
FAR: dict[str, Any] = {"num_cpus": 1, "resources": {"far": 1}}
SETTINGS = (
    "trainers.policy.steps=100000",
    "buffer.max_attempts=20",
    "makers.rollout.replicas=2",
    "makers.rollout.resources={cpus: 1, custom: {far: 1}}",
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[SimulatedCluster]:
    with simulated_cluster({HEAD: {"num_cpus": 4}, FIRST: FAR, SECOND: FAR}) as cluster:
        yield cluster


def makers(folder: Path) -> dict[str, tuple[str, str]]:
    """Node and state of each."""
    rows = json.loads((folder / "runs/tiny/status.json").read_text())["actors"]
    return {row["name"]: (row["node"], row["state"]) for row in rows if row["name"].startswith("maker/rollout")}


def test_a_maker_on_a_lost_node_comes_back_on_another_while_the_run_goes_on(
    cluster: SimulatedCluster, tmp_path: Path
) -> None:
    sets = [part for setting in (*SETTINGS, f"cluster.address={cluster.address}") for part in ("--set", setting)]
    done = tandem(tmp_path, "run", TINY, "--detach", *sets)
    assert done.returncode == 0, done.stdout + done.stderr
    step = lambda: status(tmp_path, "tiny")["step"]  # noqa: E731
    try:
        wait_for(lambda: step() >= 2, 150, "the first steps")
        before = makers(tmp_path)
        lost = next(name for name, (node, _) in before.items() if node == cluster.node_id(FIRST))
        (other,) = before.keys() - {lost}
        cluster.lose(FIRST)
        wait_for(lambda: makers(tmp_path)[lost][1] in ("dead", "restarting", "starting"), 60, "the death")
        reached = step()
        wait_for(lambda: step() >= reached + 3, 60, "steps with one maker")
        assert makers(tmp_path)[other] == before[other]
        cluster.add(THIRD, FAR)
        wait_for(lambda: makers(tmp_path)[lost][1] == "healthy", 150, "the maker on another node")
        assert makers(tmp_path)[lost][0] == cluster.node_id(THIRD)
        happened = [event for event in events(tmp_path, "tiny") if event["event"] in ("death", "restart", "failed")]
        assert {event["actor"] for event in happened} == {lost}, happened
    finally:
        tandem(tmp_path, "stop", "tiny", "--now")
