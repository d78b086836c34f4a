"""Scores of functions on one scale, and the soft overlong penalty."""

from __future__ import annotations

import numpy as np
import pytest

from makers.config import RewardMaker
from makers.rewards.builtin import build_builtin
from makers.rewards.scale import Running, within_group


def test_within_a_group_scores_have_mean_0_and_deviation_1():
    scaled = within_group(np.array([1.0, 2.0, 3.0, 6.0]))
    np.testing.assert_allclose(scaled, np.array([-2, -1, 0, 3]) / np.sqrt(3.5), atol=1e-5)


@pytest.mark.parametrize("scores", [[0.1, 0.1, 0.1], [7.0]])
def test_a_group_of_equal_scores_or_of_one_sample_is_exactly_0(scores):
    assert within_group(np.array(scores)).tolist() == [0.0] * len(scores)


def test_the_running_scale_is_the_z_score_against_all_scores_so_far():
    running, random = Running(), np.random.default_rng(3)
    seen = np.empty(0)
    for size in (1, 4, 8, 3):
        row = random.normal(1e3, 2.0, size)
        seen = np.concatenate([seen, row])
        np.testing.assert_allclose(running(row), (row - seen.mean()) / (seen.std() + 1e-6), atol=1e-6)


def test_a_running_scale_that_has_seen_equal_scores_gives_0():
    assert Running()(np.array([2.0, 2.0])).tolist() == [0.0, 0.0]


def test_the_overlong_penalty_is_that_of_dapo():
    overlong = build_builtin("overlong", {"max_tokens": 20, "cache": 4})
    lengths = [1, 16, 17, 18, 20, 25]
    assert overlong([""] * 6, completion_tokens=lengths) == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]


def test_a_cache_that_does_not_fit_the_budget_is_refused():
    with pytest.raises(ValueError, match="0 < cache <= max_tokens"):
        build_builtin("overlong", {"max_tokens": 4, "cache": 5})


def test_weights_of_nothing_and_a_convention_that_is_not_read_are_refused():
    with pytest.raises(ValueError, match="every weight is 0"):
        RewardMaker.model_validate({"kind": "reward", "functions": [{"name": "exact_match", "weight": 0}]})
    with pytest.raises(ValueError, match="`convention` is read for functions of your own"):
        RewardMaker.model_validate({"kind": "reward", "functions": [{"name": "exact_match", "convention": "trl"}]})
