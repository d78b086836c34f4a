"""Held-out rows are shared out over data-parallel ranks, and their log-probs come back in order."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from trainers.config import MegatronBackend
from trainers.learner import RankValues
from trainers.rank_group import LocalWorker, RankGroup
from trainers.validation import infer_batch, validate


class Rank:
    """Says -(token id) of each token that the plan gives to it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.samples = 0

    def log_probs(self, plan, *rollouts) -> RankValues:
        found = [np.zeros(columns["response_ids"].size, np.float32) for columns in rollouts]
        for parts in plan.minibatches[0].ranks[self.number]:
            for part in parts:
                self.samples += len(part.samples)
                found[part.row] = -rollouts[part.row]["response_ids"].astype(np.float32)
        return RankValues(self.number, found)


def row(*ids: int) -> dict[str, np.ndarray]:
    return {
        "prompt_ids": np.array([1, 2], np.int32),
        "response_ids": np.array(ids, np.int32),
        "response_offsets": np.array([0, len(ids)]),
        "behaviour_logprobs": np.zeros(len(ids), np.float32),
        "policy_versions": np.full(len(ids), -1, np.int32),
        "temperatures": np.ones(1, np.float32),
    }


ROWS = [row(3, 4), row(5), row(6, 7, 8), row(9)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_loss_is_the_mean_over_all_tokens_whatever_the_number_of_ranks(ranks: int) -> None:
    objects = [Rank(number) for number in range(ranks)]
    workers = [LocalWorker(rank, str(rank.number)) for rank in objects]
    backend = MegatronBackend(type="megatron", data_parallel=ranks, micro_batch_tokens=8)
    group = RankGroup(workers, 10.0)
    found = asyncio.run(infer_batch(group, backend, ROWS))
    assert [values.tolist() for values in found] == [[-3, -4], [-5], [-6, -7, -8], [-9]]
    assert sum(rank.samples for rank in objects) == len(ROWS)
    assert all(rank.samples for rank in objects)
    validated = asyncio.run(validate(group, backend, ROWS))
    assert (validated.loss, validated.rows, validated.tokens) == (pytest.approx(42 / 7), 4, 7)
    for worker in workers:
        worker.close()
