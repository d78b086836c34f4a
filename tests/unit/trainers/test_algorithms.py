"""Every policy-gradient algorithm against a hand computation on a few tokens, and what composes with them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from tests.fakes_trainer import make_row
from trainers.algorithms.advantages import estimator_of
from trainers.algorithms.base import TokenBatch
from trainers.algorithms.factory import build_algorithm
from trainers.batch import Totals
from trainers.config import AlgorithmConfig, TorchBackend, TrainerConfig
from trainers.planner import Batch, StepPlanner

GROUP_ALGORITHMS = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_plus_plus")


def configured(**fields):
    return TypeAdapter(AlgorithmConfig).validate_python(fields)


def tokens(ratios, advantages, samples, stale=None) -> TokenBatch:
    """Current policy = ratio times the proximal one, which is `stale` times the behaviour one."""
    count, proximal = len(ratios), torch.full((len(ratios),), -2.0)
    lengths = [float(samples.count(sample)) for sample in samples]
    return TokenBatch(
        current=(proximal + torch.tensor(ratios).log()).requires_grad_(),
        proximal=proximal,
        behaviour=proximal - torch.tensor(stale or [1.0] * count).log(),
        reference=None,
        entropy=torch.ones(count),
        advantages=torch.tensor(advantages),
        samples=torch.tensor(samples),
        lengths=torch.tensor(lengths),
        totals=Totals(count, len(set(samples)), 4),
    )


def loss_and_gradient(batch: TokenBatch, **config) -> tuple[float, list[float]]:
    loss = build_algorithm(configured(**config))(batch).loss
    loss.backward()
    assert batch.current.grad is not None
    return float(loss.detach()), batch.current.grad.tolist()


def advantages(rewards, *, masks=None, lengths=None, **config) -> list[list[float]]:
    rows = [np.array(row, np.float64) for row in rewards]
    kept = [np.ones(row.size, bool) for row in rows] if masks is None else [np.array(mask) for mask in masks]
    sizes = [np.ones(row.size, int) for row in rows] if lengths is None else [np.array(size) for size in lengths]
    return [row.tolist() for row in estimator_of(configured(**config))(rows, kept, sizes)]


def test_gspo_clips_the_geometric_mean_of_a_sample_and_its_gradient_is_that_of_the_mean():
    batch = tokens([1.1, 1.21, 2.0], [1.0, 1.0, 1.0], [0, 0, 1])

    loss, gradient = loss_and_gradient(batch, type="gspo", clip_low=0.2, clip_high=0.5)

    mean = math.sqrt(1.1 * 1.21)  # of sample 0; sample 1 is clipped at 1.5
    assert loss == pytest.approx(-(mean + 1.5) / 2)
    assert gradient == pytest.approx([-mean / 4, -mean / 4, 0.0])


def test_cispo_weighs_log_probs_with_the_clipped_ratio_so_that_no_token_loses_its_gradient():
    batch = tokens([0.5, 3.0], [1.0, 1.0], [0, 0])

    loss, gradient = loss_and_gradient(batch, type="cispo", clip_high=1.0)

    logs = [-2 + math.log(0.5), -2 + math.log(3.0)]
    assert loss == pytest.approx(-(0.5 * logs[0] + 2.0 * logs[1]) / 2)
    assert gradient == pytest.approx([-0.25, -1.0])


def test_dr_grpo_divides_by_the_budget_and_not_by_the_deviation():
    assert advantages([[3.0, 0.0, 0.0]], type="dr_grpo") == [[2.0, -1.0, -1.0]]
    loss, _ = loss_and_gradient(tokens([1.0, 1.0, 1.0], [2.0, 2.0, -1.0], [0, 0, 1]), type="dr_grpo")
    assert loss == pytest.approx(-(2 + 2 - 1) / (2 * 4))


def test_rloo_compares_a_sample_with_the_mean_of_the_others():
    assert advantages([[1.0, 2.0, 6.0]], type="rloo") == [[-3.0, -1.5, 4.5]]
    assert advantages([[1.0, 9.0, 3.0]], masks=[[True, False, True]], type="rloo") == [[-2.0, 0.0, 2.0]]


def test_reinforce_plus_plus_normalises_over_the_tokens_of_the_step():
    # rewards 1 (3 tokens) and 5 (1 token): mean 2, variance (3 * 1 + 9) / 4 = 3
    found = advantages([[1.0], [5.0]], lengths=[[3], [1]], type="reinforce_plus_plus")

    assert [value for row in found for value in row] == pytest.approx([-1 / math.sqrt(3), 3 / math.sqrt(3)], rel=1e-5)


def test_reinforce_plus_plus_with_a_baseline_takes_the_mean_of_the_group_off_first():
    found = advantages([[1.0, 3.0], [7.0, 7.0]], type="reinforce_plus_plus", baseline="group")

    assert found[0] == pytest.approx([-math.sqrt(2), math.sqrt(2)], rel=1e-5)
    assert found[1] == [0.0, 0.0]


def test_rewards_are_scaled_by_the_group_the_step_or_not_at_all():
    rewards = [[0.0, 2.0], [0.0, 4.0]]

    assert advantages(rewards, type="grpo", scale_rewards=False) == [[-1.0, 1.0], [-2.0, 2.0]]
    assert advantages(rewards, type="grpo", scale_rewards=True)[1] == pytest.approx(
        [-2 / math.sqrt(8), 2 / math.sqrt(8)]
    )
    over_step = np.std([0.0, 2.0, 0.0, 4.0], ddof=1)
    assert advantages(rewards, type="grpo", scale_rewards="batch")[1] == pytest.approx([-2 / over_step, 2 / over_step])


@pytest.mark.parametrize("name", [name for name in GROUP_ALGORITHMS if name != "reinforce_plus_plus"])
def test_equal_rewards_one_sample_and_all_truncated_give_no_signal(name):
    found = advantages([[0.1, 0.1, 0.1], [3.0], [1.0, 2.0]], masks=[[True] * 3, [True], [False] * 2], type=name)

    assert found == [[0.0] * 3, [0.0], [0.0] * 2]


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(GROUP_ALGORITHMS), st.permutations(range(4)), st.integers(0, 1000))
def test_the_order_of_samples_changes_no_advantage(name, order, seed):
    draw = np.random.default_rng(seed)
    rewards, lengths = draw.normal(size=4), draw.integers(1, 9, 4)
    whole = estimator_of(configured(type=name))([rewards], [np.ones(4, bool)], [lengths])[0]

    turned = estimator_of(configured(type=name))([rewards[order]], [np.ones(4, bool)], [lengths[order]])[0]

    np.testing.assert_allclose(turned, whole[order], rtol=1e-4, atol=1e-5)


CORRECTIONS = (
    {},
    {"truncate": {"level": "sequence"}},
    {"truncate": {"level": "geometric"}, "band": {"level": "token"}},
    {"band": {"level": "sequence", "low": 0.8, "high": 1.2}},
    {"mask_off_policy": 0.05},
    {"proximal": "interpolated", "interpolation": 0.5},
)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(GROUP_ALGORITHMS), st.sampled_from(CORRECTIONS), st.integers(0, 1000))
def test_micro_batches_of_whole_samples_add_up_to_the_step_whatever_their_order(name, corrections, seed):
    draw = np.random.default_rng(seed)
    samples = [0, 0, 0, 1, 2, 2]
    whole = tokens(
        draw.uniform(0.7, 1.5, 6).tolist(),
        np.repeat(draw.normal(size=3), [3, 1, 2]).astype(np.float32).tolist(),
        samples,
        draw.uniform(0.5, 3.0, 6).tolist(),
    )
    algorithm = build_algorithm(configured(type=name, corrections=corrections))
    loss = algorithm(whole).loss
    loss.backward()
    found = torch.zeros(6)
    total = 0.0

    for part in ([5, 4, 3], [2, 0, 1]):
        index = torch.tensor(part)
        names = ("proximal", "behaviour", "entropy", "advantages", "lengths")
        piece = replace(
            whole,
            current=whole.current.detach()[index].requires_grad_(),
            samples=torch.unique(whole.samples[index], return_inverse=True)[1],
            **{field: getattr(whole, field)[index] for field in names},
        )
        partial = algorithm(piece).loss
        partial.backward()
        found[index] = piece.current.grad
        total += float(partial.detach())

    assert total == pytest.approx(float(loss.detach()), rel=1e-4, abs=1e-5)
    torch.testing.assert_close(found, whole.current.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("corrections", "weights"),
    [
        ({"truncate": None}, [1, 1, 1]),
        ({"truncate": {"cap": 2.0}}, [0.5, 2, 1.5]),
        ({"truncate": {"level": "sequence", "cap": 9.0}}, [2, 2, 1.5]),
        ({"truncate": {"level": "geometric", "cap": 9.0}}, [math.sqrt(2), math.sqrt(2), 1.5]),
        ({"truncate": {"cap": 9.0}, "band": {"low": 0.6, "high": 3.0}}, [0, 0, 1.5]),
        ({"truncate": None, "band": {"level": "sequence", "low": 0.0, "high": 1.9}}, [0, 0, 1]),
        ({"truncate": None, "band": {"level": "geometric", "low": 1.45, "high": 9.0}}, [0, 0, 1]),
    ],
)
def test_corrections_weigh_and_mask_by_the_ratio_of_token_or_sample(corrections, weights):
    batch = tokens([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [0, 0, 1], stale=[0.5, 4.0, 1.5])

    _, gradient = loss_and_gradient(batch, type="grpo", corrections=corrections)

    assert gradient == pytest.approx([-weight / 3 for weight in weights])


def test_samples_that_went_off_policy_are_masked_where_their_advantage_is_negative():
    # behaviour - current: sample 0 by log 2 a token, sample 1 likewise, sample 2 not
    batch = tokens([1.0, 1.0, 1.0], [-1.0, 1.0, -1.0], [0, 1, 2], stale=[0.5, 0.5, 1.0])

    _, gradient = loss_and_gradient(batch, type="grpo", corrections={"truncate": None, "mask_off_policy": 0.5})

    assert gradient == pytest.approx([0, -1 / 3, 1 / 3])


def test_an_interpolated_proximal_policy_lies_between_behaviour_and_current():
    batch = tokens([2.0], [-1.0], [0], stale=[0.5])  # current is the behaviour policy again: every ratio is 1

    settings = {"proximal": "interpolated", "interpolation": 0.25}
    loss, gradient = loss_and_gradient(batch, type="grpo", corrections=settings)

    assert (loss, gradient) == (pytest.approx(1.0), [pytest.approx(1.0)])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"corrections": {"interpolation": 0.5}}, "go together: give both or neither"),
        ({"corrections": {"band": {"low": 2.0, "high": 1.0}}}, "low 2 must be below high 1"),
    ],
)
def test_corrections_that_nothing_reads_or_that_are_empty_are_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        configured(type="grpo", **fields)


def with_reference(*rows, frozen=None, **algorithm):
    config = TrainerConfig(algorithm=algorithm, backend=TorchBackend(type="torch"), steps=1)
    columns = [dict(row.columns) for row in rows]
    for row, values in zip(columns, frozen or [], strict=False):
        row["reference"] = {"reference_logprobs": np.array(values, np.float32)}
    return config, Batch(rows, columns, [0] * len(rows))


def planned(*rows, **algorithm):
    config, batch = with_reference(*rows, **algorithm)
    return config, StepPlanner(config, 8).plan(batch, 1, 0)


def test_kl_to_a_reference_maker_is_taken_off_the_reward_of_its_sample():
    row = make_row(0, rewards=(1.0, 1.0), lengths=(2, 1))  # behaviour log-probs are -0.5

    config, plan = planned(row, frozen=[[-1.5, -0.5, -0.5]], type="rloo", kl_coef=0.5)

    assert config.stages == ("rollout", "reward", "reference")
    assert plan.advantages[0] == pytest.approx([-0.5, 0.5])  # rewards 0.5 and 1


def test_the_kl_that_is_taken_off_rewards_is_a_metric_named_with_its_estimator():
    row = make_row(0, rewards=(1.0, 1.0), lengths=(2, 1), finish=(0, 1))
    settings = {"type": "rloo", "kl_coef": 0.5, "mask_truncated": True}

    config, batch = with_reference(row, frozen=[[-1.5, -1.0, -2.5]], **settings)

    # k1 1 and 0.5 in sample 0; 2 in sample 1, which is masked and still penalised
    found = StepPlanner(config, 8).kl_figures(batch)
    assert found == {"kl": 0.75, "kl/k1": 0.75, "reward/kl_penalty": pytest.approx(0.5 * 3.5 / 2)}


def test_the_column_of_a_reference_maker_goes_to_the_loss_that_reads_it():
    config, plan = planned(
        make_row(0, lengths=(2, 1)), frozen=[[-1.5, -1.0, -2.5]], type="grpo", kl_coef=0.5, reference="maker"
    )

    assert config.stages == ("rollout", "reward", "reference")
    assert plan.labels["reference"][0].tolist() == [-1.5, -1.0, -2.5]
    assert planned(make_row(0), type="grpo", reference="maker")[0].stages == ("rollout", "reward")


@pytest.mark.parametrize("name", GROUP_ALGORITHMS)
def test_a_reward_that_is_no_number_is_refused_with_the_rows_id(name):
    with pytest.raises(ValueError, match="row 7: reward of sample 1 is nan"):
        planned(make_row(7, rewards=(0.0, math.nan), lengths=(1, 1)), type=name)
