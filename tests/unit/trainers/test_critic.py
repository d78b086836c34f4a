"""The controller of a critic among fake ranks, and a trainer with a critic beside it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fakes_trainer import FakeRank, Log, make_row, step_result
from tests.unit.trainers.test_trainer import Bench, config, fresh
from trainers.batch import RowShape, StepPlan, StepRows
from trainers.checkpoints import CheckpointError, find_latest
from trainers.config import CriticConfig, MegatronBackend, Ppo, TorchBackend, TrainerConfig
from trainers.critic import Critic
from trainers.guards import SkippedTooOften
from trainers.learner import RankValues, StepResult
from trainers.rank_group import LocalWorker, RankGroup

pytestmark = pytest.mark.timeout(30)
ROWS = StepRows(3, [RowShape(2, (3, 1)), RowShape(2, (2,))], [np.ones(2, bool), np.ones(1, bool)])


@dataclass
class ValueRank:
    """Says of every token it has the row's number + 1; or trains with the given result."""

    data_parallel_rank: int
    result: StepResult | None = None
    plans: list[StepPlan] = field(default_factory=list)
    rollouts: tuple[Any, ...] = ()

    def values(self, plan: StepPlan, *rollouts: Any) -> RankValues:
        self.plans.append(plan)
        self.rollouts = rollouts
        found = [np.zeros(sum(shape.responses), np.float32) for shape in ROWS.shapes]
        for part in (part for micro in plan.minibatches[0].ranks[self.data_parallel_rank] for part in micro):
            starts = np.concatenate([[0], np.cumsum(ROWS.shapes[part.row].responses)])
            for sample in part.samples:
                found[part.row][starts[sample] : starts[sample + 1]] = part.row + 1
        return RankValues(self.data_parallel_rank, found)

    def train_step(self, plan: StepPlan, *rollouts: Any) -> StepResult:
        self.plans.append(plan)
        assert self.result is not None
        return self.result


def critic(*ranks: ValueRank, minibatches: int = 1, data_parallel: int = 1) -> Critic:
    backend = MegatronBackend(type="megatron", data_parallel=data_parallel, micro_batch_tokens=6)
    group = RankGroup([LocalWorker(rank, f"trainer/critic/rank/{i}") for i, rank in enumerate(ranks)], timeout=5.0)
    return Critic(CriticConfig(backend=backend, minibatches=minibatches), group)


def test_values_of_data_parallel_ranks_are_put_together_and_those_of_tensor_parallel_ranks_counted_once() -> None:
    ranks = [ValueRank(0), ValueRank(0), ValueRank(1), ValueRank(1)]

    found = asyncio.run(critic(*ranks, data_parallel=2).values(ROWS, ["first", "second"]))

    assert [values.tolist() for values in found] == [[1, 1, 1, 1], [2, 2]]
    assert ranks[3].rollouts == ("first", "second")


def test_a_critic_trains_in_minibatches_of_its_own_on_the_labels_it_is_given() -> None:
    rank = ValueRank(0, step_result(3, optimizer_steps=2))
    labels = {"returns": (np.ones(4, np.float32), np.ones(2, np.float32))}

    asyncio.run(critic(rank, minibatches=2).train(ROWS, labels, ["first", "second"]))

    (plan,) = rank.plans
    assert (plan.step, plan.version, len(plan.minibatches)) == (3, None, 2)
    assert plan.labels == labels


def test_only_an_optimizer_step_that_could_have_been_taken_counts_as_lost() -> None:
    rows = StepRows(3, ROWS.shapes, [np.ones(2, bool), np.zeros(1, bool)])
    empty = ValueRank(0, step_result(3, optimizer_steps=1, skipped="minibatch 1: no valid token"))
    broken = ValueRank(0, step_result(3, optimizer_steps=0, skipped="minibatch 0: loss is nan"))

    results = [asyncio.run(critic(rank, minibatches=2).train(rows, {}, [])) for rank in (empty, broken)]

    assert [result.skipped for result in results] == [None, "minibatch 0: loss is nan"]


def write_head(folder: Path) -> None:
    folder.mkdir()
    (folder / "head.bin").write_bytes(b"value")


@dataclass
class FakeCritic:
    """Implements `trainers.ports.ValueModel`; every value is `value`."""

    log: Log = field(default_factory=list)
    value: float = 0.25
    skipped: str | None = None
    labels: Mapping[str, tuple[np.ndarray, ...]] = field(default_factory=dict)
    training: threading.Event = field(default_factory=threading.Event)
    saves: bool = True

    async def values(self, rows: StepRows, references: Sequence[Any]) -> list[np.ndarray]:
        self.log.append(("values", rows.step, len(references)))
        return [np.full(sum(shape.responses), self.value, np.float32) for shape in rows.shapes]

    async def train(
        self, rows: StepRows, labels: Mapping[str, tuple[np.ndarray, ...]], references: Sequence[Any]
    ) -> StepResult:
        self.labels = labels
        self.training.set()
        return step_result(rows.step, loss=0.125, skipped=self.skipped)

    async def stage(self) -> None:
        self.log.append(("stage critic",))

    async def write(self, folder: str) -> None:
        if self.saves:
            write_head(Path(folder))


def ppo(**changes: Any) -> TrainerConfig:
    algorithm = Ppo(type="ppo", kl_coef=0.0, whiten_advantages=False, lam=1.0, **changes.pop("algorithm", {}))
    return config(algorithm=algorithm, backend=TorchBackend(type="torch"), **changes)


def bench(folder: Path, made: FakeCritic, *, batches: int = 1, **changes: Any) -> Bench:
    settings = {"config": ppo(steps=batches), "batches": [fresh(2 * i, 2 * i + 1) for i in range(batches)]} | changes
    found = Bench(folder, critic=made, **settings)
    made.log = found.log
    return found


def test_the_policy_learns_from_the_values_and_the_critic_from_the_returns(tmp_path: Path) -> None:
    made = FakeCritic()
    found = bench(tmp_path, made)
    plans = []

    class Rank(FakeRank):
        def train_step(self, plan: StepPlan, *rollouts: Any) -> StepResult:
            plans.append(plan)
            return super().train_step(plan, *rollouts)

    found.rank = Rank(found.log)
    assert found.run() == "done"

    assert found.calls("sample", "values", "train_step") == [("sample", 2), ("values", 1, 2), ("train_step", 1, 0, 2)]
    # rewards 0 and 1 of samples of 3 and 2 tokens; all values are 0.25
    assert plans[0].advantages[0].tolist() == [-0.25, -0.25, -0.25, 0.75, 0.75]
    assert made.labels["returns"][0].tolist() == [0, 0, 0, 1, 1]
    assert made.labels["values"][1].tolist() == [0.25] * 5
    assert found.recorder.objects[0]["value/loss"] == 0.125


def test_policy_and_critic_train_at_the_same_time(tmp_path: Path) -> None:
    made = FakeCritic()
    found = bench(tmp_path, made)

    class Rank(FakeRank):
        def train_step(self, plan: StepPlan, *rollouts: Any) -> StepResult:
            assert made.training.wait(timeout=5), "the critic was not trained meanwhile"
            return super().train_step(plan, *rollouts)

    found.rank = Rank(found.log)
    assert found.run() == "done"


def test_values_that_are_not_finite_skip_the_step_and_too_many_end_the_run(tmp_path: Path) -> None:
    settings = ppo(max_nonfinite_steps=2)
    found = bench(tmp_path, FakeCritic(value=float("nan")), batches=2, config=settings)
    with pytest.raises(SkippedTooOften, match=r"2 times in a row \(nonfinite; limit 2\): the critic's values are not"):
        found.run()
    assert not found.calls("train_step", "trained")
    assert found.calls("dropped") == [("dropped", (0, 1), "nonfinite"), ("dropped", (2, 3), "nonfinite")]


def test_a_critic_whose_steps_are_not_finite_ends_the_run_after_the_limit(tmp_path: Path) -> None:
    made = FakeCritic(skipped="minibatch 0: gradient norm is inf")
    found = bench(tmp_path, made, batches=2, config=ppo(max_nonfinite_steps=2))
    with pytest.raises(SkippedTooOften, match="critic: minibatch 0: gradient norm is inf"):
        found.run()
    assert found.calls("trained") == [("trained", (0, 1), 1), ("trained", (2, 3), 2)]


def test_a_batch_without_a_valid_token_is_not_shown_to_the_critic(tmp_path: Path) -> None:
    masking = ppo(steps=1, algorithm={"mask_truncated": True})
    found = bench(tmp_path, FakeCritic(), config=masking, batches=1)
    found.rows.batches = [fresh(0, 1, finish=(1, 1)), fresh(2, 3)]
    assert found.run() == "done"
    assert found.calls("values", "dropped") == [("dropped", (0, 1), "no_valid_token"), ("values", 1, 2)]


def test_the_reference_is_fetched_when_its_divergence_is_in_the_reward(tmp_path: Path) -> None:
    def with_reference(version: int) -> list[Any]:
        rows = [make_row(i, version=version) for i in (0, 1)]
        for row in rows:
            row.columns["reference"] = {"reference_logprobs": np.full(5, -1.5, np.float32)}
        return rows

    penalised = config(algorithm=Ppo(type="ppo", kl_coef=0.1), steps=1)
    found = bench(tmp_path, FakeCritic(), config=penalised)
    found.rows.batches = [with_reference]
    assert found.run() == "done"
    assert found.recorder.objects[0]["kl"] == found.recorder.objects[0]["kl/k1"] == 1.0  # log-probs -0.5 and -1.5
    assert found.recorder.objects[0]["reward/kl_penalty"] == pytest.approx(0.25)  # 2.5 tokens a sample


def test_policy_and_critic_are_saved_in_one_checkpoint(tmp_path: Path) -> None:
    assert bench(tmp_path, FakeCritic(), checkpoint_at_end=True).run() == "done"
    latest = find_latest(tmp_path).path
    assert (latest / "trainer" / "model.bin").read_bytes() == b"weights"
    assert (latest / "critic" / "head.bin").read_bytes() == b"value"


def test_a_checkpoint_without_what_the_critic_wrote_is_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the ranks wrote nothing to .*critic that is seen here"):
        bench(tmp_path, FakeCritic(saves=False), checkpoint_at_end=True).run()
    assert not list(tmp_path.iterdir())
