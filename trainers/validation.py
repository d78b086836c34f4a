"""The loss of held-out rows under the present weights: the ranks score them, without a gradient.

The rows are the controller's; each data-parallel rank gets the same plan, computes its part of it, and answers with log-probs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainers.batch import Columns, RowShape, plan_step
from trainers.config import BackendConfig
from trainers.learner import RankValues
from trainers.rank import TrainerRank
from trainers.rank_group import RankGroup


@dataclass(frozen=True)
class Validated:
    loss: float  # mean cross entropy of a token, nats
    rows: int
    tokens: int


async def validate(ranks: RankGroup, backend: BackendConfig, rows: Sequence[Columns]) -> Validated:
    """`rows` are columns of stage `rollout`. Raises RankError."""
    found = await infer_batch(ranks, backend, rows)
    tokens = sum(row.size for row in found)
    return Validated(-sum(float(row.sum(dtype=np.float64)) for row in found) / tokens, len(rows), tokens)


async def infer_batch(ranks: RankGroup, backend: BackendConfig, rows: Sequence[Columns]) -> list[np.ndarray]:
    """Log-probs of the response tokens of each row, float32 [T], whatever the layout of the ranks."""
    shapes = [RowShape.of(columns) for columns in rows]
    plan = plan_step(
        step=0,
        version=None,
        shapes=shapes,
        advantages=[np.zeros(len(shape.responses), np.float32) for shape in shapes],
        masks=[np.ones(len(shape.responses), bool) for shape in shapes],
        max_response_tokens=0,  # read by constant normalisation only
        micro_batch_tokens=backend.micro_batch_tokens,
        share_prompt=backend.share_prompt,
        data_parallel=backend.data_parallel,
    )
    answers: list[RankValues] = await ranks.call(TrainerRank.log_probs, plan, *rows)
    # Ranks of one data-parallel rank all say the same; of different ones, each has the samples that the others lack.
    parts = {answer.data_parallel_rank: answer.rows for answer in answers}
    return [np.sum(row, axis=0) for row in zip(*parts.values(), strict=True)]
