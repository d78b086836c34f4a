"""Which samples of a step show whether trainer and makers compute the same log-probs with the same weights.

In an asynchronous run the rows of a step were made before its weights: no token has the trainer's own version. The last
few versions are therefore remembered, and a few samples are scored under the version that made them. Every rank decides
alike, from the rows alone. numpy only.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from trainers.batch import MicroBatch, Part, StepPlan, packed_tokens
from trainers.packing import GroupBatch

PROBE_TOKENS = 512  # packed tokens that each data-parallel rank scores; one sample is scored whatever its length


def measured_anyway(groups: Sequence[GroupBatch], plan: StepPlan) -> bool:
    """Whether the step computes tokens of the version that the weights are of: then nothing more need be scored."""
    if plan.version is None:
        return False
    return any(
        np.any(groups[part.row].policy_versions[groups[part.row].span(sample)] == plan.version)
        for minibatch in plan.minibatches
        for rank in minibatch.ranks
        for micro_batch in rank
        for part in micro_batch
        for sample in part.samples
    )


def choose_version(groups: Sequence[GroupBatch], known: Collection[int]) -> int | None:
    """Of the `known` versions the one that made most tokens of the step, None when no token has one of them."""
    versions, counts = np.unique(np.concatenate([group.policy_versions for group in groups]), return_counts=True)
    made = {int(version): int(count) for version, count in zip(versions, counts, strict=True) if version in known}
    return max(made, key=lambda version: (made[version], version), default=None)


def choose_samples(groups: Sequence[GroupBatch], version: int, rank: int, ranks: int, budget: int) -> MicroBatch:
    """Samples with tokens of `version` for one of the data-parallel `ranks`, which share out the rows among them.

    Taken in order until `budget` packed tokens are reached; empty when the rank's rows have none.
    """
    chosen, left = [], budget
    for row in range(rank, len(groups), ranks):
        group = groups[row]
        for sample in range(group.offsets.size - 1):
            span = group.span(sample)
            cost = packed_tokens(group.prompt_ids.size, [span.stop - span.start], share_prompt=False)
            if not np.any(group.policy_versions[span] == version):
                continue
            if chosen and cost > left:
                return tuple(chosen)
            chosen.append(Part(row, (sample,)))
            left -= cost
    return tuple(chosen)
