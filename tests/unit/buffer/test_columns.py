from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from buffer.columns import nbytes, validate_answer, validate_columns
from buffer.records import Lease, Produced, Prompt


def lease(stage: str, samples: int = 2, min_version: int = 3) -> Lease:
    return Lease(7, 12, stage, "maker/rollout/0", Prompt("p12", "x"), min_version, 1, samples, 10.0)


def rollout(**changes: Any) -> dict[str, np.ndarray]:
    """Two samples of 2 and 3 tokens."""
    columns = {
        "prompt_ids": np.array([1, 2], np.int32),
        "response_ids": np.array([5, 6, 7, 8, 9], np.int32),
        "response_offsets": np.array([0, 2, 5], np.int64),
        "behaviour_logprobs": np.array([-0.5, 0.0, -1.0, -2.0, -0.1], np.float32),
        "policy_versions": np.array([3, 4, 3, 3, 5], np.int32),
        "finish_reasons": np.array([0, 1], np.int8),
        "temperatures": np.array([1.0, 0.7], np.float32),
    }
    return {**columns, **changes}


def test_a_good_rollout_and_a_good_reward_pass_and_their_bytes_are_counted():
    validate_columns(lease("rollout"), rollout(), 2)
    rewards = {"rewards": np.array([1.0, 0.0], np.float32), "reward/exact": np.array([1.0, 0.0], np.float32)}
    validate_columns(lease("reward"), rewards, 2)
    assert nbytes(rollout()) == 2 * 4 + 5 * 4 + 3 * 8 + 5 * 4 + 5 * 4 + 2 + 2 * 4
    assert nbytes(rewards) == 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"response_ids": np.arange(6, dtype=np.int32)},
            "response_offsets run from 0 to 5, not from 0 to the 6 response_ids",
        ),
        ({"response_offsets": np.array([0, 0, 5])}, "sample 0 has 0 response tokens"),
        ({"response_offsets": np.array([0, 6, 5])}, "sample 1 has -1 response tokens"),
        ({"response_offsets": np.array([0, 5])}, "response_offsets has 2 entries, not 3"),
        ({"finish_reasons": np.array([0], np.int8)}, "finish_reasons has 1 entries, not 2 (one for each sample)"),
        ({"finish_reasons": np.array([0, 2], np.int8)}, "finish_reasons[1] is 2"),
        ({"temperatures": np.array([1, 0], np.float32)}, "temperatures[1] is 0"),
        ({"behaviour_logprobs": np.zeros(4, np.float32)}, "behaviour_logprobs has 4 entries, not 5"),
        ({"behaviour_logprobs": np.zeros(5, np.float64)}, "behaviour_logprobs has dtype float64, not float32"),
        (
            {"behaviour_logprobs": np.array([-1, -1, -1, np.nan, -1], np.float32)},
            "behaviour_logprobs of sample 1, token 1, is nan: a log-prob is finite and <= 0; 1 of 5",
        ),
        ({"behaviour_logprobs": np.array([-1, -np.inf, 0, 0, 0], np.float32)}, "of sample 0, token 1, is -inf"),
        ({"behaviour_logprobs": np.array([0.2, 0.9, 0.1, 0.5, 0.3], np.float32)}, "is 0.2"),
        (
            {"policy_versions": np.array([3, 3, 3, 2, 3], np.int32)},
            "policy_versions of sample 1, token 1, is 2: the lease",
        ),
        ({"policy_versions": np.array([3, 3, 4, 3, 3], np.int32)}, "versions only grow within a sample"),
        ({"prompt_ids": np.array([], np.int32)}, "prompt_ids is empty"),
        ({"response_ids": np.array([5, 6, -1, 8, 9], np.int32)}, "response_ids[2] is -1"),
        ({"prompt_ids": [1, 2]}, "prompt_ids is a list, not a numpy array"),
        ({"prompt_ids": np.ones((2, 1), np.int32)}, "prompt_ids has shape (2, 1)"),
        ({"extra": np.ones(2)}, "the columns are"),
    ],
)
def test_a_bad_rollout_is_refused_with_row_prompt_and_the_entry(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError) as error:
        validate_columns(lease("rollout"), rollout(**changes), 2)
    assert str(error.value).startswith("row 12 (prompt 'p12'), rollout: ")
    assert message in str(error.value)


def test_a_rounding_error_above_zero_is_accepted_and_a_version_may_differ_between_samples():
    logprobs = np.array([-0.5, 3e-5, -1.0, -2.0, -0.1], np.float32)
    validate_columns(lease("rollout"), rollout(behaviour_logprobs=logprobs), 2)
    validate_columns(lease("rollout"), rollout(policy_versions=np.array([9, 9, 3, 3, 3], np.int32)), 2)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "no columns"),
        ({"rewards": np.ones(3, np.float32)}, "rewards has 3 entries for 2 samples"),
        ({"rewards": np.array([1, np.nan], np.float32)}, "rewards[1] is nan"),
        ({"rewards": np.ones(2, np.float32), "reward/a": np.ones(2)}, "reward/a has dtype float64, not float32"),
        ({"rewards": np.ones(2, np.float32), "score": np.ones(2, np.float32)}, "the columns are ['rewards', 'score']"),
    ],
)
def test_a_bad_reward_is_refused(columns: dict[str, np.ndarray], message: str):
    with pytest.raises(ValueError) as error:
        validate_columns(lease("reward"), columns, 2)
    assert message in str(error.value)


def test_reference_logprobs_are_one_for_each_response_token_of_the_row():
    inputs = {"rollout": rollout()}
    logprobs = np.array([-0.5, 0.0, -1.0, -2.0, -0.1], np.float32)
    validate_columns(lease("reference"), {"reference_logprobs": logprobs}, 2, inputs)
    validate_answer(lease("reference"), Produced(2, 0, 20), {"reference_logprobs": logprobs}, inputs)


@pytest.mark.parametrize(
    ("logprobs", "message"),
    [
        (np.full(4, -1, np.float32), "reference_logprobs has 4 entries, not 5 (one for each response token)"),
        (np.full(5, -1.0), "reference_logprobs has dtype float64, not float32"),
        (np.array([-1, -1, -1, np.nan, -1], np.float32), "reference_logprobs of sample 1, token 1, is nan"),
        (np.array([-1, -np.inf, -1, -1, -1], np.float32), "reference_logprobs of sample 0, token 1, is -inf"),
        (np.array([0.2, 0.9, 0.1, 0.5, 0.3], np.float32), "a log-prob is finite and <= 0; 5 of 5"),
    ],
)
def test_bad_reference_logprobs_are_refused(logprobs: np.ndarray, message: str):
    with pytest.raises(ValueError) as error:
        validate_columns(lease("reference"), {"reference_logprobs": logprobs}, 2, {"rollout": rollout()})
    assert str(error.value).startswith("row 12 (prompt 'p12'), reference: ")
    assert message in str(error.value)


def test_reference_logprobs_without_the_rollout_they_are_of_are_refused():
    with pytest.raises(ValueError, match="has to name that stage in its `needs`"):
        validate_columns(lease("reference"), {"reference_logprobs": np.zeros(5, np.float32)}, 2)


def test_a_stage_of_a_custom_maker_may_hold_any_flat_numbers():
    validate_columns(lease("critique"), {"scores": np.ones(7), "flags": np.array([True])}, 2)
    with pytest.raises(ValueError, match="not one dimension of numbers"):
        validate_columns(lease("critique"), {"words": np.array(["a"])}, 2)


def test_what_an_answer_says_of_its_columns_must_be_true():
    columns = rollout()
    true = {"samples": 2, "tokens": 5, "nbytes": nbytes(columns), "min_version": 3, "max_version": 5}
    validate_answer(lease("rollout"), Produced(**true), columns)
    for name, value in true.items():
        wrong = Produced(**{**true, name: value + 1})
        with pytest.raises(
            ValueError, match=rf"row 12 \(prompt 'p12'\), rollout: .* says {name} {value + 1}, not {value}$"
        ):
            validate_answer(lease("rollout"), wrong, columns)
    with pytest.raises(ValueError, match="response_offsets has 3 entries, not 4"):
        validate_answer(lease("rollout", samples=3), Produced(**true), columns)
    rewards = {"rewards": np.zeros(2, np.float32)}
    validate_answer(lease("reward"), Produced(2, 0, 8), rewards)
    with pytest.raises(ValueError, match="says nbytes 9, not 8"):
        validate_answer(lease("reward"), Produced(2, 0, 9), rewards)


def teacher(**changes: Any) -> dict[str, np.ndarray]:
    """Two tokens kept of each of the five."""
    columns = {
        "teacher_ids": np.array([5, 1, 6, 2, 3, 7, 8, 0, 9, 4], np.int32),
        "teacher_logprobs": np.array([-0.5, -1.5] * 5, np.float32),
        "teacher_mass": np.full(5, 0.83, np.float32),
        "teacher_target_logprobs": np.full(5, -0.5, np.float32),
    }
    return {**columns, **changes}


def test_a_teachers_columns_hold_the_same_number_of_tokens_for_each_response_token_also_none():
    validate_columns(lease("teacher"), teacher(), 2, {"rollout": rollout()})
    none = {
        "teacher_ids": np.zeros(0, np.int32),
        "teacher_logprobs": np.zeros(0, np.float32),
        "teacher_mass": np.zeros(5, np.float32),
    }
    validate_columns(lease("teacher"), teacher(**none), 2, {"rollout": rollout()})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"teacher_ids": np.arange(9, dtype=np.int32)},
            "teacher_ids has 9 and teacher_logprobs 10 entries: both need K",
        ),
        (
            {"teacher_mass": np.full(4, 0.5, np.float32)},
            "teacher_mass has 4 entries, not 5 (one for each response token)",
        ),
        ({"teacher_mass": np.array([0.1, 0.2, 1.5, 0, 0], np.float32)}, "teacher_mass of sample 1, token 0, is 1.5"),
        (
            {"teacher_logprobs": np.array([-1, -2, -1, -2, -2, -1, -1, -2, -1, -2], np.float32)},
            "teacher_logprobs of sample 1, token 1, is -1.0: the likeliest token comes first",
        ),
        (
            {"teacher_target_logprobs": np.full(5, np.nan, np.float32)},
            "teacher_target_logprobs of sample 0, token 0, is nan",
        ),
    ],
)
def test_bad_columns_of_a_teacher_are_refused(changes: dict[str, np.ndarray], message: str):
    with pytest.raises(ValueError) as error:
        validate_columns(lease("teacher"), teacher(**changes), 2, {"rollout": rollout()})
    assert str(error.value).startswith("row 12 (prompt 'p12'), teacher: ")
    assert message in str(error.value)


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_a_reward_model_scores_each_sample_or_each_token_of_the_row():
    inputs = {"rollout": rollout()}
    validate_columns(lease("reward/judge"), {"scores": floats(1, -2)}, 2, inputs)
    validate_columns(lease("reward/judge"), {"token_scores": floats(1, 2, 3, 4, 5)}, 2, inputs)
    both = {"rewards": floats(3, 12), "reward/judge": floats(3, 12), "token_rewards": floats(1, 2, 3, 4, 5)}
    validate_columns(lease("reward"), both, 2, inputs)


@pytest.mark.parametrize(
    ("stage", "columns", "message"),
    [
        ("reward/judge", {"scores": floats(1)}, r"reward/judge: scores has 1 entries, not 2 \(one for each sample\)"),
        ("reward/judge", {"scores": floats(1, np.nan)}, r"scores\[1\] is nan: a score is finite"),
        (
            "reward/judge",
            {"token_scores": floats(1, 2)},
            r"token_scores has 2 entries, not 5 \(one for each response token",
        ),
        ("reward/judge", {"rewards": floats(1, 2)}, r"the columns are \['rewards'\], not \['scores'\]"),
        ("reward", {"rewards": floats(1, 2), "token_rewards": floats(1, 2)}, "token_rewards has 2 entries, not 5"),
        (
            "reward",
            {"rewards": floats(1, 2), "token_rewards": floats(1, 2, 3, np.inf, 5)},
            "token_rewards of sample 1, token 1, is inf",
        ),
    ],
)
def test_bad_scores_of_a_reward_model_are_refused(stage, columns, message):
    with pytest.raises(ValueError, match=message):
        validate_columns(lease(stage), columns, 2, {"rollout": rollout()})
