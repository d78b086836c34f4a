"""What a critic says of every response token, for every backend.

A value model is run as a policy model is (`trainers.step.Policy`): it has one output for each target, the value of the
state before the target, where a policy has the log-prob of the target.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainers.batch import Columns, StepPlan
from trainers.learner import RankValues
from trainers.packing import check_rollouts, pack_minibatch
from trainers.step import Policy


def values_of(model: Policy, plan: StepPlan, rollouts: Sequence[Columns]) -> RankValues:
    """The values of the samples that the plan gives to this rank. Collective."""
    groups = check_rollouts(plan, rollouts)
    found = [np.zeros(group.response_ids.size, dtype=np.float32) for group in groups]
    rank = model.data_parallel_rank
    for index, minibatch in enumerate(plan.minibatches):
        batches = pack_minibatch(groups, plan, index, rank, share_prompt=model.share_prompt)
        for parts, outputs in zip(minibatch.ranks[rank], model.log_probs(batches), strict=True):
            start, flat = 0, outputs.float().cpu().numpy()
            for part in parts:
                for sample in part.samples:
                    span = groups[part.row].span(sample)
                    length = span.stop - span.start
                    found[part.row][span] = flat[start : start + length]
                    start += length
    return RankValues(rank, found)
