"""The Megatron critic against the plain-torch reference, on tiny models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.ranks import save
from tests.rollouts import rollout_columns
from topology.models import resolve_model
from trainers.batch import RowShape, StepPlan, plan_step
from trainers.config import CriticConfig
from trainers.learner import Rendezvous
from trainers.rank import TrainerRank

TOLERANCE = 1e-5  # relative, in float32
STEPS = 10

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(5)  # no gradient nearly cancels out: their rounding stays well below the bound
    return [rollout_columns(rng, prompt, responses) for prompt, responses in ((5, [3, 1, 4]), (9, [2, 6, 1]))]


@contextmanager
def critic(kind: str, model: str = "tiny-llama", clip: float | None = 0.2, **backend: Any) -> Iterator[TrainerRank]:
    config = CriticConfig(
        algorithm={"type": "value", "clip": clip},
        backend={"type": kind, "dtype": "float32", "threads": 1, **backend},
        # eps well above the rounding of the gradients: else Adam's first step is their sign, noise included
        optimizer={"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4},
    )
    made = TrainerRank(
        config,
        model_path=str(resolve_model(model)),
        rendezvous=Rendezvous(rank=0, world_size=1, address="", timeout=30.0),
        bucket_bytes=64 << 10,
        seed=0,
        steps=STEPS,
    )
    made.start()
    try:
        yield made
    finally:
        made.close()


def plan(rows: list[dict[str, np.ndarray]], *, old: list[np.ndarray] | None = None, **more: Any) -> StepPlan:
    """Returns that differ from token to token; `old` values are 0 unless given."""
    rng = np.random.default_rng(1)
    tokens = [row["response_ids"].size for row in rows]
    settings: dict[str, Any] = {"step": 1, "micro_batch_tokens": 12, "share_prompt": True} | more
    made = plan_step(
        version=None,
        shapes=[RowShape.of(row) for row in rows],
        advantages=[np.zeros(count, np.float32) for count in tokens],
        masks=[np.ones(row["response_offsets"].size - 1, bool) for row in rows],
        max_response_tokens=8,
        **settings,
    )
    returns = tuple(rng.normal(1.0, 0.5, count).astype(np.float32) for count in tokens)
    values = tuple(old or [np.zeros(count, np.float32) for count in tokens])
    return replace(made, labels={"returns": returns, "values": values})


def gradients(made: TrainerRank) -> dict[str, torch.Tensor]:
    return dict(made.learner.policy.gradients())


def weights(made: TrainerRank) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in made.learner.weights()}


def worst_error(found: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    assert found.keys() == reference.keys()
    return max(float((found[name] - value).norm() / value.norm()) for name, value in reference.items())


@pytest.mark.parametrize("family", ["tiny-llama", "tiny-qwen2", "tiny-qwen3"])
def test_values_loss_gradients_and_weights_equal_plain_torch(family, rows):
    """The second step is compared: before the first the head is zero, and no gradient passes through it."""
    found = {}
    for kind in ("torch", "megatron"):
        with critic(kind, family) as made:
            made.train_step(plan(rows, share_prompt=kind == "megatron"), *rows)
            step = plan(rows, step=2, share_prompt=kind == "megatron")
            values = made.values(step, *rows).rows
            found[kind] = values, made.train_step(step, *rows), gradients(made), weights(made)

    (values, result, gradient, weight), reference = found["megatron"], found["torch"]
    assert np.concatenate(values) == pytest.approx(np.concatenate(reference[0]), rel=1e-4, abs=1e-6)
    assert np.ptp(np.concatenate(values)) > 0.01
    assert result.loss == pytest.approx(reference[1].loss, rel=TOLERANCE)
    assert result.grad_norm == pytest.approx(reference[1].grad_norm, rel=TOLERANCE)
    assert result.metrics["value/clip_frac"] == reference[1].metrics["value/clip_frac"]
    assert worst_error(gradient, reference[2]) < TOLERANCE
    assert worst_error(weight, reference[3]) < TOLERANCE


@pytest.mark.parametrize("kind", ["torch", "megatron"])
def test_a_critic_starts_with_the_policys_body_and_values_of_zero(kind, rows):
    with critic(kind) as made:
        found = made.values(plan(rows, share_prompt=kind == "megatron"), *rows)
        names = weights(made)

    assert found.data_parallel_rank == 0
    assert [values.tolist() for values in found.rows] == [[0.0] * 8, [0.0] * 9]
    assert names["score.weight"].shape == (1, 128)
    assert "lm_head.weight" not in names


def test_a_value_is_of_the_state_before_its_token(rows):
    """Other tokens change the values behind them, and not their own."""
    changed = [dict(rows[0], response_ids=rows[0]["response_ids"].copy())]
    changed[0]["response_ids"][5] += 1  # the second token of the third sample
    with critic("megatron") as made:
        made.train_step(plan(rows), *rows)
        before, after = (made.values(plan(some), *some).rows[0] for some in (rows[:1], changed))

    assert np.flatnonzero(np.abs(after - before) > 1e-6).tolist() == [6, 7]


def test_the_split_into_micro_batches_changes_no_gradient(rows):
    found = []
    for budget in (8, 1000):
        with critic("megatron") as made:
            made.train_step(plan(rows), *rows)
            made.train_step(plan(rows, step=2, micro_batch_tokens=budget), *rows)
            found.append(gradients(made))

    assert worst_error(*found) < TOLERANCE


def test_training_brings_the_values_to_the_returns(rows):
    losses = []
    with critic("megatron", clip=None) as made:
        for step in range(1, STEPS + 1):
            losses.append(made.train_step(plan(rows, step=step), *rows).loss)

    assert losses[-1] < 0.3 * losses[0]


def test_values_that_were_moved_beyond_the_clip_are_counted_and_stay_there(rows):
    """Of two minibatches the old values are those of the plan, whatever the first has changed."""
    old = [np.full(8, 5.0, np.float32), np.full(9, 5.0, np.float32)]
    with critic("megatron", clip=0.5) as made:
        result = made.train_step(plan(rows, old=old, minibatches=2), *rows)

    # V = 0 and R about 1 are both far below V_old - c = 4.5: the clipped error is the larger one everywhere
    assert result.metrics["value/clip_frac"] == 1.0
    assert result.grad_norm == 0.0


def test_a_restored_critic_continues_bit_by_bit(rows, tmp_path):
    with critic("megatron") as made:
        for step in (1, 2):
            made.train_step(plan(rows, step=step), *rows)
        save(made, str(tmp_path / "two"))
        made.train_step(plan(rows, step=3), *rows)
        expected = weights(made)

    with critic("megatron") as made:
        made.restore(str(tmp_path / "two"))
        made.train_step(plan(rows, step=3), *rows)
        found = weights(made)

    assert all(torch.equal(found[name], value) for name, value in expected.items())
