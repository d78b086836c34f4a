"""Mixture-of-experts models over several ranks train like one rank does: real processes under gloo, float32.

Layouts are written as in `test_parallel_ranks`, the number of ranks that share out the experts beside them.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.integration import test_parallel_critic as critic
from tests.integration.test_parallel_ranks import (
    TOLERANCE,
    WHOLE_ALGORITHM,
    Job,
    alone,  # noqa: F401
    assert_same,
    plan,
    ranks,  # noqa: F401
    refusal,
    work,
    worst_error,
)
from topology.models import resolve_model

pytestmark = pytest.mark.timeout(180)


def moe(layout: str = "", experts: int = 1, **settings: object) -> Job:
    """The tiny model has four experts, two of them for a token."""
    backend = {"expert_parallel": experts, "distributed_optimizer": settings.pop("distributed_optimizer", True)}
    return Job(str(resolve_model("tiny-qwen3-moe")), layout, backend=tuple(backend.items()), **settings)


@pytest.mark.parametrize("distributed_optimizer", [True, False])
@pytest.mark.parametrize(
    ("layout", "experts"),
    [
        ("dp2", 1),
        ("dp2", 2),
        ("tp2 sp", 1),  # experts are split by rows
        ("tp2 sp", 2),  # experts are shared out by tensor-parallel ranks
        ("cp2", 2),
        ("dp4", 4),  # one expert a rank
        ("dp4", 2),
        ("tp2 sp dp2", 2),
        ("tp2 sp dp2", 4),
        ("pp2 dp2", 2),
    ],
)
def test_shared_out_experts_train_like_those_of_a_single_rank(layout, experts, distributed_optimizer, ranks, alone):  # noqa: F811
    job = moe(layout, experts, distributed_optimizer=distributed_optimizer)
    assert ("dp" in layout) == any(not micro for rank in plan(job, 1).minibatches[0].ranks for micro in rank)

    assert_same(ranks.run(job.ranks, work, job), alone(moe()))


def test_minibatches_and_every_term_of_the_loss_agree_when_experts_are_shared_out(ranks, alone):  # noqa: F811
    job = moe("tp2 sp dp2", 2, algorithm=WHOLE_ALGORITHM, minibatches=3, steps=(1, 2))

    assert_same(ranks.run(job.ranks, work, job), alone(moe(algorithm=WHOLE_ALGORITHM, minibatches=3, steps=(1, 2))))


def test_prompts_that_are_not_shared_change_nothing(ranks, alone):  # noqa: F811
    job = moe("dp2", 2)
    job = replace(job, backend=(*job.backend, ("share_prompt", False)))

    assert_same(ranks.run(job.ranks, work, job), alone(moe()))


def test_a_router_that_does_not_renormalise_equals_transformers(tmp_path, ranks):  # noqa: F811
    folder = changed(tmp_path, norm_topk_prob=False)
    expected = ranks.run(1, work, Job(folder, kind="torch"))[0]

    assert_same(ranks.run(1, work, Job(folder)), expected)
    assert ranks.run(1, work, moe())[0].results[0].loss != pytest.approx(expected.results[0].loss, rel=1e-3)


@pytest.mark.parametrize("distributed_optimizer", [True, False])
def test_a_checkpoint_of_shared_out_experts_continues_bit_by_bit_and_fits_other_layouts(
    distributed_optimizer,
    tmp_path,
    ranks,  # noqa: F811
):
    folder = str(tmp_path / "two")
    job = moe("dp2", 2, distributed_optimizer=distributed_optimizer)
    expected = ranks.run(2, work, replace(job, steps=(1, 2, 3), save=None))
    ranks.run(2, work, replace(job, steps=(1, 2), save=folder))

    again = ranks.run(2, work, replace(job, steps=(3,), restore=folder))
    for found, reference in zip(again, expected, strict=True):
        assert found.results[0].loss == reference.results[2].loss
        assert all(np.array_equal(found.weights[name], value) for name, value in reference.weights.items())
    for layout, experts in (("", 1), ("tp2 sp dp2", 4)):
        other = moe(layout, experts, distributed_optimizer=distributed_optimizer, steps=(3,), restore=folder)
        for found in ranks.run(other.ranks, work, other):
            assert worst_error(found.weights, expected[0].weights) < TOLERANCE


def test_a_critic_with_shared_out_experts_learns_like_one_of_a_single_rank(ranks):  # noqa: F811
    (value, expected), *_ = ranks.run(1, critic.work, moe(steps=(1, 2)))
    found = ranks.run(2, critic.work, moe("dp2", 2, steps=(1, 2)))

    assert critic.whole([mine for mine, _ in found]) == pytest.approx(critic.whole([value]), rel=1e-4, abs=1e-5)
    for _, outcome in found:
        assert outcome.results[1].grad_norm == pytest.approx(expected.results[1].grad_norm, rel=TOLERANCE)
        assert worst_error(outcome.weights, expected.weights) < TOLERANCE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder_sparse_step": 2}, "does not support layers without experts (decoder_sparse_step) for qwen3_moe"),
        ({"mlp_only_layers": [0]}, "does not support layers without experts (mlp_only_layers) for qwen3_moe"),
        ({"num_local_experts": 3}, "not of this model: ['model.layers.0.mlp.experts.3.down_proj.weight'"),
    ],
)
def test_a_model_whose_experts_cannot_be_represented_is_refused_with_the_reason(changes, message, tmp_path, ranks):  # noqa: F811
    assert message in ranks.run(1, refusal, Job(changed(tmp_path, **changes)))[0]


@pytest.mark.parametrize(
    ("layout", "experts", "message"),
    [
        ("dp3", 3, "backend.expert_parallel: 3 does not divide the model's 4 experts: use 1, 2 or 4"),
        ("tp2", 1, "backend.sequence_parallel: experts need it with tensor_parallel 2"),
    ],
)
def test_a_layout_that_experts_cannot_have_is_refused_before_ranks_meet(layout, experts, message, ranks):  # noqa: F811
    assert message in ranks.run(1, refusal, moe(layout, experts))[0]


def changed(tmp_path: Path, **changes: object) -> str:
    folder = tmp_path / "model"
    shutil.copytree(resolve_model("tiny-qwen3-moe"), folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
