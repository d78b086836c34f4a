"""A teacher's columns train a policy alike on every backend and layout of ranks, with and without a reward: gloo, float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from tests.integration.test_parallel_ranks import VOCAB, Job, Outcome, arrays, assert_same, draw, make_model, plan, rows
from tests.ranks import Ranks
from trainers.batch import StepPlan
from trainers.config import TrainerConfig
from trainers.distillation.columns import DEMONSTRATED
from trainers.learner import Rendezvous
from trainers.rank import TrainerRank

K = 6

pytestmark = pytest.mark.timeout(240)


class Frozen(tuple):
    """Settings of which some are mappings, to be known by what they print as."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(self))


@dataclass(frozen=True)
class DistillJob(Job):
    """`mix`: the divergence beside a reward's loss, in place of alone. `columns`: whether makers have a teacher."""

    distill: tuple[tuple[str, Any], ...] = ()
    mix: bool = False
    columns: bool = True

    @property
    def config(self) -> TrainerConfig:
        settings = super().config.model_dump()
        settings["algorithm"] = {"type": "grpo" if self.mix else "distill"}
        return TrainerConfig(**{**settings, "distill": dict(self.distill)})


def teacher_columns(rollout: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """As of a teacher whose distribution is drawn by chance: columns of stage `teacher`."""
    rng = np.random.default_rng(seed)
    tokens = rollout["response_ids"].size
    logits = rng.normal(0.0, 3.0, (tokens, VOCAB))
    every = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    ids = np.argsort(-every, axis=-1)[:, :K]
    top = np.take_along_axis(every, ids, -1).astype(np.float32)
    return {
        "teacher_ids": ids.astype(np.int32).ravel(),
        "teacher_logprobs": top.ravel(),
        "teacher_mass": np.exp(top).sum(-1),
        "teacher_target_logprobs": every[np.arange(tokens), rollout["response_ids"]].astype(np.float32),
    }


def plan_of(job: DistillJob, step: int) -> StepPlan:
    """The second row is one that no policy sampled."""
    made = plan(job, step)
    if not job.mix:
        made = replace(made, advantages=tuple(np.zeros_like(values) for values in made.advantages))
    tokens = [sum(responses) for _, responses in job.shapes]
    return replace(made, labels={DEMONSTRATED: tuple(np.full(n, i == 1, np.float32) for i, n in enumerate(tokens))})


def work(rendezvous: Rendezvous, job: DistillJob) -> Outcome:
    rank = TrainerRank(job.config, model_path=job.model, rendezvous=rendezvous, bucket_bytes=1 << 16, seed=0)
    rank.start()
    try:
        columns = rows(job)
        teachers = [teacher_columns(rollout, seed) for seed, rollout in enumerate(columns)] if job.columns else []
        results = [rank.train_step(plan_of(job, step), *columns, *teachers) for step in job.steps]
        return Outcome(results, arrays(rank.learner.policy.gradients()), arrays(rank.learner.weights()), draw(1))
    finally:
        rank.close()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(2)
    yield started
    started.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return make_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> str:
    return make_model(tmp_path_factory.mktemp("teachers") / "llama", "llama")


@pytest.fixture(scope="module")
def alone(ranks) -> Any:
    """What plain torch finds, computed once for each job."""
    known: dict[DistillJob, Outcome] = {}

    def outcome(job: DistillJob) -> Outcome:
        plain = replace(job, layout="", kind="torch")
        if plain not in known:
            known[plain] = ranks.run(1, work, plain)[0]
        return known[plain]

    return outcome


@pytest.mark.parametrize("layout", ["", "tp2", "tp2 sp", "pp2", "cp2", "dp2"])
def test_without_a_reward_every_layout_learns_what_plain_torch_learns(layout, model, ranks, alone):
    job = DistillJob(model, layout, minibatches=3, steps=(1, 2))

    found, expected = ranks.run(job.ranks, work, job), alone(job)

    assert_same(found, expected)
    first, second = (result.metrics for result in expected.results)
    assert second["distill/kl"] < first["distill/kl"]
    assert 0 < first["distill/topk_overlap"] < 1
    assert first["distill/teacher_mass"] == pytest.approx(0.6, abs=0.3)


@pytest.mark.parametrize("layout", ["tp2 sp", "pp2", "dp2"])
@pytest.mark.parametrize(
    "distill",
    [
        {"divergence": "reverse_kl", "coef": 0.5, "advantage_alpha": 0.3},
        {"divergence": "jsd", "beta": 0.2, "sft_alpha": 0.7},
    ],
    ids=["reverse_kl and advantages", "jsd and demonstrations"],
)
def test_a_mix_with_a_reward_is_the_same_on_every_layout(distill, layout, model, ranks, alone):
    job = DistillJob(model, layout, distill=tuple(distill.items()), mix=True, minibatches=3)

    assert_same(ranks.run(job.ranks, work, job), alone(job))


def test_the_parts_of_the_loss_add_up_to_it(model, alone):
    distill = (("sft_alpha", 0.7), ("advantage_alpha", 0.3))

    (result,) = alone(DistillJob(model, distill=distill, mix=True)).results

    parts = {name: value for name, value in result.metrics.items() if name.startswith("loss/")}
    assert parts.keys() == {"loss/distill", "loss/sft", "loss/policy"}
    assert sum(parts.values()) == pytest.approx(result.loss, rel=1e-5)
    assert parts["loss/distill"] == pytest.approx(result.metrics["distill/kl"], rel=1e-5)


@pytest.mark.parametrize("layout", ["", "tp2 sp", "pp2", "cp2", "dp2"])
@pytest.mark.parametrize("top_k", [None, K])
def test_a_teacher_on_the_ranks_teaches_every_layout_what_plain_torch_learns(
    top_k, layout, model, teacher, ranks, alone
):
    """A model of another family, at a temperature that rows were not sampled at."""
    settings = {"model": teacher, "dtype": "float32", "top_k": top_k}
    distill = (("temperature", 1.5), ("divergence", "jsd"), ("advantage_alpha", 0.1), ("teacher", settings))
    job = DistillJob(model, layout, distill=Frozen(distill), minibatches=2, columns=False)

    found, expected = ranks.run(job.ranks, work, job), alone(job)

    assert_same(found, expected)
    metrics = expected.results[0].metrics
    assert (metrics["distill/teacher_mass"] == 1.0) == (top_k is None)
    assert ("distill/topk_overlap" in metrics) == (top_k is not None)


def test_a_policy_on_the_ranks_of_its_own_teacher_has_nothing_to_learn(model, ranks):
    settings = {"model": model, "dtype": "float32"}
    job = DistillJob(model, "tp2", distill=Frozen((("teacher", settings),)), columns=False)

    for outcome in ranks.run(job.ranks, work, job):
        assert abs(outcome.results[0].metrics["distill/kl"]) < 1e-6
        assert outcome.results[0].grad_norm < 1e-5


def test_the_teachers_on_makers_and_on_ranks_are_compared_where_there_are_both(model, teacher, alone):
    settings = {"model": teacher, "dtype": "float32"}
    job = DistillJob(model, distill=Frozen((("teacher", settings),)))

    assert alone(job).results[0].metrics["distill/mismatch"] > 1.0, "one of them is drawn by chance"
    assert "distill/mismatch" not in alone(replace(job, columns=False)).results[0].metrics
    assert "distill/mismatch" not in alone(replace(job, distill=())).results[0].metrics
