"""Every way to split a model and its data over ranks trains it like one rank does: real processes under gloo, float32.

A layout is written as in `tp2 sp pp2 cp2 dp2`: tensor, sequence, pipeline, context and data parallelism.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.ranks import Ranks, save
from tests.rollouts import rollout_columns
from trainers.batch import RowShape, StepPlan, plan_step
from trainers.config import TrainerConfig
from trainers.learner import Rendezvous, StepResult
from trainers.rank import TrainerRank

TOLERANCE = 1e-5  # relative, in float32
SIZES = {"tp": "tensor_parallel", "pp": "pipeline_parallel", "cp": "context_parallel", "dp": "data_parallel"}
VOCAB = 323  # not divisible: padded differently by every tensor-parallel size

# Prompts and responses in tokens. A micro-batch of 16 holds one row, and with data parallelism one micro-batch is empty.
RAGGED = ((5, (3, 1, 4)), (9, (2, 6, 1)), (3, (7, 7, 2)))

pytestmark = pytest.mark.timeout(240)


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
    shapes: tuple[tuple[int, tuple[int, ...]], ...] = RAGGED
    stale: bool = False  # every step has a version of its own: later steps find rows of the first one
    broken: bool = False  # the first step has a row without finite log-probs
    restore: str | None = None
    save: str | None = None
    export: str | None = None
    failures: str | None = None

    @property
    def settings(self) -> dict[str, Any]:
        if self.kind == "torch":
            return {"type": "torch"}
        words = self.layout.split()
        sizes = {SIZES[word[:2]]: int(word[2:]) for word in words if word != "sp"}
        return {
            "type": "megatron",
            "dtype": "float32",
            "sequence_parallel": "sp" in words,
            **sizes,
            **dict(self.backend),
        }

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
    drawn: list[float]  # from its random generators, after everything


def rows(job: Job) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [rollout_columns(rng, prompt, responses) for prompt, responses in job.shapes]


def plan(job: Job, step: int) -> StepPlan:
    rng = np.random.default_rng(step)
    shapes = [RowShape(prompt, responses) for prompt, responses in job.shapes]
    return plan_step(
        step=step,
        version=step - 1 if job.stale else 0,
        shapes=shapes,
        # Mostly positive: the loss is then no small difference of large terms, whose rounding would show.
        advantages=[rng.normal(1.0, 1.0, size=len(shape.responses)).astype(np.float32) for shape in shapes],
        masks=[np.ones(len(shape.responses), bool) for shape in shapes],
        max_response_tokens=8,
        micro_batch_tokens=16,
        share_prompt=job.settings.get("share_prompt", job.kind == "megatron"),
        data_parallel=job.settings.get("data_parallel", 1),
        minibatches=job.minibatches,
    )


def work(rendezvous: Rendezvous, job: Job) -> Outcome:
    rank = TrainerRank(
        job.config,
        model_path=job.model,
        rendezvous=rendezvous,
        bucket_bytes=1 << 16,
        seed=0,
        failures_folder=job.failures,
    )
    rank.start()
    try:
        if job.restore:
            rank.restore(job.restore)
        results = []
        for step in job.steps:
            draw(rendezvous.rank + 1)  # every rank has random states of its own
            columns = rows(job)
            if job.broken and step == job.steps[0]:
                columns[1]["behaviour_logprobs"][:] = np.nan
            results.append(rank.train_step(plan(job, step), *columns))
        if job.save:
            save(rank, job.save)
        if job.export:
            rank.export_huggingface(job.export)
        weights = arrays(rank.learner.weights())
        return Outcome(results, arrays(rank.learner.policy.gradients()), weights, draw(1))
    finally:
        rank.close()


def draw(times: int) -> list[float]:
    return [value for _ in range(times) for value in (random.random(), np.random.rand(), torch.rand(()).item())]


def work_in_small_blocks(rendezvous: Rendezvous, job: Job) -> Outcome:
    """As if every prompt and response were long."""
    from trainers.megatron import context

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "DENSE_TOKENS", 1)
        patch.setattr(context, "BLOCK_ROWS", 2)
        return work(rendezvous, job)


def refusal(rendezvous: Rendezvous, job: Job) -> str:
    try:
        work(rendezvous, job)
    except ValueError as error:
        return str(error)
    return "not refused"


def arrays(tensors: Iterator[tuple[str, torch.Tensor]]) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for name, tensor in tensors:
        assert name not in found, f"{name} came twice"
        found[name] = tensor.detach().float().numpy().copy()
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
    # An expert to which no token was sent has a gradient of exactly 0.
    return max(float(norm(found[name] - value) / (norm(value) or 1.0)) for name, value in expected.items())


LAYOUTS = [
    *("tp2", "tp2 sp", "pp2", "dp2", "cp2", "tp4 sp", "pp4", "dp4", "cp4"),
    *("tp2 pp2", "tp2 sp pp2", "tp2 dp2", "tp2 sp dp2", "tp2 cp2", "tp2 sp cp2", "pp2 dp2", "pp2 cp2", "cp2 dp2"),
]
CASES = (
    [("qwen3", layout) for layout in LAYOUTS]
    + [("llama", layout) for layout in ("tp2", "pp2", "cp2", "tp2 sp pp2")]
    + [("qwen2", layout) for layout in ("tp2 sp", "pp2 cp2")]
)
WHOLE_ALGORITHM = (("kl_coef", 0.1), ("entropy_coef", 0.01), ("clip_low", 0.01), ("clip_high", 0.01))


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_a_layout_trains_like_a_single_rank(family, layout, models, ranks, alone):
    job = Job(models[family], layout)

    assert_same(ranks.run(job.ranks, work, job), alone(replace(job, layout="")))


@pytest.mark.parametrize("layout", ["pp2", "cp2", "tp2 sp pp2", "pp2 cp2"])
def test_minibatches_keep_their_proximal_policy_and_their_reference(layout, models, ranks, alone):
    """Two steps of three optimizer steps: clipping, importance weights and KL see policies that differ."""
    job = Job(models["qwen3"], layout, algorithm=WHOLE_ALGORITHM, minibatches=3, steps=(1, 2), stale=True)
    expected = alone(replace(job, layout=""))

    assert expected.results[1].metrics["clip_frac/low"] > 0
    assert expected.results[1].metrics["kl"] > 0
    assert expected.results[1].metrics["mismatch/tokens"] > 0  # of rows that older weights made
    assert_same(ranks.run(job.ranks, work, job), expected)


@pytest.mark.parametrize(
    ("layout", "backend"),
    [
        ("tp2 dp2", {"distributed_optimizer": False}),
        ("pp2 dp2", {"distributed_optimizer": False}),
        ("cp2", {"distributed_optimizer": False}),
        ("tp2 sp pp2", {"recompute": True}),
        ("cp2", {"recompute": True}),
        ("cp2", {"share_prompt": False}),
        ("tp2 sp", {"share_prompt": False}),
    ],
)
def test_settings_of_the_backend_change_nothing(layout, backend, models, ranks, alone):
    job = Job(models["qwen3"], layout, backend=tuple(backend.items()))

    assert_same(ranks.run(job.ranks, work, job), alone(Job(models["qwen3"])))


@pytest.mark.parametrize("layout", ["tp2 sp pp2", "pp2 cp2"])
def test_bfloat16_stays_close_to_a_single_rank(layout, models, ranks, alone):
    job = Job(models["qwen3"], layout, backend=(("dtype", "bfloat16"),))
    expected = alone(Job(models["qwen3"])).results[0]

    for found in ranks.run(job.ranks, work, job):
        assert found.results[0].grad_norm == pytest.approx(expected.grad_norm, rel=0.03)
        assert found.results[0].metrics["entropy"] == pytest.approx(expected.metrics["entropy"], rel=0.01)


def test_rows_that_are_attended_to_in_blocks_are_split_over_context_ranks_alike(models, ranks, alone):
    job = Job(models["qwen3"], "cp2")

    assert_same(ranks.run(job.ranks, work_in_small_blocks, job), alone(Job(models["qwen3"])))


def test_four_ranks_train_like_the_plain_torch_reference(models, ranks, alone):
    job = Job(models["qwen3"], "tp2 pp2", algorithm=WHOLE_ALGORITHM, minibatches=3)

    assert_same(ranks.run(job.ranks, work, job), alone(replace(job, layout="", kind="torch")))


def test_a_step_is_skipped_by_all_ranks_or_none_and_its_batch_is_left_once(models, ranks, tmp_path):
    job = Job(models["qwen3"], "pp2 dp2", broken=True, failures=str(tmp_path), steps=(1, 2))

    found = ranks.run(job.ranks, work, job)

    assert [outcome.results[0].skipped for outcome in found] == ["minibatch 0: loss is nan"] * 4
    assert all(outcome.results[0].optimizer_steps == 0 for outcome in found)
    assert np.isnan(np.load(tmp_path / "step-000001.npz")["1/behaviour_logprobs"]).all()


@pytest.mark.parametrize(
    ("before", "after", "distributed"),
    [
        ("tp2", "", True),
        ("pp2", "tp2", True),
        ("dp2", "", True),
        ("", "tp2 sp pp2", True),
        ("cp2", "pp2", False),
    ],
)
def test_a_checkpoint_of_one_layout_continues_in_another(before, after, distributed, models, ranks, alone, tmp_path):
    backend = (("distributed_optimizer", distributed),)
    saving = Job(models["qwen3"], before, backend=backend, steps=(1, 2), save=str(tmp_path / "two"))
    ranks.run(saving.ranks, work, saving)

    restoring = Job(models["qwen3"], after, backend=backend, steps=(3,), restore=str(tmp_path / "two"))
    found = ranks.run(restoring.ranks, work, restoring)

    expected = alone(Job(models["qwen3"], steps=(1, 2, 3)))
    assert_same(found, replace(expected, results=expected.results[2:]))


def test_a_checkpoint_continues_bit_by_bit_in_its_own_layout(models, ranks, tmp_path):
    job = Job(models["qwen3"], "tp2 dp2", steps=(1, 2, 3))
    saving = replace(job, steps=(1,), save=str(tmp_path / "one"))
    restoring = replace(job, steps=(2, 3), restore=str(tmp_path / "one"))
    expected = ranks.run(job.ranks, work, job)
    ranks.run(job.ranks, work, saving)

    for mine, uninterrupted in zip(ranks.run(job.ranks, work, restoring), expected, strict=True):
        assert worst_error(mine.weights, uninterrupted.weights) == 0
        assert mine.drawn == uninterrupted.drawn
    assert len({tuple(outcome.drawn) for outcome in expected}) == job.ranks


def test_an_exported_folder_of_four_ranks_is_whole(models, ranks, tmp_path):
    job = Job(models["qwen3"], "tp2 pp2", export=str(tmp_path / "model"))
    weights = ranks.run(job.ranks, work, job)[0].weights

    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert stored.keys() == weights.keys()
    assert all(np.array_equal(stored[name].numpy(), value) for name, value in weights.items())


@pytest.mark.parametrize("layout", ["pp2", "tp2 pp2"])
@pytest.mark.parametrize(
    ("layers", "message"), [(6, r"weights missing: .*layers\.4"), (2, r"not of this model: .*layers\.2")]
)
def test_weights_of_another_number_of_layers_are_refused_by_every_stage(
    layout, layers, message, models, ranks, tmp_path
):
    shutil.copytree(models["qwen3"], tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    job = Job(str(tmp_path / "model"), layout)

    refusals = ranks.run(job.ranks, refusal, job)

    assert all(re.search(message, text) for text in refusals), refusals


def test_a_layout_that_the_model_cannot_have_is_refused_before_any_process_meets_another(models):
    job = Job(models["qwen3"], "tp3 sp pp8 cp2")

    with pytest.raises(
        ValueError, match=r"backend\.tensor_parallel: 3 does not divide .* 8 attention heads: use 1, 2 or 4"
    ):
        work(Rendezvous(rank=0, world_size=48, address="127.0.0.1:1", timeout=1.0), job)
