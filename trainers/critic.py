"""The controller of a critic: the value model that a PPO policy is trained with.

It takes the policy's rows, divides them into micro-batches by its own backend, and calls its own ranks. It has no state
between calls, and knows no more of a row than its lengths and masks: the columns go from whoever has them to the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trainers.batch import StepPlan, StepRows, plan_step
from trainers.config import CriticConfig
from trainers.learner import RankValues, StepResult
from trainers.rank import TrainerRank
from trainers.rank_group import RankGroup


class Critic:
    """Implements `trainers.ports.ValueModel`."""

    def __init__(self, config: CriticConfig, ranks: RankGroup) -> None:
        self._config = config
        self._ranks = ranks
        self._last: StepResult | None = None

    async def values(self, rows: StepRows, references: Sequence[Any]) -> list[np.ndarray]:
        answers: list[RankValues] = await self._ranks.call(TrainerRank.values, self._plan(rows), *references)
        # Ranks of one data-parallel rank all say the same; of different ones, each has the samples that the others lack.
        parts = {answer.data_parallel_rank: answer.rows for answer in answers}
        return [np.sum(row, axis=0) for row in zip(*parts.values(), strict=True)]

    async def train(
        self, rows: StepRows, labels: Mapping[str, tuple[np.ndarray, ...]], references: Sequence[Any]
    ) -> StepResult:
        plan = replace(self._plan(rows), labels=labels)
        result: StepResult = await self._ranks.call(TrainerRank.train_step, plan, *references)
        if result.optimizer_steps == plan.optimizer_steps:  # a minibatch without a token is no failure
            result = replace(result, skipped=None)
        self._last = result
        return result

    async def stage(self) -> None:
        await self._ranks.call(TrainerRank.stage)

    async def write(self, folder: str) -> None:
        await self._ranks.call(TrainerRank.write, folder)

    def status(self) -> dict[str, Any]:
        """Step, loss and gradient norm of the last training; empty before the first."""
        last = self._last
        return {} if last is None else {"step": last.step, "loss": last.loss, "grad_norm": last.grad_norm}

    def _plan(self, rows: StepRows) -> StepPlan:
        backend = self._config.backend
        return plan_step(
            step=rows.step,
            version=None,
            shapes=rows.shapes,
            advantages=[np.zeros(len(shape.responses), np.float32) for shape in rows.shapes],
            masks=rows.masks,
            max_response_tokens=0,  # read by constant normalisation only
            micro_batch_tokens=backend.micro_batch_tokens,
            share_prompt=backend.share_prompt,
            data_parallel=backend.data_parallel,
            minibatches=self._config.minibatches,
        )
