"""The losses of PPO against hand computation, and what the controller makes of rewards, values and a reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from buffer.records import SampledRow
from tests.fakes_trainer import make_row
from trainers.algorithms.base import TokenBatch
from trainers.algorithms.factory import build_algorithm
from trainers.batch import Totals
from trainers.config import Grpo, Ppo, ValueRegression
from trainers.estimates import Estimates, estimate
from trainers.planner import Batch


def tokens(current, *, labels=None, advantages=None, totals=None) -> TokenBatch:
    size = len(current)
    return TokenBatch(
        current=torch.tensor(current).requires_grad_(),
        proximal=torch.full((size,), -2.0),
        behaviour=torch.full((size,), -2.1),
        reference=None,
        entropy=torch.ones(size).requires_grad_(),
        advantages=torch.tensor(advantages or [0.0] * size),
        samples=torch.zeros(size, dtype=torch.int64),
        lengths=torch.full((size,), float(size)),
        totals=totals or Totals(size, 1, size),
        labels={name: torch.tensor(values) for name, values in (labels or {}).items()},
    )


def value_loss(clip):
    return build_algorithm(ValueRegression(type="value", clip=clip))


def test_the_value_loss_is_half_the_larger_of_the_plain_and_the_clipped_squared_error():
    # V, V_old, R: inside the clip; moved too far towards R (clipped error larger); moved too far away from R (plain larger)
    batch = tokens([0.1, 1.0, -1.0], labels={"values": [0.0, 0.0, 0.0], "returns": [1.0, 1.0, 1.0]})

    terms = value_loss(0.2)(batch)
    terms.loss.backward()

    assert float(terms.loss.detach()) == pytest.approx(0.5 * (0.9**2 + 0.8**2 + 2.0**2) / 3)
    assert batch.current.grad == pytest.approx(torch.tensor([-0.9, 0.0, -2.0]) / 3)
    assert float(terms.sums["value/clip_frac"]) == 1


def test_without_a_clip_the_value_loss_is_half_the_squared_error():
    batch = tokens([1.0, -1.0], labels={"values": [0.0, 0.0], "returns": [1.0, 1.0]})

    terms = value_loss(None)(batch)

    assert float(terms.loss.detach()) == pytest.approx(0.5 * 4 / 2)
    assert float(terms.sums["value/clip_frac"]) == 0


def test_the_value_loss_is_divided_by_the_tokens_of_the_whole_minibatch():
    batch = tokens([0.0], labels={"values": [0.0], "returns": [1.0]}, totals=Totals(8, 2, 0))

    assert float(value_loss(0.2)(batch).loss.detach()) == pytest.approx(0.5 / 8)


def test_the_policys_loss_is_that_of_grpo_without_its_penalty():
    batch = tokens([-1.5, -2.5, -2.0], advantages=[1.0, -1.0, 0.5])
    shared = {"clip_low": 0.1, "clip_high": 0.3, "entropy_coef": 0.01, "normalise": "sequence"}

    found = build_algorithm(Ppo(type="ppo", kl_coef=0.3, **shared))(batch)

    expected = build_algorithm(Grpo(type="grpo", kl_coef=0.0, **shared))(batch)
    assert float(found.loss.detach()) == float(expected.loss.detach())
    assert found.sums.keys() == expected.sums.keys()
    assert not build_algorithm(Ppo(type="ppo", kl_coef=0.3)).needs_reference


def batch(*rows: SampledRow, reference: list[list[float]] | None = None) -> Batch:
    columns = [dict(row.columns) for row in rows]
    for row, values in zip(columns, reference or [], strict=False):
        row["reference"] = {"reference_logprobs": np.array(values, np.float32)}
    return Batch(rows, columns, ages=[0] * len(rows))


def estimated(given: Batch, values: list[list[float]], masks=None, **options) -> Estimates:
    settings = {"type": "ppo", "kl_coef": 0.0, "whiten_advantages": False, "lam": 1.0} | options
    masks = masks or [np.ones(row.size, bool) for row in given.rewards]
    return estimate(Ppo(**settings), given, given.rewards, masks, [np.array(v, np.float32) for v in values])


def test_returns_are_advantages_above_the_values_and_each_row_gets_its_own():
    given = batch(make_row(0, rewards=(1.0,), lengths=(2,)), make_row(1, rewards=(0.0, 2.0), lengths=(1, 1)))

    found = estimated(given, [[0.25, 0.5], [0.5, 1.0]])

    assert [a.tolist() for a in found.advantages] == [[0.75, 0.5], [-0.5, 1.0]]
    assert [r.tolist() for r in found.labels["returns"]] == [[1.0, 1.0], [0.0, 2.0]]
    assert [v.tolist() for v in found.labels["values"]] == [[0.25, 0.5], [0.5, 1.0]]
    assert found.mean_return == 1.0


def test_kl_to_the_reference_is_taken_from_the_reward_of_its_own_token():
    # behaviour log-probs are -0.5: KL by k1 is 0.5, then -0.5
    given = batch(make_row(0, rewards=(1.0,), lengths=(2,)), reference=[[-1.0, 0.0]])

    found = estimated(given, [[0.0, 0.0]], kl_coef=0.1, lam=0.0)

    assert found.advantages[0] == pytest.approx([-0.05, 1.05])
    found = estimated(given, [[0.0, 0.0]], kl_coef=0.1, kl_estimator="k2")
    assert found.advantages[0] == pytest.approx([1.0 - 2 * 0.0125, 1.0 - 0.0125])


def test_a_truncated_sample_ends_or_goes_on_being_worth_its_last_value():
    given = batch(make_row(0, rewards=(1.0, 1.0), lengths=(1, 1), finish=(0, 1)))

    assert estimated(given, [[0.25, 0.25]]).advantages[0].tolist() == [0.75, 0.75]
    assert estimated(given, [[0.25, 0.25]], bootstrap_truncated=True).advantages[0].tolist() == [0.75, 1.0]


def test_whitening_and_figures_leave_masked_samples_out():
    given = batch(make_row(0, rewards=(1.0, 9.0), lengths=(2, 1)), make_row(1, rewards=(3.0,), lengths=(2,)))
    masks = [np.array([True, False]), np.array([True])]

    found = estimated(given, [[0.0] * 3, [0.0] * 2], masks, whiten_advantages=True)

    assert np.concatenate(found.advantages) == pytest.approx([-1, -1, 0, 1, 1])
    assert found.mean_return == 2.0
    assert estimated(given, [[0.0] * 3, [0.0] * 2], masks).advantages[0].tolist() == [1.0, 1.0, 0.0]


def test_a_reference_that_does_not_fit_its_row_is_refused_with_the_row_id():
    with pytest.raises(ValueError, match="row 7: the reference has 1 log-probs for 5 response tokens"):
        estimated(batch(make_row(7), reference=[[-1.0]]), [[0.0] * 5], kl_coef=0.1)


def test_token_rewards_stand_at_their_tokens_and_the_rest_of_the_reward_at_the_last():
    given = batch(make_row(0, rewards=(4.0, 2.0), lengths=(3, 1)), make_row(1, rewards=(1.0,), lengths=(2,)))
    given.columns[0]["reward"] = {**given.columns[0]["reward"], "token_rewards": np.array([1, -2, 3, 2], np.float32)}

    found = estimated(given, [[0.0] * 4, [0.0] * 2], lam=0.0)

    assert [row.tolist() for row in found.advantages] == [[1, -2, 3 + 2, 2], [0, 1]]
    assert estimated(given, [[0.0] * 4, [0.0] * 2]).labels["returns"][0].tolist() == [4, 3, 5, 2]


def test_token_rewards_that_do_not_fit_their_row_are_refused_with_the_row_id():
    given = batch(make_row(7))
    given.columns[0]["reward"] = {**given.columns[0]["reward"], "token_rewards": np.zeros(2, np.float32)}
    with pytest.raises(ValueError, match="row 7: 2 token rewards for 5 response tokens"):
        estimated(given, [[0.0] * 5])
