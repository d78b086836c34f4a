"""Staleness on the real parts: vLLM, reward processes and Megatron, asynchronous, against a loop that is plainly synchronous.

`max_staleness: 0` with `every: 1` is on-policy training, bit for bit: prompts, tokens, log-probs, rewards, losses,
gradient norms and final weights. In both loops the model runs in float32, and a sample's random numbers come from its
row's seed alone.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from buffer.rows import derive_seed
from makers.engines.engine import GroupRequest
from makers.prompt_ids import PromptEncoder
from makers.prompts import take
from makers.reward import load_decoder
from makers.rewards.builtin import build_builtin
from makers.rollout import _sample_seed
from tests.local_runtime import LocalRun, RankProcess, run_locally
from topology.config import RunConfig, parse_config
from topology.models import resolve_model
from topology.plan import POLICY, rollout_of
from trainers.batch import RowShape, plan_step
from weights.packing import unpack

pytestmark = pytest.mark.timeout(120)
TINY = Path(__file__).resolve().parents[2] / "configs/tiny.yaml"
STEPS = 4


def tiny(max_staleness: int) -> RunConfig:
    """configs/tiny.yaml in float32, with rewards a random model gets now and then, and samples of many lengths.

    The engine holds two groups of the four of a step, so groups enter while others are being generated.
    """
    data = copy.deepcopy(yaml.safe_load(TINY.read_text()))
    rollout, policy = data["makers"]["rollout"], data["trainers"]["policy"]
    rollout["engine"] |= {"dtype": "float32", "max_num_seqs": 8, "kv_cache_gib": 0.0625, "threads": 1}
    rollout["sampling"] |= {"max_tokens": 24, "stop": list("aeiou")}
    data["makers"]["reward"]["functions"] += [
        {"name": "regex", "weight": 0.5, "options": {"pattern": "[0-9]"}},
        {"name": "regex", "weight": 0.25, "options": {"pattern": "[A-Z]"}},
    ]
    policy["backend"] |= {"dtype": "float32", "threads": 1}
    policy["optimizer"]["lr"] = 2e-3
    policy["steps"] = STEPS
    data |= {"seed": 7, "buffer": {"max_staleness": max_staleness}}
    return parse_config(data)


@pytest.fixture(scope="module")
def rank() -> Iterator[RankProcess]:
    rank = RankProcess()
    yield rank
    rank.close()


@pytest.fixture(scope="module")
def on_policy(rank: RankProcess, tmp_path_factory: pytest.TempPathFactory) -> LocalRun:
    return train(tiny(max_staleness=0), rank, tmp_path_factory.mktemp("on_policy"))


def train(config: RunConfig, rank: RankProcess, folder: Path) -> LocalRun:
    rank.load(config)
    run = asyncio.run(run_locally(config, folder, rank))
    assert run.outcome == "done"
    return run


@dataclass
class Synchronous:
    """What the plain loop saw: one entry a step."""

    prompts: list[list[str]] = field(default_factory=list)
    rollouts: list[list[dict[str, np.ndarray]]] = field(default_factory=list)
    rewards: list[list[np.ndarray]] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    weights: dict[str, Any] = field(default_factory=dict)


def train_synchronously(config: RunConfig, rank: RankProcess) -> Synchronous:
    """Generate, score, train, load the weights; nothing at the same time as anything else."""
    from makers.engines.vllm_core import VllmCore

    path = str(resolve_model(config.model.path))
    maker, trainer = rollout_of(config), config.trainers[POLICY]
    groups = trainer.groups_per_step
    prompts = take(config.prompts, trainer.steps * groups)
    encoder, decode = PromptEncoder(path), load_decoder(path)
    functions = [(f.weight, build_builtin(f.name, f.options)) for f in config.makers["reward"].functions]
    rank.load(config)
    engine = VllmCore(maker.engine, path, seed=config.seed, recompute=True, version=0)
    seen = Synchronous()
    for step in range(1, trainer.steps + 1):
        numbers = range((step - 1) * groups, step * groups)
        for group in numbers:
            seeds = [_sample_seed(derive_seed(config.seed, group, 0), i) for i in range(maker.sampling.n)]
            request = GroupRequest(
                encoder.encode(prompts[group]), seeds, 1.0, maker.sampling.max_tokens, maker.sampling.stop
            )
            engine.add(group, request)
        finished: dict[int, Any] = {}
        while engine.running:
            finished |= dict(engine.step())
        rollouts, rewards, advantages = [], [], []
        for group in numbers:
            samples = finished[group]
            lengths = [sample.token_ids.size for sample in samples]
            rollouts.append(
                {
                    "prompt_ids": np.array(encoder.encode(prompts[group]), np.int32),
                    "response_ids": np.concatenate([sample.token_ids for sample in samples]),
                    "response_offsets": np.cumsum([0, *lengths]),
                    "behaviour_logprobs": np.concatenate([sample.logprobs for sample in samples]),
                    "policy_versions": np.full(sum(lengths), step - 1, np.int32),
                    "finish_reasons": np.array([sample.truncated for sample in samples], np.int8),
                    "temperatures": np.ones(maker.sampling.n, np.float32),
                    "temperatures": np.ones(len(samples), np.float32),
                }
            )
            texts = [decode(sample.token_ids.tolist()) for sample in samples]
            scores = [weight * np.array(f(completions=texts, **prompts[group].fields)) for weight, f in functions]
            rewards.append(sum(scores).astype(np.float32))
            centred = rewards[-1] - rewards[-1].astype(np.float64).mean()
            spread = centred.std(ddof=1)
            advantages.append((centred / (spread + 1e-6) if spread else 0 * centred).astype(np.float32))
        plan = plan_step(
            step=step,
            version=step - 1,
            shapes=[RowShape.of(columns) for columns in rollouts],
            advantages=advantages,
            masks=[np.ones(maker.sampling.n, bool)] * groups,
            max_response_tokens=maker.sampling.max_tokens,
            micro_batch_tokens=trainer.backend.micro_batch_tokens,
            share_prompt=True,
            skip_zero_advantage=True,
        )
        seen.results.append(rank.train_step(plan, *rollouts))
        manifest, *buckets = rank.export(step)
        seen.weights = unpack(manifest, buckets)
        engine.load(step, seen.weights)
        seen.prompts.append([prompts[group].id for group in numbers])
        seen.rollouts.append(rollouts)
        seen.rewards.append(rewards)
    engine.close()
    return seen


def test_max_staleness_0_is_synchronous_training_bit_for_bit(on_policy: LocalRun, rank: RankProcess) -> None:
    expected = train_synchronously(tiny(max_staleness=0), rank)
    assert [[row.prompt.id for row in rows] for rows in on_policy.batches] == expected.prompts
    for rows, rollouts, rewards in zip(on_policy.batches, expected.rollouts, expected.rewards, strict=True):
        for row, rollout, reward in zip(rows, rollouts, rewards, strict=True):
            assert row.columns["rollout"].keys() == rollout.keys()
            for name, values in rollout.items():
                np.testing.assert_array_equal(row.columns["rollout"][name], values, err_msg=name, strict=True)
            np.testing.assert_array_equal(row.columns["reward"]["rewards"], reward, strict=True)
    assert [step["loss"] for step in on_policy.metrics] == [result.loss for result in expected.results]
    assert [step["grad_norm"] for step in on_policy.metrics] == [result.grad_norm for result in expected.results]
    found = unpack(*on_policy.store.get(STEPS))
    assert found.keys() == expected.weights.keys()
    assert all(found[name].equal(tensor) for name, tensor in expected.weights.items())


def test_the_comparison_has_signal(on_policy: LocalRun) -> None:
    """Else equality would say little: rewards differ within groups, lengths differ, and the weights move."""
    rewards = np.array([[row.columns["reward"]["rewards"] for row in rows] for rows in on_policy.batches])
    lengths = [np.diff(row.columns["rollout"]["response_offsets"]) for rows in on_policy.batches for row in rows]
    assert (rewards.std(axis=2) > 0).mean() > 0.5
    assert len(np.unique(lengths)) > 5
    assert all(step["grad_norm"] > 0.01 for step in on_policy.metrics)
    start, end = unpack(*on_policy.store.get(STEPS - 1)), unpack(*on_policy.store.get(STEPS))
    assert all(not end[name].equal(tensor) for name, tensor in start.items())


def test_max_staleness_0_trains_each_step_on_tokens_of_its_own_version_only(on_policy: LocalRun) -> None:
    for version, rows in enumerate(on_policy.batches):
        for row in rows:
            np.testing.assert_array_equal(np.unique(row.columns["rollout"]["policy_versions"]), [version])
    assert [step["staleness/max"] for step in on_policy.metrics] == [0] * STEPS


def test_max_staleness_1_never_trains_on_a_token_older_than_one_version(rank: RankProcess, tmp_path: Path) -> None:
    run = train(tiny(max_staleness=1), rank, tmp_path)
    for version, rows in enumerate(run.batches):
        made = np.concatenate([row.columns["rollout"]["policy_versions"] for row in rows])
        assert version - 1 <= made.min() <= made.max() <= version
    assert max(step["staleness/max"] for step in run.metrics) == 1
