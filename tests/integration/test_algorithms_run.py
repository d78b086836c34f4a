"""Each algorithm as its shipped config has it, on a tiny model: real Ray, real vLLM, real Megatron-core.

The reward of an answer is a third each for one, two and three digits: what the model writes by chance now and then, and what
every algorithm learns within seconds. PPO's run is in test_ppo_run.py. The runs share a cluster, one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from tests import command_line
from tests.command_line import lines, status
from tests.simulated_cluster import simulated_cluster

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
NAMES = ("tiny", "dr-grpo", "dapo", "gspo", "cispo", "rloo", "reinforce-plus-plus")  # tiny: GRPO
STEPS = 10
EDGE = 2  # steps at either end whose rewards are averaged; the first two have rows of the start weights
RISE = 0.6  # the mean reward of two steps at the start has a standard error of 0.01 to 0.03
DIGITS = yaml.safe_load((CONFIGS / "dr-grpo.yaml").read_text())["makers"]["reward"]["functions"]
SETTINGS = {
    "tiny": (f"makers.reward.functions={DIGITS}", "trainers.policy.optimizer.lr=2e-3", "trainers.policy.groups_per_step=16"),
    "dapo": ("makers.rollout.sampling.n=4",),  # of so few samples some groups have no digit, and so no signal
}  # fmt: skip

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """By the name of its config, the folder in which a run of it was given; each is made when it is first asked for."""
    with simulated_cluster({"127.0.8.1": {"num_cpus": 8}}) as cluster:

        @cache
        def run(name: str) -> Path:
            folder = tmp_path_factory.mktemp(name)
            settings = (
                f"cluster.address={cluster.address}",
                f"trainers.policy.steps={STEPS}",
                "checkpoint.every=null",
                *SETTINGS.get(name, ()),
            )
            sets = [part for setting in settings for part in ("--set", setting)]
            done = command_line.tandem(folder, "run", str(CONFIGS / f"{name}.yaml"), *sets)
            assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
            return folder

        yield run


def metrics(folder: Path, name: str) -> list[dict[str, Any]]:
    return lines(folder / "runs" / name / "metrics.jsonl")


@pytest.mark.parametrize("name", NAMES)
def test_the_reward_rises(finished: Callable[[str], Path], name: str) -> None:
    steps = metrics(finished(name), name)
    rewards = [step["reward/mean"] for step in steps]
    assert len(steps) == STEPS
    assert fmean(rewards[-EDGE:]) > fmean(rewards[:EDGE]) + RISE, rewards
    assert all(step["staleness/max"] <= 1 for step in steps)


def test_dapo_trains_on_groups_with_a_signal_only_and_its_ledger_counts_those_that_were_replaced(
    finished: Callable[[str], Path],
) -> None:
    folder = finished("dapo")
    steps, ledger = metrics(folder, "dapo"), status(folder, "dapo")["ledger"]
    replaced = sum(step["reward/replaced"] for step in steps)
    assert replaced > 0
    assert ledger["dropped"] == {"no_signal": replaced}
    assert ledger["trained"] == STEPS * 8, "each step waited for others in place of them"
    for counted in (ledger, ledger["tokens"]):
        assert counted["admitted"] == counted["trained"] + sum(counted["dropped"].values()) + counted["in_flight"]
    assert ledger["tokens"]["dropped"]["no_signal"] >= replaced * 4, "a token at least of each of their samples"

    assert [step["reward/frac_zero_std"] for step in steps] == [0] * STEPS
    rewards: dict[int, set[float]] = {}
    for file in sorted((folder / "runs/dapo/rows").glob("*.parquet")):
        for record in pq.read_table(file).to_pylist():
            rewards.setdefault(record["row_id"], set()).add(record["reward"])
    assert len(rewards) == STEPS * 8, "no row twice"
    assert all(len(found) > 1 for found in rewards.values())


def test_divergence_from_a_reference_maker_begins_at_rounding_and_grows_in_the_loss_and_in_the_reward(
    finished: Callable[[str], Path],
) -> None:
    in_loss = metrics(finished("reinforce-plus-plus"), "reinforce-plus-plus")
    assert 0 < in_loss[0]["kl/k2"] < 1e-3, "the same weights computed in another way; with `reference: start` exactly 0"
    assert in_loss[-1]["kl/k2"] > 0.1
    assert all(step["kl"] == step["kl/k2"] and "reward/kl_penalty" not in step for step in in_loss)

    in_reward = metrics(finished("rloo"), "rloo")
    assert abs(in_reward[0]["kl/k1"]) < 5e-3
    assert in_reward[-1]["kl/k1"] > 0.1
    for step in in_reward:
        taken = 0.03 * step["kl/k1"] * step["response_length/mean"]
        assert step["reward/kl_penalty"] == pytest.approx(taken, rel=0.2, abs=1e-3)
