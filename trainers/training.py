"""The training of one batch: what the controller asks of its ranks and of its critic, and how it puts the answers together.

Without a critic: a plan from the rewards, one call of the ranks. With one (PPO): its values come first, the advantages and
returns are made here, then policy and critic train on the same rows at the same time, each on its own ranks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from buffer.records import ColumnsLost
from trainers.batch import StepPlan
from trainers.estimates import Estimates
from trainers.learner import StepResult
from trainers.planner import Batch, StepPlanner
from trainers.ports import ValueModel
from trainers.rank import TrainerRank
from trainers.rank_group import RankGroup
from trainers.stopwatch import Stopwatch

T = TypeVar("T")


class NotTrained(Exception):
    """The policy took no optimizer step on a batch. `kind`: nonfinite, no_valid_token."""

    def __init__(self, kind: str, cause: str) -> None:
        super().__init__(cause)
        self.kind = kind


@dataclass(frozen=True)
class Trained:
    """A batch the policy was trained on. `estimates` and `critic` are None without a critic."""

    plan: StepPlan
    result: StepResult
    estimates: Estimates | None = None
    critic: StepResult | None = None
    kl: Mapping[str, float] = field(default_factory=dict)  # metrics, where KL is taken off rewards

    @property
    def losses(self) -> str | None:
        """Which optimizer steps of the policy or the critic were not taken, and why; None when all were."""
        result, expected = self.result, self.plan.optimizer_steps
        lost = []
        if result.optimizer_steps < expected:
            lost.append(result.skipped or f"{result.optimizer_steps} of {expected} optimizer steps were taken")
        if self.critic is not None and self.critic.skipped is not None:
            lost.append(f"critic: {self.critic.skipped}")
        return "; ".join(lost) or None


class BatchTraining:
    def __init__(self, planner: StepPlanner, ranks: RankGroup, critic: ValueModel | None, watch: Stopwatch) -> None:
        self._planner = planner
        self._ranks = ranks
        self._critic = critic
        self._watch = watch

    async def train(self, batch: Batch, step: int, version: int | None) -> Trained:
        """See StepPlan for `step` and `version`. Raises NotTrained."""
        if self._planner.valid_tokens(batch) == 0:
            raise NotTrained("no_valid_token", "every sample of the batch is masked or empty")
        if self._critic is None:
            trained = await self._train_policy(batch, self._planner.plan(batch, step, version))
        else:
            trained = await self._train_both(self._critic, batch, step, version)
        if trained.result.optimizer_steps == 0:
            raise NotTrained("nonfinite", trained.result.skipped or "no optimizer step was taken")
        return trained

    async def _train_policy(self, batch: Batch, plan: StepPlan) -> Trained:
        def train(rollouts: Sequence[Any]) -> Awaitable[StepResult]:
            return self._ranks.call(TrainerRank.train_step, plan, *rollouts)

        stages = [stage for stage in ("rollout", "teacher") if stage in batch.columns[0]]
        return Trained(plan, await _with_columns(batch, train, stages), kl=self._planner.kl_figures(batch))

    async def _train_both(self, critic: ValueModel, batch: Batch, step: int, version: int | None) -> Trained:
        rows = self._planner.step_rows(batch, step)
        with self._watch.measure("values"):
            values = await _with_rollouts(batch, lambda rollouts: critic.values(rows, rollouts))
        if not all(np.isfinite(row).all() for row in values):
            raise NotTrained("nonfinite", "the critic's values are not finite")
        estimates = self._planner.estimate(batch, values)
        plan = self._planner.plan(batch, step, version, estimates.advantages)
        trained, of_critic = await asyncio.gather(
            self._train_policy(batch, plan),
            _with_rollouts(batch, lambda rollouts: critic.train(rows, estimates.labels, rollouts)),
        )
        return replace(trained, estimates=estimates, critic=of_critic)


async def _with_rollouts(batch: Batch, call: Callable[[Sequence[Any]], Awaitable[T]]) -> T:
    return await _with_columns(batch, call, ["rollout"])


async def _with_columns(batch: Batch, call: Callable[[Sequence[Any]], Awaitable[T]], stages: Sequence[str]) -> T:
    """Give `call` references, stage by stage: whoever runs the ranks brings the columns to them, past the controller.

    Where they are lost on that way, and so no rank has begun, it is given the columns that the controller has.
    """
    try:
        return await call([row.columns[stage] for stage in stages for row in batch.rows])
    except ColumnsLost:
        return await call([columns[stage] for stage in stages for columns in batch.columns])
