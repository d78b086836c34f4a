"""What a teacher's columns become on their way from the buffer to the loss."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from buffer.records import SampledRow
from tests.fakes_trainer import FakeClock, make_row, step_result
from trainers.algorithms.base import LossTerms, TokenBatch
from trainers.batch import Totals
from trainers.config import TrainerConfig
from trainers.distillation.loss import DistillLoss
from trainers.packing import check_rollouts, pack_minibatch
from trainers.planner import Batch, StepPlanner
from trainers.rank_group import LocalWorker, RankGroup
from trainers.stopwatch import Stopwatch
from trainers.training import BatchTraining


def config(algorithm: str = "distill", **changes: Any) -> TrainerConfig:
    return TrainerConfig(algorithm={"type": algorithm}, distill={}, backend={"type": "torch"}, steps=1, **changes)


def row(row_id: int, *, width: int = 2, **columns: Any) -> SampledRow:
    """Five tokens without a reward; the teacher's entries of token t are 10 t, 10 t + 1, ..."""
    made = make_row(row_id)
    ids = (10 * np.arange(5)[:, None] + np.arange(width)).astype(np.int32)
    teacher = {
        "teacher_ids": ids.ravel(),
        "teacher_logprobs": np.full(5 * width, -1.0, np.float32),
        "teacher_mass": np.full(5, 0.7, np.float32),
        "teacher_target_logprobs": -np.arange(5, dtype=np.float32),
    }
    return replace(made, columns={"rollout": made.columns["rollout"], "teacher": teacher | columns})


def batch_of(*rows: SampledRow) -> Batch:
    return Batch(rows, [row.columns for row in rows], [0] * len(rows))


def test_the_trainer_reads_a_teacher_where_it_distills_and_no_reward_where_that_is_all() -> None:
    assert config().stages == ("rollout", "teacher")
    assert config("grpo").stages == ("rollout", "reward", "teacher")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"teacher_ids": np.zeros(9, np.int32)}, "row 7: the teacher has 9 ids and 10 log-probs for 5 response tokens"),
        ({"teacher_mass": np.zeros(4, np.float32)}, "row 7: teacher_mass has 4 entries for 5 response tokens"),
    ],
)
def test_columns_that_do_not_fit_their_row_are_refused_with_its_id(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepPlanner(config(), 8).plan(batch_of(row(3), row(7, **columns)), 1, 0)


def test_rows_with_different_numbers_of_entries_are_refused() -> None:
    batch = batch_of(row(3), row(7, width=3))
    plan = StepPlanner(config(), 8).plan(batch, 1, 0)
    with pytest.raises(ValueError, match=r"teachers give \[2, 3\] log-probs a token"):
        check_rollouts(plan, [{**columns["rollout"], **columns["teacher"]} for columns in batch.columns])


def test_each_target_is_packed_with_its_own_entries_of_the_teacher() -> None:
    batch = batch_of(row(3), row(7))
    plan = StepPlanner(config(), 8).plan(batch, 1, 0)
    groups = check_rollouts(plan, [{**columns["rollout"], **columns["teacher"]} for columns in batch.columns])
    (packed,) = pack_minibatch(groups, plan, 0, 0, share_prompt=False)

    assert packed.teacher is not None
    position = packed.targets - 10  # response ids are 10, 11, ...
    np.testing.assert_array_equal(packed.teacher.ids, 10 * position[:, None] + np.arange(2))
    np.testing.assert_array_equal(packed.labels["teacher_target_logprobs"], -position)


def test_the_ranks_get_the_references_of_the_teachers_columns_behind_those_of_the_rollouts() -> None:
    class Rank:
        def train_step(self, plan: Any, *columns: Any) -> Any:
            self.columns = columns
            return step_result(plan.step)

    async def main() -> None:
        group = RankGroup([LocalWorker(rank)], timeout=5.0)
        training = BatchTraining(StepPlanner(config(), 8), group, None, Stopwatch(FakeClock()))
        await training.train(batch_of(*rows), 1, 0)

    rank, rows = Rank(), (row(3), row(7))
    asyncio.run(main())
    expected = [rows[0].columns[s] if i == 0 else rows[1].columns[s] for s in ("rollout", "teacher") for i in (0, 1)]
    assert all(found is wanted for found, wanted in zip(rank.columns, expected, strict=True))


def test_a_teachers_advantage_is_its_log_prob_less_that_of_the_proximal_policy_and_constant() -> None:
    class Seen:
        needs_reference = entropy_gradient = False

        def __call__(self, batch: TokenBatch) -> LossTerms:
            self.advantages = batch.advantages
            return LossTerms(batch.current.sum() * 0.0, {}, {})

    seen = Seen()
    loss = DistillLoss(seen, coef=2.0, sft_alpha=0.5, advantage_alpha=0.1, normalise="token", on_ranks=False)
    three = torch.tensor([0.0, 1.0, 2.0])
    current = (-1.0 - three).requires_grad_()
    terms = loss(
        TokenBatch(
            current=current,
            proximal=-three,
            behaviour=-three,
            reference=None,
            entropy=three,
            advantages=torch.ones(3),
            samples=torch.zeros(3, dtype=torch.int64),
            lengths=torch.full((3,), 3.0),
            totals=Totals(tokens=4, samples=2, max_response_tokens=8),
            labels={
                "divergence": three,
                "topk_overlap": torch.tensor([0.5, -1.0, 1.0]),
                "teacher_mass": torch.full((3,), 0.5),
                "teacher_target_logprobs": torch.full((3,), -1.0),
                "demonstrated": torch.tensor([0.0, 1.0, 1.0]),
            },
        )
    )
    terms.loss.backward()

    torch.testing.assert_close(seen.advantages, torch.tensor([0.9, 1.0, 1.1]))
    assert not seen.advantages.requires_grad
    assert float(terms.loss) == pytest.approx(2.0 * 3 / 4 + 0.5 * (2 + 3) / 4)
    torch.testing.assert_close(current.grad, torch.tensor([0.0, -0.125, -0.125]))
    assert (float(terms.sums["topk_overlap/tokens"]), float(terms.sums["topk_overlap/sum"])) == (2.0, 1.5)
