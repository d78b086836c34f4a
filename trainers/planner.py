"""From the columns of sampled rows to the plan of one step. Pure and free of torch.

Guarantees: the same rows give the same plan; a masked sample has advantage 0 and counts nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from buffer.records import SampledRow
from trainers.algorithms.advantages import group_advantages
from trainers.batch import Columns, RowShape, StepPlan, plan_step
from trainers.config import Grpo, MegatronBackend, TrainerConfig

LENGTH = 1  # finish reason of a sample that hit its token budget


@dataclass(frozen=True)
class Batch:
    """The rows of one step as the controller sees them. `columns[i][stage]` are the columns of `rows[i]`."""

    rows: Sequence[SampledRow]
    columns: Sequence[dict[str, Columns]]
    ages: Sequence[int]  # [rows] published versions behind

    @property
    def row_ids(self) -> list[int]:
        return [row.row_id for row in self.rows]

    @property
    def rewards(self) -> list[np.ndarray]:
        """Float32 [samples] for each row."""
        return [columns["reward"]["rewards"] for columns in self.columns]

    @property
    def truncated(self) -> list[np.ndarray]:
        """Bool [samples] for each row: which samples hit their token budget."""
        return [columns["rollout"]["finish_reasons"] == LENGTH for columns in self.columns]

    @property
    def lengths(self) -> np.ndarray:
        """Int64 [all samples]: response tokens."""
        return np.concatenate([np.diff(columns["rollout"]["response_offsets"]) for columns in self.columns])


class StepPlanner:
    """Advantages, mask and micro-batches by the settings of one trainer.

    `max_response_tokens` is the makers' completion budget. An algorithm of one's own gets the advantages of GRPO,
    divided by the group's standard deviation, and every sample.
    """

    def __init__(self, config: TrainerConfig, max_response_tokens: int) -> None:
        self._config = config
        self._max_response_tokens = max_response_tokens

    def masks(self, batch: Batch) -> list[np.ndarray]:
        """Bool [samples] for each row: False leaves the sample out of the loss."""
        algorithm = self._config.algorithm
        if isinstance(algorithm, Grpo) and algorithm.mask_truncated:
            return [~truncated for truncated in batch.truncated]
        return [np.ones(truncated.shape, dtype=bool) for truncated in batch.truncated]

    def plan(self, batch: Batch, step: int, version: int | None) -> StepPlan:
        """See StepPlan for `step` and `version`. Raises ValueError, with the row's id, for a reward that is not finite."""
        algorithm, backend = self._config.algorithm, self._config.backend
        grpo = algorithm if isinstance(algorithm, Grpo) else None
        scale = grpo is None or grpo.scale_rewards
        masks = self.masks(batch)
        megatron = backend if isinstance(backend, MegatronBackend) else None
        return plan_step(
            step=step,
            version=version,
            shapes=[RowShape.of(columns["rollout"]) for columns in batch.columns],
            advantages=[_advantages(batch, i, masks[i], scale) for i in range(len(batch.rows))],
            masks=masks,
            max_response_tokens=self._max_response_tokens,
            micro_batch_tokens=backend.micro_batch_tokens,
            share_prompt=megatron is not None and megatron.share_prompt,
            data_parallel=megatron.data_parallel if megatron is not None else 1,
            minibatches=self._config.minibatches,
            skip_zero_advantage=grpo is not None and grpo.proportional_to_advantage,
        )


def valid_tokens(plan: StepPlan) -> int:
    """Response tokens of the step that are not masked."""
    return sum(minibatch.totals.tokens for minibatch in plan.minibatches)


def _advantages(batch: Batch, index: int, mask: np.ndarray, scale: bool) -> np.ndarray:
    try:
        return group_advantages(batch.rewards[index], scale=scale, mask=mask)
    except ValueError as error:
        raise ValueError(f"row {batch.rows[index].row_id}: {error}") from error
