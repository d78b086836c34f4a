"""The invariants in the docstring of trainers.batch."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainers.batch import Part, RowShape, packed_tokens, plan_micro_batches, plan_step, split_row

shapes = st.lists(
    st.builds(RowShape, st.integers(1, 40), st.lists(st.integers(0, 30), min_size=1, max_size=6).map(tuple)),
    min_size=1,
    max_size=8,
)


def everything(rows: list[RowShape]) -> dict[int, list[int]]:
    return {row: list(range(len(shape.responses))) for row, shape in enumerate(rows)}


def size(rows: list[RowShape], micro_batch: tuple[Part, ...], share: bool) -> int:
    return sum(
        packed_tokens(rows[part.row].prompt, [rows[part.row].responses[i] for i in part.samples], share)
        for part in micro_batch
    )


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(1, 200), st.booleans(), st.integers(1, 3))
def test_every_sample_is_planned_once_in_equal_numbers_of_bounded_micro_batches(rows, budget, share, ranks):
    plan = plan_micro_batches(
        dict(enumerate(rows)), everything(rows), micro_batch_tokens=budget, share_prompt=share, data_parallel=ranks
    )

    planned = [(part.row, i) for rank in plan for micro in rank for part in micro for i in part.samples]
    assert sorted(planned) == [(row, i) for row, shape in enumerate(rows) for i in range(len(shape.responses))]
    assert len(plan) == ranks
    assert len({len(rank) for rank in plan}) == 1
    for micro_batch in (micro for rank in plan for micro in rank):
        samples = sum(len(part.samples) for part in micro_batch)
        assert samples <= 1 or size(rows, micro_batch, share) <= budget


def test_a_shared_prompt_is_counted_once_and_last_tokens_are_not_fed():
    assert packed_tokens(10, [3, 1, 4], share_prompt=True) == 10 + 2 + 0 + 3
    assert packed_tokens(10, [3, 1, 4], share_prompt=False) == 30 + 2 + 0 + 3


def test_a_group_larger_than_a_micro_batch_is_cut_between_samples_and_repeats_its_prompt():
    shape = RowShape(10, (6, 6, 6))  # 10 + 5 + 5 = 20 fit, 25 do not

    assert split_row(4, shape, [0, 1, 2], 20, share_prompt=True) == [Part(4, (0, 1)), Part(4, (2,))]


def test_micro_batches_are_balanced_by_tokens():
    rows = [RowShape(1, (n + 1,)) for n in (60, 50, 40, 30, 20, 10)]  # one token more than its response each

    plan = plan_micro_batches(
        dict(enumerate(rows)), everything(rows), micro_batch_tokens=120, share_prompt=True, data_parallel=2
    )

    assert [[size(rows, micro, True) for micro in rank] for rank in plan] == [[113], [103]]


def test_planning_twice_gives_the_same_plan_and_it_survives_pickling():
    rows = [RowShape(5, (3, 9, 1)), RowShape(7, (2, 2, 8)), RowShape(5, (3, 9, 1))]
    arguments = {
        "step": 3,
        "version": 2,
        "shapes": rows,
        "advantages": [np.ones(3, np.float32)] * 3,
        "masks": [np.ones(3, bool)] * 3,
        "max_response_tokens": 9,
        "micro_batch_tokens": 20,
        "share_prompt": True,
    }

    first, second = plan_step(**arguments), plan_step(**arguments)

    assert first.minibatches == second.minibatches
    assert pickle.loads(pickle.dumps(first)).minibatches == first.minibatches


def plan_of(rows, advantages, masks, **more):
    arguments = {"step": 1, "version": None, "max_response_tokens": 9, "micro_batch_tokens": 1000, "share_prompt": True}
    return plan_step(**{**arguments, **more}, shapes=rows, advantages=advantages, masks=masks)


def computed(plan, minibatch=0):
    return {(p.row, i) for rank in plan.minibatches[minibatch].ranks for m in rank for p in m for i in p.samples}


def test_totals_count_what_is_not_masked_and_masked_samples_are_not_computed():
    plan = plan_of(
        [RowShape(5, (3, 9, 0)), RowShape(7, (2, 2, 8))],
        [np.ones(3, np.float32)] * 2,
        [np.array([True, False, True]), np.array([True, True, True])],
    )

    assert (plan.minibatches[0].totals.tokens, plan.minibatches[0].totals.samples) == (3 + 2 + 2 + 8, 4)
    assert computed(plan) == {(0, 0), (1, 0), (1, 1), (1, 2)}


def test_samples_without_advantage_stay_in_the_totals_but_need_not_be_computed():
    advantages = [np.zeros(3, np.float32), np.array([1, 0, -1], np.float32)]
    masks = [np.ones(3, bool)] * 2
    rows = [RowShape(5, (3, 9, 1)), RowShape(7, (2, 2, 8))]

    plan = plan_of(rows, advantages, masks, skip_zero_advantage=True)

    assert computed(plan) == {(1, 0), (1, 2)}
    assert plan.minibatches[0].totals == plan_of(rows, advantages, masks).minibatches[0].totals


def test_a_step_without_any_advantage_is_computed_all_the_same():
    rows = [RowShape(5, (3, 9, 1))]

    plan = plan_of(rows, [np.zeros(3, np.float32)], [np.ones(3, bool)], skip_zero_advantage=True)

    assert computed(plan) == {(0, 0), (0, 1), (0, 2)}


def test_minibatches_are_consecutive_rows_with_totals_of_their_own():
    rows = [RowShape(5, (3,)), RowShape(5, (4,)), RowShape(5, (5,))]

    plan = plan_of(rows, [np.ones(1, np.float32)] * 3, [np.ones(1, bool)] * 3, minibatches=2)

    assert [computed(plan, 0), computed(plan, 1)] == [{(0, 0), (1, 0)}, {(2, 0)}]
    assert [minibatch.totals.tokens for minibatch in plan.minibatches] == [7, 5]


@pytest.mark.parametrize(
    ("shape", "advantages", "mask", "message"),
    [
        (RowShape(0, (3, 2)), np.ones(2), np.ones(2, bool), "row 0 of the step has an empty prompt"),
        (RowShape(5, (3, 2)), np.ones(3), np.ones(2, bool), r"advantages have shape \(3,\).*\(2,\).*\(5,\)"),
        (RowShape(5, (3, 2)), np.ones(2), np.ones(3, bool), r"mask is bool\(3,\), needs bool\(2,\)"),
        (RowShape(5, (3, 2)), np.array([1, np.nan]), np.ones(2, bool), "1 advantages are not finite"),
    ],
)
def test_lengths_that_do_not_fit_and_advantages_that_are_not_finite_are_refused(shape, advantages, mask, message):
    with pytest.raises(ValueError, match=message):
        plan_of([shape], [advantages], [mask])


def test_more_minibatches_than_rows_are_refused():
    with pytest.raises(ValueError, match="3 minibatches from 1 rows"):
        plan_of([RowShape(5, (3,))], [np.ones(1)], [np.ones(1, bool)], minibatches=3)
