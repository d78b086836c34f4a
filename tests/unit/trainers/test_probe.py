"""Which samples are scored to compare trainer and makers."""

from __future__ import annotations

import numpy as np

from tests.rollouts import rollout_columns
from trainers.batch import Part, RowShape, plan_step
from trainers.packing import GroupBatch
from trainers.probe import choose_samples, choose_version, measured_anyway


def groups(*versions: list[list[int]]) -> list[GroupBatch]:
    """One group per argument; each sample a list with the version of each of its tokens. Prompts have 2 tokens."""
    rng = np.random.default_rng(0)
    made = []
    for samples in versions:
        columns = rollout_columns(rng, 2, [len(sample) for sample in samples])
        columns["policy_versions"] = np.concatenate(samples).astype(np.int32)
        made.append(GroupBatch.of(columns, np.zeros(len(samples), np.float32)))
    return made


def test_the_version_that_made_most_tokens_is_chosen_among_the_known_ones():
    rows = groups([[1, 1, 2], [3, 3, 3, 3]], [[2, 2]])
    assert choose_version(rows, {1, 2, 3}) == 3
    assert choose_version(rows, {1, 2}) == 2
    assert choose_version(rows, {7}) is None
    assert choose_version(rows, set()) is None


def test_samples_are_taken_in_order_up_to_the_budget_and_only_with_tokens_of_the_version():
    rows = groups([[1, 1], [2, 2], [2, 1]], [[2, 2, 2]])
    # each costs its prompt of 2 and all but its last token
    assert choose_samples(rows, 2, 0, 1, budget=6) == (Part(0, (1,)), Part(0, (2,)))
    assert choose_samples(rows, 2, 0, 1, budget=100) == (Part(0, (1,)), Part(0, (2,)), Part(1, (0,)))


def test_one_sample_is_taken_whatever_its_length():
    assert choose_samples(groups([[2] * 50, [2]]), 2, 0, 1, budget=10) == (Part(0, (0,)),)


def test_the_data_parallel_ranks_share_out_the_rows():
    rows = groups([[2]], [[2]], [[1]])
    assert choose_samples(rows, 2, 0, 2, budget=100) == (Part(0, (0,)),)
    assert choose_samples(rows, 2, 1, 2, budget=100) == (Part(1, (0,)),)
    assert choose_samples(rows, 1, 1, 2, budget=100) == ()


def test_nothing_need_be_scored_when_the_step_computes_tokens_of_the_present_version():
    rows = groups([[1, 1], [2, 1]])

    def plan(version: int | None, mask: list[bool]):
        shapes = [RowShape(2, (2, 2))]
        budget = {"max_response_tokens": 2, "micro_batch_tokens": 100, "share_prompt": True}
        values = [np.ones(2, np.float32)]
        return plan_step(step=1, version=version, shapes=shapes, advantages=values, masks=[np.array(mask)], **budget)

    assert measured_anyway(rows, plan(2, [True, True]))
    assert not measured_anyway(rows, plan(2, [True, False])), "the only sample with such a token is masked"
    assert not measured_anyway(rows, plan(3, [True, True]))
    assert not measured_anyway(rows, plan(None, [True, True]))
