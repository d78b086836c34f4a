"""From the columns of sampled rows to the plan of one step. Pure and free of torch.

Guarantees: the same rows give the same plan; a masked sample has advantage 0 and counts nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from buffer.records import SampledRow
from trainers.algorithms.advantages import checked_rewards, estimator_of, has_signal
from trainers.batch import Columns, RowShape, StepPlan, StepRows, plan_step
from trainers.config import ClippedPolicy, Dapo, DistillAlgorithm, Dpo, GroupPolicy, Ppo, Sft, TrainerConfig
from trainers.distillation.columns import DEMONSTRATED, teacher_top
from trainers.estimates import Estimates, estimate, kl_to_reference

LENGTH = 1  # finish reason of a sample that hit its token budget


@dataclass(frozen=True)
class Batch:
    """The rows of one step as the controller sees them. `columns[i][stage]` are the columns of `rows[i]`."""

    rows: Sequence[SampledRow]
    columns: Sequence[dict[str, Columns]]
    ages: Sequence[int]  # [rows] published versions behind
    replaced: int | None = None  # rows without a signal that it got others for; None where none would be

    @property
    def row_ids(self) -> list[int]:
        return [row.row_id for row in self.rows]

    @property
    def scored(self) -> bool:
        """Whether its rows have rewards."""
        return "reward" in self.columns[0]

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
        if isinstance(algorithm, ClippedPolicy) and algorithm.mask_truncated:
            return [~truncated for truncated in batch.truncated]
        return [np.ones(truncated.shape, dtype=bool) for truncated in batch.truncated]

    @property
    def max_refills(self) -> int:
        """How often the rows without a signal are replaced before a step."""
        algorithm = self._config.algorithm
        return algorithm.max_refills if isinstance(algorithm, Dapo) else 0

    def without_signal(self, batch: Batch) -> list[int]:
        """Row ids of groups whose rewards are all equal. Raises ValueError, with the row's id, for one that is not finite."""
        masks = self.masks(batch)
        rewards = [_of_row(batch, i, checked_rewards) for i in range(len(batch.rows))]
        return [batch.row_ids[i] for i, values in enumerate(rewards) if not has_signal(values, masks[i])]

    def valid_tokens(self, batch: Batch) -> int:
        """Response tokens of the step that are not masked."""
        return int(batch.lengths[np.concatenate(self.masks(batch))].sum())

    def step_rows(self, batch: Batch, step: int) -> StepRows:
        return StepRows(step, [RowShape.of(columns["rollout"]) for columns in batch.columns], self.masks(batch))

    def estimate(self, batch: Batch, values: Sequence[np.ndarray]) -> Estimates:
        """What PPO makes of the rewards and the critic's `values`, float32 [T] for each row. Raises ValueError."""
        assert isinstance(self._config.algorithm, Ppo)
        rewards = [_of_row(batch, i, checked_rewards) for i in range(len(batch.rows))]
        return estimate(self._config.algorithm, batch, rewards, self.masks(batch), values)

    def plan(
        self, batch: Batch, step: int, version: int | None, advantages: Sequence[np.ndarray] | None = None
    ) -> StepPlan:
        """See StepPlan for `step`, `version` and `advantages`, which by default are those of each group.

        Raises ValueError, with the row's id, for a reward that is not finite.
        """
        algorithm, backend = self._config.algorithm, self._config.backend
        masks = self.masks(batch)
        if advantages is None:
            advantages = self._advantages(batch, masks)
        plan = plan_step(
            step=step,
            version=version,
            shapes=[RowShape.of(columns["rollout"]) for columns in batch.columns],
            advantages=advantages,
            masks=masks,
            max_response_tokens=self._max_response_tokens,
            micro_batch_tokens=backend.micro_batch_tokens,
            share_prompt=backend.share_prompt,
            data_parallel=backend.data_parallel,
            minibatches=self._config.minibatches,
            skip_zero_advantage=isinstance(algorithm, GroupPolicy)
            and algorithm.proportional_to_advantage
            and self._config.distill is None,
            whole_rows=isinstance(algorithm, Dpo),
        )
        labels: dict[str, tuple[np.ndarray, ...]] = {}
        if (
            isinstance(algorithm, Dpo | GroupPolicy)
            and algorithm.reference == "maker"
            and "reference" in algorithm.stages
        ):
            labels |= reference_labels(batch)
        if self._config.distill is not None:
            labels |= teachers_labels(batch)
        return replace(plan, labels=labels)

    def kl_figures(self, batch: Batch) -> dict[str, float]:
        """Metrics of KL(behaviour, reference) where it is taken off rewards: a token that is not masked, and a sample."""
        algorithm = self._config.algorithm
        penalised = (
            algorithm.kl_coef > 0
            if isinstance(algorithm, Ppo)
            else isinstance(algorithm, GroupPolicy) and (algorithm.penalises_rewards)
        )
        if not penalised:
            return {}
        assert isinstance(algorithm, Ppo | GroupPolicy)
        kl = np.concatenate(kl_to_reference(batch, algorithm.kl_estimator)).astype(np.float64)
        mean = float(kl[np.repeat(np.concatenate(self.masks(batch)), batch.lengths)].mean())
        taken = algorithm.kl_coef * kl.sum() / batch.lengths.size
        return {"kl": mean, f"kl/{algorithm.kl_estimator}": mean, "reward/kl_penalty": float(taken)}

    def _advantages(self, batch: Batch, masks: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Float32 [samples] for each row, by the algorithm's estimator."""
        algorithm = self._config.algorithm
        if isinstance(algorithm, DistillAlgorithm | Sft | Dpo):
            return [np.zeros(mask.size, np.float32) for mask in masks]
        rewards = [_of_row(batch, i, checked_rewards) for i in range(len(batch.rows))]
        if isinstance(algorithm, GroupPolicy) and algorithm.penalises_rewards:
            penalties = reference_penalties(batch, algorithm.kl_coef, algorithm.kl_estimator)
            rewards = [values - penalty for values, penalty in zip(rewards, penalties, strict=True)]
        lengths = [np.diff(columns["rollout"]["response_offsets"]) for columns in batch.columns]
        return estimator_of(algorithm)(rewards, masks, lengths)


def reference_penalties(batch: Batch, coef: float, estimator: str) -> list[np.ndarray]:
    """Float64 [samples] for each row: coef times the sum over a sample of KL(behaviour, reference) by the estimator.

    Raises ValueError, with the row's id, where a reference does not fit its row.
    """
    return [
        coef * np.add.reduceat(np.append(kl, 0.0), offsets[:-1]) * (np.diff(offsets) > 0)
        for kl, offsets in (
            (kl, columns["rollout"]["response_offsets"])
            for kl, columns in zip(kl_to_reference(batch, estimator), batch.columns, strict=True)
        )
    ]


def teachers_labels(batch: Batch) -> dict[str, tuple[np.ndarray, ...]]:
    """Labels of a plan with a teacher: 1.0 for the tokens of rows that no policy sampled, else 0.0.

    Raises ValueError, with the row's id, where a teacher's columns do not fit their row.
    """
    found = []
    for row, columns in zip(batch.rows, batch.columns, strict=True):
        tokens = columns["rollout"]["response_ids"].size
        try:
            if "teacher" in columns:
                teacher_top(columns["teacher"], tokens)
        except ValueError as error:
            raise ValueError(f"row {row.row_id}: {error}") from error
        found.append(np.full(tokens, row.produced["rollout"].min_version is None, dtype=np.float32))
    return {DEMONSTRATED: tuple(found)}


def reference_labels(batch: Batch) -> dict[str, tuple[np.ndarray, ...]]:
    """Labels of the plan: what a reference maker says of each token."""
    return {"reference": tuple(columns["reference"]["reference_logprobs"] for columns in batch.columns)}


def _of_row(batch: Batch, index: int, work: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """`work` on the rewards of one row; its ValueError gets the row's id."""
    try:
        return work(batch.rewards[index])
    except ValueError as error:
        raise ValueError(f"row {batch.rows[index].row_id}: {error}") from error
