"""Staleness on the real parts: vLLM, reward processes and Megatron, asynchronous, against a loop that is plainly synchronous.

`max_staleness: 0` with `every: 1` is on-policy training: the same prompts, tokens and rewards, and the same log-probs,
losses, gradient norms and weights but for the last bits. Both loops run the model in float32 on one thread, and a sample's
random numbers come from its row's seed alone. Mostly every bit is equal; not always, because which samples share an
engine step depends on when they arrive, and on CPU a step of a single token takes another matrix kernel (seen: 1.4e-6 in
4 of 59 log-probs).
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from buffer.columns import Columns
from buffer.records import Prompt
from buffer.rows import derive_seed
from makers.engines.engine import GroupRequest, Sample
from makers.prompt_ids import PromptEncoder
from makers.prompts import take
from makers.reward import load_decoder
from makers.rewards.builtin import build_builtin
from makers.rollout import _sample_seed
from tests.local_runtime import LocalRun, RankProcess, run_locally
from topology.config import RunConfig, parse_config
from topology.models import resolve_model
from topology.roles import POLICY, rollout_of
from trainers.batch import RowShape, StepPlan, plan_step
from trainers.learner import StepResult
from weights.packing import unpack

pytestmark = pytest.mark.timeout(240)  # mostly imports, on a busy machine
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
    rollouts: list[list[Columns]] = field(default_factory=list)
    rewards: list[list[np.ndarray]] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)
    weights: dict[str, Any] = field(default_factory=dict)


def train_synchronously(config: RunConfig, rank: RankProcess) -> Synchronous:
    """Generate, score, train, load the weights; nothing at the same time as anything else."""
    from makers.engines.vllm_core import VllmCore

    path = str(resolve_model(config.model.path))
    groups, steps = config.trainers[POLICY].groups_per_step, config.trainers[POLICY].steps
    prompts = take(config.prompts, steps * groups)
    encoder, score = PromptEncoder(path), scorer(config, path)
    rank.load(config)
    engine = VllmCore(rollout_of(config).engine, path, seed=config.seed, recompute=True, version=0, sleeps=False)
    seen = Synchronous()
    for version in range(steps):
        numbers = range(version * groups, (version + 1) * groups)
        requests = {number: request(config, number, encoder.encode(prompts[number])) for number in numbers}
        samples = generate(engine, requests)
        rollouts = [columns_of(requests[number], samples[number], version) for number in numbers]
        rewards = [score(samples[number], prompts[number]) for number in numbers]
        seen.results.append(rank.train_step(plan_of(config, version, rollouts, rewards), *rollouts))
        manifest, *buckets = rank.export(version + 1)
        seen.weights = unpack(manifest, buckets)
        engine.load(version + 1, seen.weights)
        seen.prompts.append([prompts[number].id for number in numbers])
        seen.rollouts.append(rollouts)
        seen.rewards.append(rewards)
    engine.close()
    return seen


def request(config: RunConfig, number: int, prompt_ids: list[int]) -> GroupRequest:
    sampling = rollout_of(config).sampling
    seeds = [_sample_seed(derive_seed(config.seed, number, 0), sample) for sample in range(sampling.n)]
    return GroupRequest(prompt_ids, seeds, sampling.temperature, sampling.max_tokens, sampling.stop)


def generate(engine: Any, requests: dict[int, GroupRequest]) -> dict[int, list[Sample]]:
    for number, group in requests.items():
        engine.add(number, group)
    finished: dict[int, list[Sample]] = {}
    while engine.running:
        finished |= dict(engine.step())
    return finished


def columns_of(group: GroupRequest, samples: list[Sample], version: int) -> Columns:
    lengths = [sample.token_ids.size for sample in samples]
    return {
        "prompt_ids": np.array(group.prompt_ids, np.int32),
        "response_ids": np.concatenate([sample.token_ids for sample in samples]),
        "response_offsets": np.cumsum([0, *lengths]),
        "behaviour_logprobs": np.concatenate([sample.logprobs for sample in samples]),
        "policy_versions": np.full(sum(lengths), version, np.int32),
        "finish_reasons": np.array([sample.truncated for sample in samples], np.int8),
        "temperatures": np.full(len(samples), group.temperature, np.float32),
    }


def scorer(config: RunConfig, model_path: str) -> Callable[[list[Sample], Prompt], np.ndarray]:
    """The weighted sum of the config's reward functions, float32 [samples], in this process."""
    decode = load_decoder(model_path)
    functions = [(f.weight, build_builtin(f.name, f.options)) for f in config.makers["reward"].functions]

    def score(samples: list[Sample], prompt: Prompt) -> np.ndarray:
        texts = [decode(sample.token_ids.tolist()) for sample in samples]
        weighted = [weight * np.array(function(completions=texts, **prompt.fields)) for weight, function in functions]
        return np.sum(weighted, axis=0).astype(np.float32)

    return score


def plan_of(config: RunConfig, version: int, rollouts: list[Columns], rewards: list[np.ndarray]) -> StepPlan:
    """GRPO: a reward minus its group's mean, divided by its group's standard deviation."""
    sampling, backend = rollout_of(config).sampling, config.trainers[POLICY].backend
    centred = [group.astype(np.float64) - group.mean(dtype=np.float64) for group in rewards]
    advantages = [values / (values.std(ddof=1) + 1e-6) for values in centred]
    return plan_step(
        step=version + 1,
        version=version,
        shapes=[RowShape.of(columns) for columns in rollouts],
        advantages=[values.astype(np.float32) for values in advantages],
        masks=[np.ones(sampling.n, bool)] * len(rollouts),
        max_response_tokens=sampling.max_tokens,
        micro_batch_tokens=backend.micro_batch_tokens,
        share_prompt=backend.share_prompt,
        skip_zero_advantage=True,
    )


def test_max_staleness_0_is_synchronous_training(on_policy: LocalRun, rank: RankProcess) -> None:
    expected = train_synchronously(tiny(max_staleness=0), rank)
    assert [[row.prompt.id for row in rows] for rows in on_policy.batches] == expected.prompts
    for rows, rollouts, rewards in zip(on_policy.batches, expected.rollouts, expected.rewards, strict=True):
        for row, rollout, reward in zip(rows, rollouts, rewards, strict=True):
            found = dict(row.columns["rollout"])
            logprobs = rollout.pop("behaviour_logprobs")
            np.testing.assert_allclose(found.pop("behaviour_logprobs"), logprobs, rtol=1e-5, atol=1e-5)
            assert found.keys() == rollout.keys()
            for name, values in rollout.items():
                np.testing.assert_array_equal(found[name], values, err_msg=name, strict=True)
            np.testing.assert_array_equal(row.columns["reward"]["rewards"], reward, strict=True)
    for name in ("loss", "grad_norm"):
        wanted = [getattr(result, name) for result in expected.results]
        np.testing.assert_allclose([step[name] for step in on_policy.metrics], wanted, rtol=1e-4, atol=1e-6)
    assert_same_training(unpack(*on_policy.store.get(STEPS)), expected.weights, start_weights())


def start_weights() -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(resolve_model("tiny-llama") / "model.safetensors")


def assert_same_training(found: dict[str, Any], wanted: dict[str, Any], start: dict[str, Any]) -> None:
    """What training did to each tensor differs by less than a hundredth of it."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        moved = (tensor - start[name].float()).norm()
        assert (found[name] - tensor).norm() <= 0.01 * moved, name


def test_the_comparison_has_signal(on_policy: LocalRun) -> None:
    """Else equality would say little: rewards differ within groups, lengths differ, and the weights move."""
    rewards = np.array([[row.columns["reward"]["rewards"] for row in rows] for rows in on_policy.batches])
    lengths = [np.diff(row.columns["rollout"]["response_offsets"]) for rows in on_policy.batches for row in rows]
    assert (rewards.std(axis=2) > 0).mean() > 0.5
    assert len(np.unique(lengths)) > 5
    assert all(step["grad_norm"] > 0.01 for step in on_policy.metrics)
    before, after = unpack(*on_policy.store.get(STEPS - 1)), unpack(*on_policy.store.get(STEPS))
    assert not any(after[name].equal(tensor) for name, tensor in before.items())


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
