"""Advantages of PPO against hand computation and against a plain loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainers.algorithms.gae import (
    explained_variance,
    generalised_advantages,
    kl_per_token,
    token_rewards,
    whitened,
)
from trainers.algorithms.grpo import kl_estimate


def advantages(rewards, values, offsets, *, beyond=None, gamma=1.0, lam=1.0) -> np.ndarray:
    ends = np.zeros(len(offsets) - 1) if beyond is None else np.array(beyond)
    return generalised_advantages(
        np.array(rewards, np.float32), np.array(values, np.float32), ends, np.array(offsets), gamma=gamma, lam=lam
    )


def test_advantages_of_two_samples_by_hand():
    # Sample 0: d2 = 1 - 0.5 = 0.5, d1 = 0.9 * 0.5 - 0.4 = 0.05, d0 = 0.9 * 0.4 - 0.2 = 0.16; gamma * lam = 0.45
    # Sample 1: d0 = -1 - 0.3 = -1.3
    found = advantages([0, 0, 1, -1], [0.2, 0.4, 0.5, 0.3], [0, 3, 4], gamma=0.9, lam=0.5)

    assert found == pytest.approx([0.16 + 0.45 * (0.05 + 0.45 * 0.5), 0.05 + 0.45 * 0.5, 0.5, -1.3])


def test_with_lambda_0_an_advantage_looks_one_token_ahead_and_with_1_to_the_end():
    rewards, values = [0, 0, 2], [1.0, 3.0, 4.0]

    assert advantages(rewards, values, [0, 3], lam=0.0) == pytest.approx([2, 1, -2])
    assert advantages(rewards, values, [0, 3], lam=1.0) == pytest.approx([1, -1, -2])


def test_what_lies_beyond_the_end_of_a_sample_counts_as_its_last_following_value():
    assert advantages([1, 1], [0.5, 0.5], [0, 1, 2], beyond=[0.0, 0.4], gamma=0.5) == pytest.approx([0.5, 0.7])


def plain_loop(rewards, values, beyond, offsets, gamma, lam):
    found = np.zeros(len(rewards))
    for i in range(len(offsets) - 1):
        following, carried = beyond[i], 0.0
        for t in reversed(range(offsets[i], offsets[i + 1])):
            delta = rewards[t] + gamma * following - values[t]
            carried = delta + gamma * lam * carried
            found[t], following = carried, values[t]
    return found


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6), st.floats(0.1, 1.0), st.floats(0.0, 1.0), st.integers(0, 9999)
)
def test_all_samples_at_once_give_what_a_loop_over_each_gives(lengths, gamma, lam, seed):
    rng = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    rewards, values = rng.normal(size=(2, offsets[-1])).astype(np.float32)
    beyond = rng.normal(size=len(lengths))

    found = generalised_advantages(rewards, values, beyond, offsets, gamma=gamma, lam=lam)

    assert found.dtype == np.float32
    assert found == pytest.approx(plain_loop(rewards, values, beyond, offsets, gamma, lam), rel=1e-5, abs=1e-5)


def test_a_samples_reward_stands_at_its_last_token():
    found = token_rewards(np.array([0.5, -1.0], np.float32), np.array([0, 3, 4]))

    assert found.tolist() == [0, 0, 0.5, -1.0]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_of_arrays_is_kl_of_tensors(estimator):
    policy, reference = np.random.default_rng(0).normal(-2, 1, size=(2, 20)).astype(np.float32)

    found = kl_per_token(policy, reference, estimator)

    expected = kl_estimate(torch.tensor(policy), torch.tensor(reference), estimator)
    assert found == pytest.approx(expected.numpy(), rel=1e-5, abs=1e-6)


def test_k1_is_the_plain_difference_of_log_probs():
    found = kl_per_token(np.array([-1.0, -2.0], np.float32), np.array([-1.5, -1.0], np.float32), "k1")

    assert found.tolist() == [0.5, -1.0]


def test_whitening_is_over_the_valid_tokens_and_leaves_the_others_at_0():
    found = whitened(np.array([1.0, 3.0, 100.0], np.float32), np.array([True, True, False]))

    assert found == pytest.approx([-1.0, 1.0, 0.0])


def test_whitening_of_equal_advantages_is_0_and_of_none_is_empty():
    assert whitened(np.full(3, 2.0, np.float32), np.ones(3, bool)).tolist() == [0, 0, 0]
    assert whitened(np.zeros(0, np.float32), np.zeros(0, bool)).size == 0


def test_explained_variance_of_perfect_constant_and_wrong_values():
    returns = np.array([0.0, 1.0, 2.0], np.float32)

    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(np.full(3, 7.0, np.float32), returns) == pytest.approx(0.0)
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)
    assert explained_variance(returns, np.ones(3, np.float32)) is None
