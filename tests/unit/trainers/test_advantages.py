from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainers.algorithms.advantages import (
    checked_rewards,
    group_relative,
)


def group_advantages(rewards, *, scale, mask=None):
    values = checked_rewards(rewards)
    kept = np.ones(values.shape, bool) if mask is None else mask
    return group_relative([values], [kept], [np.ones(values.size)], scale="group" if scale else "none")[0]


def test_rewards_are_centred_and_divided_by_the_sample_deviation():
    advantages = group_advantages(np.array([1.0, 0.0, 0.0, 1.0]), scale=True)

    np.testing.assert_allclose(advantages, np.array([1, -1, -1, 1]) * 0.5 / np.sqrt(1 / 3), rtol=1e-5)
    assert advantages.dtype == np.float32


def test_without_scaling_rewards_are_only_centred():
    assert group_advantages(np.array([3.0, 0.0, 0.0]), scale=False).tolist() == [2.0, -1.0, -1.0]


@given(st.floats(-1e6, 1e6), st.integers(1, 9), st.booleans())
def test_equal_rewards_give_exactly_zero(reward, samples, scale):
    assert group_advantages(np.full(samples, reward), scale=scale).tolist() == [0.0] * samples


def test_masked_samples_get_zero_and_do_not_count():
    mask = np.array([True, True, False])

    assert group_advantages(np.array([1.0, 3.0, 100.0]), scale=False, mask=mask).tolist() == [-1.0, 1.0, 0.0]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_reward_that_is_not_finite_is_refused_by_its_sample(bad):
    with pytest.raises(ValueError, match=f"reward of sample 1 is {bad}"):
        group_advantages(np.array([0.0, bad]), scale=True)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=8), st.randoms(use_true_random=False))
def test_the_order_of_samples_does_not_matter(rewards, random):
    order = list(range(len(rewards)))
    random.shuffle(order)
    values = np.array(rewards)

    np.testing.assert_allclose(
        group_advantages(values, scale=True)[order], group_advantages(values[order], scale=True), rtol=1e-4, atol=1e-4
    )
