"""Every way to split a model and its data over ranks trains it like one rank does: real processes under gloo, float32.

A layout is written as in `tp2 sp pp2 cp2 dp2`: tensor, sequence, pipeline, context and data parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.ranks import Ranks
from tests.rollouts import rollout_columns
from trainers.batch import RowShape, StepPlan, plan_step
from trainers.config import TrainerConfig
from trainers.learner import Rendezvous, StepResult
from trainers.rank import TrainerRank

TOLERANCE = 1e-5  # relative, in float32
SIZES = {"tp": "tensor_parallel", "pp": "pipeline_parallel", "cp": "context_parallel", "dp": "data_parallel"}
VOCAB = 323  # not divisible: padded differently by every tensor-parallel size

pytestmark = pytest.mark.timeout(180)


@dataclass(frozen=True)
class Job:
    """What one learner does: restore, train, save. `layout` as in the docstring of this module."""

    model: str
    layout: str = ""
    kind: str = "megatron"
    algorithm: tuple[tuple[str, Any], ...] = ()
    backend: tuple[tuple[str, Any], ...] = ()
    steps: tuple[int, ...] = (1,)
    minibatches: int = 1
    restore: str | None = None
    save: str | None = None

    @property
    def settings(self) -> dict[str, Any]:
        if self.kind == "torch":
            return {"type": "torch"}
        words = self.layout.split()
        sizes = {SIZES[word[:2]]: int(word[2:]) for word in words if word != "sp"}
        return {"type": "megatron", "dtype": "float32", "sequence_parallel": "sp" in words, **sizes, **dict(self.backend)}

    @property
    def config(self) -> TrainerConfig:
        return TrainerConfig(
            algorithm={"type": "grpo", **dict(self.algorithm)},
            backend={"threads": 1, **self.settings},
            # eps well above the rounding of the gradients: else Adam's first step is their sign, noise included
            optimizer={"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-4, "max_grad_norm": 0.5},
            steps=10,
        )

    @property
    def ranks(self) -> int:
        return getattr(self.config.backend, "ranks", 1)


@dataclass(frozen=True)
class Outcome:
    """Of one rank."""

    results: list[StepResult]
    gradients: dict[str, np.ndarray] = field(repr=False)
    weights: dict[str, np.ndarray] = field(repr=False)


def rows() -> list[dict[str, np.ndarray]]:
    """Ragged: a micro-batch of its own for some, and one that stays empty with two data-parallel ranks."""
    rng = np.random.default_rng(0)
    shapes = [(5, [3, 1, 4]), (9, [2, 6, 1]), (3, [7, 7, 2])]
    return [rollout_columns(rng, prompt, responses) for prompt, responses in shapes]


def plan(job: Job, step: int) -> StepPlan:
    rng = np.random.default_rng(step)
    shapes = [RowShape.of(row) for row in rows()]
    return plan_step(
        step=step,
        version=0,
        shapes=shapes,
        advantages=[rng.normal(size=len(shape.responses)).astype(np.float32) for shape in shapes],
        masks=[np.ones(len(shape.responses), bool) for shape in shapes],
        max_response_tokens=8,
        micro_batch_tokens=16,
        share_prompt=job.settings.get("share_prompt", job.kind == "megatron"),
        data_parallel=job.settings.get("data_parallel", 1),
        minibatches=job.minibatches,
    )


def work(rendezvous: Rendezvous, job: Job) -> Outcome:
    rank = TrainerRank(job.config, model_path=job.model, rendezvous=rendezvous, bucket_bytes=1 << 16, seed=0)
    rank.start()
    try:
        if job.restore:
            rank.restore(job.restore)
        results = [rank.train_step(plan(job, step), *rows()) for step in job.steps]
        if job.save:
            rank.save(job.save)
        return Outcome(results, arrays(rank.learner.policy.gradients()), arrays(rank.learner.weights()))
    finally:
        rank.close()


def arrays(tensors: Iterator[tuple[str, torch.Tensor]]) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for name, tensor in tensors:
        assert name not in found, f"{name} came twice"
        found[name] = tensor.detach().numpy().copy()
    return found


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(4)
    yield started
    started.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    """Four layers each: `llama` with an output layer of its own, `qwen2` tied and with biases, `qwen3` tied and with
    norms of queries and keys."""
    folder = tmp_path_factory.mktemp("models")
    return {family: make_model(folder / family, family) for family in ("llama", "qwen2", "qwen3")}


def make_model(folder: Path, family: str) -> str:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family,
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=family != "llama",
    )
    generator = torch.Generator().manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.copy_(noise + 1.0 if "norm" in name else noise)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def alone(ranks) -> Any:
    """What one rank finds, computed once for each job."""
    known: dict[Job, Outcome] = {}

    def outcome(job: Job) -> Outcome:
        if job not in known:
            known[job] = ranks.run(1, work, job)[0]
        return known[job]

    return outcome


def assert_same(found: list[Outcome], expected: Outcome) -> None:
    """Every rank reports the very same step; it, the gradients and the weights are those of the single rank."""
    for mine in found:
        for result, first, reference in zip(mine.results, found[0].results, expected.results, strict=True):
            assert (result.loss, result.grad_norm, result.metrics) == (first.loss, first.grad_norm, first.metrics)
            assert result.loss == pytest.approx(reference.loss, rel=TOLERANCE)
            assert result.grad_norm == pytest.approx(reference.grad_norm, rel=TOLERANCE)
            assert result.metrics == pytest.approx(reference.metrics, rel=1e-4, abs=1e-6)
            assert result.tokens == reference.tokens
            assert result.optimizer_steps == reference.optimizer_steps
            assert result.skipped is None
        assert worst_error(mine.gradients, expected.gradients) < TOLERANCE
        assert worst_error(mine.weights, expected.weights) < TOLERANCE


def worst_error(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    assert found.keys() == expected.keys()
    norm = np.linalg.norm
    return max(float(norm(found[name] - value) / norm(value)) for name, value in expected.items())


LAYOUTS = [
    "tp2", "tp2 sp", "pp2", "dp2", "cp2",
    "tp4 sp", "pp4", "dp4", "cp4",
    "tp2 pp2", "tp2 sp pp2", "tp2 dp2", "tp2 sp dp2", "tp2 cp2", "tp2 sp cp2", "pp2 dp2", "pp2 cp2", "cp2 dp2",
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_layout_trains_like_a_single_rank(layout, family, models, ranks, alone):
    job = Job(models[family], layout)
    expected = alone(Job(models[family]))

    assert_same(ranks.run(job.ranks, work, job), expected)
