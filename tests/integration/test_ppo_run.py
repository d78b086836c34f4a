"""PPO with its four roles through the command line: real Ray, real vLLM, real Megatron-core, a tiny model.

Beside the functions of its config a process reward model scores each token, at a weight that leaves learning to the functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForTokenClassification

from tests import command_line
from tests.command_line import assert_nothing_left, lines, processes_of, status
from topology.models import resolve_model

FOUR_ROLES = str(Path(__file__).resolve().parents[2] / "configs/ppo-four-roles.yaml")
NAME = "ppo-four-roles"
STEPS, MORE = 15, 2
PROCESS = (
    "makers.process={kind: reward_model, granularity: token, model: {path: tiny-llama-process-reward}, dtype: float32}"
)
WEIGHT = 0.05
MODELS = f"makers.reward.models=[{{group: process, weight: {WEIGHT}, reduce: sum, per_token: true}}]"

pytestmark = pytest.mark.timeout(400)


def tandem(folder: Path, *args: str) -> None:
    done = command_line.tandem(folder, *args)
    assert done.returncode == 0, f"{args} exited with {done.returncode}\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run, and its resumption from the checkpoint of its last step."""
    folder = tmp_path_factory.mktemp("finished")
    settings = (f"trainers.policy.steps={STEPS}", "checkpoint.every=null", PROCESS, MODELS)
    tandem(folder, "run", FOUR_ROLES, *(part for setting in settings for part in ("--set", setting)))
    tandem(folder, "resume", f"runs/{NAME}", "--set", f"trainers.policy.steps={STEPS + MORE}")
    yield folder
    for process in processes_of(folder / "runs"):
        process.kill()


@pytest.fixture(scope="module")
def steps(finished: Path) -> list[dict[str, Any]]:
    return lines(finished / "runs" / NAME / "metrics.jsonl")


def test_policy_critic_reference_and_reward_are_actors_of_their_own(finished: Path) -> None:
    found = status(finished, NAME)
    assert (found["state"], found["step"]) == ("done", STEPS + MORE)
    assert [actor["name"] for actor in found["actors"]] == [
        "buffer",
        "weights",
        "trainer/policy",
        "trainer/policy/rank/0",
        "trainer/critic",
        "trainer/critic/rank/0",
        "maker/rollout/0",
        "maker/reference/0",
        "maker/reward/0",
        "maker/process/0",
    ]
    assert_nothing_left(finished / "runs" / NAME)


def test_the_reward_rises(steps: list[dict[str, Any]]) -> None:
    rewards = [step["reward/mean"] for step in steps]
    assert fmean(rewards[STEPS - 3 : STEPS]) > fmean(rewards[:3]) + 0.25, rewards


def test_the_critic_learns_what_returns_to_expect(steps: list[dict[str, Any]]) -> None:
    """Its values start at 0. What they explain of the returns is little while the policy changes, but not nothing."""
    assert all(math.isfinite(step["value/loss"]) and step["value/grad_norm"] > 0 for step in steps)
    assert steps[0]["value/explained_variance"] == 0
    assert max(step["value/explained_variance"] for step in steps[5:STEPS]) > 0.02


def test_divergence_from_the_reference_is_taken_from_the_reward(steps: list[dict[str, Any]]) -> None:
    """The same weights in vLLM and in the reference: nothing but rounding in the first step, and more as they part."""
    assert abs(steps[0]["kl"]) < 0.02
    assert steps[STEPS - 1]["kl"] > 0.1
    for step in steps:
        assert step["reward/kl_penalty"] == pytest.approx(
            0.02 * step["kl"] * step["response_length/mean"], rel=0.2, abs=1e-3
        )


def test_the_returns_have_each_tokens_reward_at_its_own_token(finished: Path, steps: list[dict[str, Any]]) -> None:
    """In the first step all values are 0, so a return is what is left of the rewards, discounted with gamma * lambda.

    KL is below 0.02 there, and `kl_coef` makes no more of it than the tolerance.
    """
    rows = pq.read_table(finished / "runs" / NAME / "rows/step-000001.parquet").to_pylist()
    path = resolve_model("tiny-llama-process-reward")
    model = AutoModelForTokenClassification.from_pretrained(path, dtype=torch.float32)
    where_they_stand, at_the_end = [], []
    for row in rows:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row["prompt_ids"] + row["response_ids"]])).logits
        own = WEIGHT * logits[0, len(row["prompt_ids"]) :, 0].numpy().astype(np.float64)
        last = np.zeros_like(own)
        last[-1] = row["reward"] - own.sum()
        where_they_stand += returns(own + last, 0.95)
        last[-1] = row["reward"]
        at_the_end += returns(last, 0.95)
    assert steps[0]["value/returns"] == pytest.approx(np.mean(where_they_stand), abs=2e-3)
    assert abs(np.mean(at_the_end) - np.mean(where_they_stand)) > 0.02, "else this test would say nothing"


def returns(rewards: np.ndarray, discount: float) -> list[float]:
    """Of each token: its reward and the discounted ones after it."""
    found = [0.0]
    for reward in rewards[::-1]:
        found.append(reward + discount * found[-1])
    return found[:0:-1]


def test_every_step_is_within_the_staleness_bound_and_has_fewer_than_60_figures(steps: list[dict[str, Any]]) -> None:
    assert [step["step"] for step in steps] == list(range(1, STEPS + MORE + 1))
    assert all(step["staleness/max"] <= 1 and len(step) < 60 for step in steps)
    assert all(step["mismatch/kl"] is None or step["mismatch/kl"] < 0.02 for step in steps)


def test_the_ledger_closes(finished: Path) -> None:
    ledger = status(finished, NAME)["ledger"]
    for counted in (ledger, ledger["tokens"]):
        assert counted["admitted"] == counted["trained"] + sum(counted["dropped"].values()) + counted["in_flight"]


def test_a_resumed_critic_goes_on_with_what_it_had_learnt(finished: Path, steps: list[dict[str, Any]]) -> None:
    """A new critic says 0 of everything, and 0 explains exactly nothing."""
    checkpoint = finished / "runs" / NAME / "checkpoints" / f"step-{STEPS:06d}"
    assert (checkpoint / "trainer" / "model.json").is_file()
    assert (checkpoint / "critic" / "model.json").is_file()
    assert steps[STEPS]["value/explained_variance"] != 0


def test_the_policy_is_exported(finished: Path) -> None:
    tandem(finished, "export", f"runs/{NAME}", "exported")
    from transformers import AutoModelForCausalLM

    names = dict(AutoModelForCausalLM.from_pretrained(finished / "exported").named_parameters())
    assert "score.weight" not in names
    assert "lm_head.weight" in names
