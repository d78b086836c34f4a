"""The invariants in the docstring of trainers.packing, on an example small enough to check by eye."""

from __future__ import annotations

import numpy as np
import pytest

from tests.rollouts import rollout_columns
from trainers.batch import Part, StepPlan, Totals
from trainers.packing import GroupBatch, Segment, check_rollouts, pack, padded

TOTALS = Totals(tokens=6, samples=3, max_response_tokens=4)
COLUMNS = {
    "prompt_ids": np.array([10, 11], np.int32),
    "response_ids": np.array([20, 21, 22, 30, 40, 41], np.int32),
    "response_offsets": np.array([0, 3, 4, 6], np.int64),
    "behaviour_logprobs": -np.arange(6, dtype=np.float32),
    "policy_versions": np.array([1, 1, 2, 2, 2, 2], np.int32),
    "finish_reasons": np.zeros(3, np.int8),
    "temperatures": np.ones(3, np.float32),
}
GROUP = GroupBatch.of(COLUMNS, np.array([0.5, -1.0, 2.0], np.float32))


def test_samples_of_a_group_share_the_last_prompt_row_for_their_first_token():
    batch = pack([GROUP], (Part(0, (0, 1, 2)),), TOTALS, share_prompt=True)

    #                                 p0  p1 | a0  a1 |   | c0      (the last token of a response is not fed)
    assert batch.token_ids.tolist() == [10, 11, 20, 21, 40]
    assert batch.positions.tolist() == [0, 1, 2, 3, 2]
    assert batch.segments == (Segment(2, (2, 0, 1)),)
    assert batch.targets.tolist() == [20, 21, 22, 30, 40, 41]
    assert batch.logit_rows.tolist() == [1, 2, 3, 1, 1, 4]


def test_without_sharing_every_sample_brings_its_own_prompt():
    batch = pack([GROUP], (Part(0, (0, 1, 2)),), TOTALS, share_prompt=False)

    assert batch.token_ids.tolist() == [10, 11, 20, 21, 10, 11, 10, 11, 40]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 2]
    assert batch.segments == (Segment(2, (2,)), Segment(2, (0,)), Segment(2, (1,)))
    assert batch.targets.tolist() == [20, 21, 22, 30, 40, 41]
    assert batch.logit_rows.tolist() == [1, 2, 3, 5, 7, 8]


def test_what_belongs_to_a_token_travels_with_it():
    batch = pack([GROUP, GROUP], (Part(1, (2,)), Part(0, (0,))), TOTALS, share_prompt=True)

    assert batch.targets.tolist() == [40, 41, 20, 21, 22]
    assert batch.behaviour.tolist() == [-4, -5, 0, -1, -2]
    assert batch.versions.tolist() == [2, 2, 1, 1, 2]
    assert batch.advantages.tolist() == [2, 2, 0.5, 0.5, 0.5]
    assert batch.samples.tolist() == [0, 0, 1, 1, 1]
    assert batch.lengths.tolist() == [2, 2, 3, 3, 3]
    assert batch.logit_rows.tolist() == [1, 2, 4, 5, 6]


def test_an_empty_micro_batch_is_one_token_without_targets():
    batch = pack([GROUP], (), TOTALS, share_prompt=True)

    assert batch.token_ids.tolist() == [0]
    assert batch.segments == (Segment(1, ()),)
    assert batch.targets.size == batch.logit_rows.size == batch.advantages.size == 0


def test_rows_are_filled_up_by_a_segment_without_targets():
    batch = pack([GROUP], (Part(0, (0, 1, 2)),), TOTALS, share_prompt=True)
    filled = padded(batch, 4)

    assert filled.token_ids.tolist() == [10, 11, 20, 21, 40, 0, 0, 0]
    assert filled.positions.tolist() == [0, 1, 2, 3, 2, 0, 1, 2]
    assert filled.segments == (Segment(2, (2, 0, 1)), Segment(3, ()))
    assert filled.logit_rows is batch.logit_rows
    assert padded(batch, 5) is batch


def test_advantages_may_be_given_per_token():
    values = np.arange(6, dtype=np.float32)

    assert GroupBatch.of(COLUMNS, values).advantages.tolist() == values.tolist()


def test_rollouts_that_do_not_fit_the_plan_are_refused():
    columns = rollout_columns(np.random.default_rng(0), 3, [2, 4])
    plan = StepPlan(step=7, version=None, advantages=(np.zeros(3, np.float32),), minibatches=())

    with pytest.raises(ValueError, match="step 7, row 0: 3 advantages for 2 samples, 6 tokens"):
        check_rollouts(plan, [columns])
    with pytest.raises(ValueError, match="step 7: the plan has 1 rows, 2 rollouts"):
        check_rollouts(plan, [columns, columns])
