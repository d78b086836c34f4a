"""A critic on several ranks says and learns what it does on one: real processes under gloo, float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.integration.test_parallel_ranks import (
    RAGGED,
    TOLERANCE,
    Job,
    Outcome,
    arrays,
    make_model,
    rows,
    worst_error,
)
from tests.ranks import Ranks, save
from trainers.batch import RowShape, StepPlan, plan_step
from trainers.config import CriticConfig
from trainers.learner import RankValues, Rendezvous
from trainers.rank import TrainerRank

pytestmark = pytest.mark.timeout(180)


def plan(job: Job, step: int) -> StepPlan:
    rng = np.random.default_rng(step)
    shapes = [RowShape(prompt, responses) for prompt, responses in RAGGED]
    made = plan_step(
        step=step,
        version=None,
        shapes=shapes,
        advantages=[np.zeros(len(shape.responses), np.float32) for shape in shapes],
        masks=[np.ones(len(shape.responses), bool) for shape in shapes],
        max_response_tokens=0,
        micro_batch_tokens=16,
        share_prompt=True,
        data_parallel=job.settings.get("data_parallel", 1),
    )
    tokens = [sum(shape.responses) for shape in shapes]
    returns = tuple(rng.normal(1.0, 0.5, count).astype(np.float32) for count in tokens)
    return replace(made, labels={"returns": returns, "values": tuple(np.zeros(count, np.float32) for count in tokens)})


def work(rendezvous: Rendezvous, job: Job) -> tuple[RankValues, Outcome]:
    """Two steps: before the first the head is zero, and no gradient passes through it."""
    config = CriticConfig(
        backend={"threads": 1, **job.settings}, optimizer={"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4}
    )
    rank = TrainerRank(config, model_path=job.model, rendezvous=rendezvous, bucket_bytes=1 << 16, seed=0, steps=10)
    rank.start()
    try:
        if job.restore:
            rank.restore(job.restore)
        results = [rank.train_step(plan(job, step), *rows(job)) for step in job.steps]
        if job.save:
            save(rank, job.save)
        values = rank.values(plan(job, 9), *rows(job))
        policy = rank.learner.policy
        return values, Outcome(results, arrays(policy.gradients()), arrays(rank.learner.weights()), [])
    finally:
        rank.close()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(4)
    yield started
    started.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """With tied embeddings: the output layer that the head replaces has no weights of its own."""
    return make_model(tmp_path_factory.mktemp("model") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def alone(ranks, model) -> tuple[RankValues, Outcome]:
    return ranks.run(1, work, Job(model, steps=(1, 2)))[0]


def whole(answers: list[RankValues]) -> np.ndarray:
    """As the controller puts them together: one answer for each data-parallel rank."""
    parts = {answer.data_parallel_rank: np.concatenate(answer.rows) for answer in answers}
    return np.sum(list(parts.values()), axis=0)


@pytest.mark.parametrize("layout", ["tp2", "tp2 sp", "pp2", "cp2", "dp2", "tp2 sp pp2"])
def test_values_gradients_and_weights_equal_those_of_one_rank(layout, ranks, model, alone):
    job = Job(model, layout, steps=(1, 2))
    found = ranks.run(job.ranks, work, job)

    values, expected = alone
    assert np.ptp(whole([values])) > 0.01
    assert whole([mine for mine, _ in found]) == pytest.approx(whole([values]), rel=1e-4, abs=1e-5)
    for _, outcome in found:
        for result, reference in zip(outcome.results, expected.results, strict=True):
            assert result.loss == pytest.approx(reference.loss, rel=TOLERANCE)
            assert result.grad_norm == pytest.approx(reference.grad_norm, rel=TOLERANCE)
        assert worst_error(outcome.gradients, expected.gradients) < TOLERANCE
        assert worst_error(outcome.weights, expected.weights) < TOLERANCE


def test_a_checkpoint_of_two_tensor_parallel_ranks_goes_on_with_two_pipeline_stages(ranks, model, alone, tmp_path):
    ranks.run(2, work, Job(model, "tp2 sp", steps=(1,), save=str(tmp_path / "one")))

    found = ranks.run(2, work, Job(model, "pp2", steps=(2,), restore=str(tmp_path / "one")))

    assert worst_error(found[0][1].weights, alone[1].weights) < TOLERANCE
    assert whole([values for values, _ in found]) == pytest.approx(whole([alone[0]]), rel=1e-4, abs=1e-5)
