"""Cadence and order on the real buffer, store and trainer: which version a row's tokens have, and what becomes of old rows.

The rank counts its steps and exports the count as its weights; the rollout maker reads them, so a version proves itself.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from buffer.columns import Columns, nbytes
from buffer.records import Lease, Produced
from tests.fakes_trainer import step_result
from tests.local_runtime import LocalRun, run_locally
from tests.rollouts import rollout_columns
from topology.config import RunConfig, parse_config
from trainers.batch import StepPlan
from trainers.learner import StepResult
from weights.client import WeightClient
from weights.packing import pack, unpack

pytestmark = pytest.mark.timeout(60)
TINY = Path(__file__).resolve().parents[2] / "configs/tiny.yaml"
GROUPS = 4  # of one step


def config(*, steps: int, every: int = 1, **buffer: Any) -> RunConfig:
    data = copy.deepcopy(yaml.safe_load(TINY.read_text()))
    data["trainers"]["policy"] |= {"steps": steps, "groups_per_step": GROUPS}
    return parse_config(data | {"buffer": buffer, "weights": {"every": every}})


class CountingRank:
    """Its weights are the number of steps it has taken."""

    def __init__(self) -> None:
        self.steps = 0

    def train_step(self, plan: StepPlan, *rollouts: Columns) -> StepResult:
        self.steps += 1
        return step_result(plan.step)

    def export(self, version: int) -> tuple[Any, ...]:
        manifest, buckets = pack(version, [("steps", torch.tensor([self.steps]))], 1024)
        return manifest, *buckets


class StandIn:
    """The parts of a maker that do nothing here."""

    slots = 6

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def status(self) -> dict[str, Any]:
        return {}


class Rollout(StandIn):
    """Pulls the newest weights for each row. Rows take different numbers of turns, so they overtake each other.

    `weights_of[version]` is what it found in that version. The rows in `slow` are held until two newer versions are out.
    """

    stage, needs = "rollout", ()

    def __init__(self, weights: WeightClient, slow: frozenset[int] = frozenset()) -> None:
        self._weights = weights
        self._slow = slow
        self.weights_of: dict[int, int] = {}

    async def make(self, lease: Lease, inputs: Mapping[str, Columns]) -> tuple[Produced, Columns]:
        manifest, buckets = await self._weights.pull()
        version = manifest.version
        self.weights_of[version] = int(unpack(manifest, buckets)["steps"])
        for _ in range(1 + lease.row_id % 5):
            await asyncio.sleep(0)
        if lease.row_id in self._slow:
            assert await self._weights.wait_newer(version + 1, timeout=30.0) == version + 2
        rng = np.random.default_rng(lease.seed)
        columns = rollout_columns(rng, 3, rng.integers(1, 9, lease.samples).tolist(), version=version)
        tokens = columns["response_ids"].size
        return Produced(lease.samples, tokens, nbytes(columns), version, version), columns


class Reward(StandIn):
    stage, needs = "reward", ("rollout",)

    async def make(self, lease: Lease, inputs: Mapping[str, Columns]) -> tuple[Produced, Columns]:
        columns = {"rewards": np.arange(lease.samples, dtype=np.float32)}
        return Produced(lease.samples, 0, nbytes(columns)), columns


def train(settings: RunConfig, folder: Path, **options: Any) -> tuple[LocalRun, Rollout]:
    made: list[Rollout] = []

    def makers(weights: WeightClient) -> dict[str, Any]:
        made.append(Rollout(weights, **options))
        return {"maker/rollout/0": made[0], "maker/reward/0": Reward()}

    run = asyncio.run(run_locally(settings, folder, CountingRank(), makers))
    assert run.outcome == "done"
    return run, made[0]


def versions_by_step(run: LocalRun) -> list[set[int]]:
    """The versions of the tokens each step was trained on."""
    return [set().union(*(row.columns["rollout"]["policy_versions"].tolist() for row in rows)) for rows in run.batches]


def test_every_2_publishes_after_steps_2_4_6_and_8_the_weights_of_those_steps(tmp_path: Path) -> None:
    run, rollout = train(config(steps=8, every=2, max_staleness=1), tmp_path)
    assert [step["version/trainer"] for step in run.metrics] == [0, 1, 1, 2, 2, 3, 3, 4]
    assert rollout.weights_of == {version: 2 * version for version in rollout.weights_of}
    assert set(rollout.weights_of) >= {0, 1, 2}
    assert int(unpack(*run.store.get(4))["steps"]) == 8


def test_a_last_step_between_two_versions_is_not_published(tmp_path: Path) -> None:
    run, _ = train(config(steps=5, every=2, max_staleness=1), tmp_path)
    assert [step["version/trainer"] for step in run.metrics] == [0, 1, 1, 2, 2]
    assert run.store.newest() == 2


def test_every_2_with_max_staleness_0_trains_both_steps_on_tokens_of_the_published_version(tmp_path: Path) -> None:
    run, _ = train(config(steps=6, every=2, max_staleness=0), tmp_path)
    assert versions_by_step(run) == [{0}, {0}, {1}, {1}, {2}, {2}]


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_every_2_keeps_ages_in_versions_within_the_bound_and_reaches_it(tmp_path: Path, max_staleness: int) -> None:
    run, _ = train(config(steps=10, every=2, max_staleness=max_staleness), tmp_path)
    ages = [step // 2 - min(versions) for step, versions in enumerate(versions_by_step(run))]
    assert ages == [step["staleness/max"] for step in run.metrics]
    assert max(ages) == max_staleness


def test_order_ready_drops_a_row_that_became_too_old_replaces_it_and_the_ledger_closes(tmp_path: Path) -> None:
    steps, slow = 8, 1
    run, _ = train(config(steps=steps, max_staleness=1, order="ready"), tmp_path, slow=frozenset({slow}))
    trained = [row for rows in run.batches for row in rows]
    assert sorted(row.row_id for row in trained) == [i for i in range(steps * GROUPS + 1) if i != slow]
    assert max(row.age for row in trained) == 1
    assert run.metrics[-1]["staleness/dropped"] == 1

    rows, tokens = run.status["ledger"]["rows"], run.status["ledger"]["tokens"]
    in_columns = sum(row.columns["rollout"]["response_ids"].size for row in trained)
    dropped = tokens["dropped"]["stale"]
    assert rows == {"admitted": steps * GROUPS + 1, "trained": steps * GROUPS, "dropped": {"stale": 1}, "in_flight": 0}
    assert tokens == {
        "admitted": in_columns + dropped,
        "trained": in_columns,
        "dropped": {"stale": dropped},
        "in_flight": 0,
    }
    assert dropped > 0
