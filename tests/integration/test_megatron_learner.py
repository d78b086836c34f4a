"""The Megatron learner against the plain-torch reference, on tiny models of every supported family."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.ranks import save
from tests.rollouts import rollout_columns
from topology.models import resolve_model
from trainers.batch import Part, RowShape, StepPlan, Totals, plan_step
from trainers.checkpoints import CheckpointError
from trainers.config import TrainerConfig
from trainers.learner import Rendezvous, StepResult
from trainers.packing import GroupBatch, pack
from trainers.rank import TrainerRank
from weights.packing import unpack

FAMILIES = ("tiny-llama", "tiny-qwen2", "tiny-qwen3", "tiny-qwen3-moe")
TOLERANCE = 1e-5  # relative, in float32

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    shapes = [(5, [3, 1, 4]), (9, [2, 6, 1]), (3, [7, 7, 2])]
    temperatures = (1.0, 0.7, 1.3)  # rows of makers with settings of their own
    return [
        rollout_columns(rng, prompt, responses, temperature=temperature)
        for (prompt, responses), temperature in zip(shapes, temperatures, strict=True)
    ]


@contextmanager
def rank(kind: str, model: str | Path = "tiny-llama", **settings: Any) -> Iterator[TrainerRank]:
    backend = {"type": kind, "dtype": settings.pop("dtype", "float32"), "threads": 1}
    if kind == "megatron":
        backend |= {"share_prompt": settings.pop("share_prompt", True), "recompute": settings.pop("recompute", False)}
        backend["distributed_optimizer"] = settings.pop("distributed_optimizer", True)
    failures = settings.pop("failures_folder", None)
    config = TrainerConfig(
        algorithm={"type": "grpo", **settings.pop("algorithm", {})},
        backend=backend,
        # eps well above the rounding of the gradients: else Adam's first step is their sign, noise included
        optimizer={"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-4, **settings.pop("optimizer", {})},
        steps=10,
    )
    assert not settings
    path = resolve_model(model) if isinstance(model, str) else model
    made = TrainerRank(
        config,
        model_path=str(path),
        rendezvous=Rendezvous(rank=0, world_size=1, address="", timeout=30.0),
        bucket_bytes=64 << 10,
        seed=0,
        failures_folder=failures,
    )
    made.start()
    try:
        yield made
    finally:
        made.close()


def plan(rows: list[dict[str, np.ndarray]], *, step: int = 1, share: bool = True, **more: Any) -> StepPlan:
    rng = np.random.default_rng(step)
    arguments: dict[str, Any] = {"micro_batch_tokens": 40, "version": 0, "max_response_tokens": 8}
    shapes = [RowShape.of(row) for row in rows]
    return plan_step(
        step=step,
        shapes=shapes,
        advantages=[rng.normal(size=len(shape.responses)).astype(np.float32) for shape in shapes],
        masks=more.pop("masks", [np.ones(len(shape.responses), bool) for shape in shapes]),
        share_prompt=share,
        **{**arguments, **more},
    )


def weights(made: TrainerRank) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in made.learner.weights()}


def gradients(made: TrainerRank) -> dict[str, torch.Tensor]:
    return dict(made.learner.policy.gradients())


def worst_error(found: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    assert found.keys() == reference.keys()
    return max(float((found[name] - value).norm() / value.norm()) for name, value in reference.items())


def assert_same_step(found: StepResult, reference: StepResult) -> None:
    assert found.loss == pytest.approx(reference.loss, rel=TOLERANCE, abs=1e-6)
    assert found.grad_norm == pytest.approx(reference.grad_norm, rel=TOLERANCE)
    assert found.metrics == pytest.approx(reference.metrics, rel=1e-4, abs=1e-6)
    assert (found.tokens, found.optimizer_steps, found.skipped) == (33, reference.optimizer_steps, None)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_gradients_and_weights_equal_plain_torch_with_and_without_a_shared_prompt(family, rows):
    algorithm = {"kl_coef": 0.1, "entropy_coef": 0.01}
    with rank("torch", family, algorithm=algorithm) as made:
        expected = made.train_step(plan(rows, share=False), *rows), gradients(made), weights(made)

    for share in (False, True):
        with rank("megatron", family, share_prompt=share, algorithm=algorithm) as made:
            result = made.train_step(plan(rows, share=share), *rows)
            assert_same_step(result, expected[0])
            assert worst_error(gradients(made), expected[1]) < TOLERANCE
            assert worst_error(weights(made), expected[2]) < TOLERANCE


def test_minibatches_keep_the_proximal_policy_and_the_reference_stays_at_the_start_weights(rows):
    """Two steps of three minibatches each: clipping, importance weights and KL all see policies that differ."""
    algorithm = {"kl_coef": 0.1, "clip_low": 0.01, "clip_high": 0.01, "normalise": "sequence"}
    results = {}
    for kind in ("torch", "megatron"):
        with rank(kind, algorithm=algorithm) as made:
            steps = [plan(rows, step=i, share=kind == "megatron", minibatches=3) for i in (1, 2)]
            results[kind] = [made.train_step(step, *rows) for step in steps], weights(made)

    for found, reference in zip(results["megatron"][0], results["torch"][0], strict=True):
        assert_same_step(found, reference)
        assert found.optimizer_steps == 3
        assert found.metrics["clip_frac/low"] > 0
        assert found.metrics["clip_frac/high"] > 0
        assert found.metrics["kl"] > 0
    assert worst_error(results["megatron"][1], results["torch"][1]) < TOLERANCE


@pytest.mark.parametrize("kind", ["torch", "megatron"])
def test_stale_rows_are_compared_with_the_makers_under_the_weights_that_made_them(kind, rows):
    """The rows of three steps are made by the start weights: from the second on, the trainer's own have moved."""
    with rank(kind) as made:
        rows = [row | {"behaviour_logprobs": score(made, row)} for row in rows]
        share = kind == "megatron"
        results = [made.train_step(plan(rows, step=i, version=i - 1, share=share), *rows) for i in (1, 2)]
        own = max(float(np.abs(score(made, row) - row["behaviour_logprobs"]).max()) for row in rows)
        forgotten = made.train_step(plan(rows, step=3, version=2, share=share), *rows)

    assert [result.metrics["mismatch/tokens"] for result in results] == [33, 33]
    assert all(result.metrics["mismatch/logp_abs_diff_max"] < 1e-5 for result in results)
    assert own > 1e-3, "what would have been measured with the trainer's own weights"
    assert "mismatch/kl" not in forgotten.metrics, "only one past version is kept"


def score(made: TrainerRank, row: dict[str, np.ndarray]) -> np.ndarray:
    """float32 [response tokens]: log-probs of a row's tokens under the present weights, as a maker would send them."""
    group = GroupBatch.of(row, np.zeros(row["temperatures"].size, np.float32))
    whole = (Part(0, tuple(range(row["temperatures"].size))),)
    batch = pack([group], whole, Totals(1, 1, 1), share_prompt=made.learner.policy.share_prompt)
    return made.learner.policy.log_probs([batch])[0].numpy().copy()


@pytest.mark.parametrize("recompute", [False, True])
def test_the_split_into_micro_batches_changes_no_gradient(rows, recompute):
    found = []
    for budget in (8, 1000):
        with rank("megatron", recompute=recompute) as made:
            step = plan(rows, micro_batch_tokens=budget)
            made.train_step(step, *rows)
            found.append((len(step.minibatches[0].ranks[0]), gradients(made)))

    assert [count for count, _ in found] == [9, 1]
    assert worst_error(found[0][1], found[1][1]) < TOLERANCE


def test_samples_that_are_skipped_for_their_zero_advantage_change_no_gradient(rows):
    found = []
    for skip in (False, True):
        step = plan(rows, skip_zero_advantage=skip)
        advantages = [values * np.array([1, 0, 1], np.float32) for values in step.advantages]
        shapes = [RowShape.of(row) for row in rows]
        step = plan_step(
            step=1,
            version=0,
            shapes=shapes,
            advantages=advantages,
            masks=[np.ones(3, bool)] * 3,
            max_response_tokens=8,
            micro_batch_tokens=40,
            share_prompt=True,
            skip_zero_advantage=skip,
        )
        with rank("megatron") as made:
            found.append((made.train_step(step, *rows), gradients(made)))

    assert found[1][0].tokens == 33 - (1 + 6 + 7)
    assert found[1][0].loss == pytest.approx(found[0][0].loss, rel=TOLERANCE)
    assert worst_error(found[1][1], found[0][1]) < TOLERANCE


@pytest.mark.parametrize("kind", ["torch", "megatron"])
def test_a_loss_that_is_not_finite_changes_no_weight_and_leaves_its_batch_behind(kind, rows, tmp_path):
    broken = [dict(row) for row in rows]
    broken[1]["behaviour_logprobs"] = np.full_like(rows[1]["behaviour_logprobs"], np.nan)
    with rank(kind, failures_folder=str(tmp_path)) as made:
        before = weights(made)
        result = made.train_step(plan(rows), *broken)
        after = weights(made)
        healthy = made.train_step(plan(rows, step=2), *rows)

    assert result.optimizer_steps == 0
    assert result.skipped == "minibatch 0: loss is nan"
    assert all(torch.equal(before[name], after[name]) for name in before)
    saved = np.load(tmp_path / "step-000001.npz")
    np.testing.assert_array_equal(saved["1/response_ids"], rows[1]["response_ids"])
    assert (healthy.optimizer_steps, healthy.skipped) == (1, None)


@pytest.mark.parametrize("kind", ["torch", "megatron"])
def test_a_step_without_a_valid_token_takes_no_optimizer_step(kind, rows):
    with rank(kind) as made:
        before = weights(made)
        result = made.train_step(plan(rows, masks=[np.zeros(3, bool)] * 3), *rows)
        after = weights(made)

    assert (result.optimizer_steps, result.skipped, result.tokens) == (0, "minibatch 0: no valid token", 0)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("dtype", "distributed_optimizer"),
    [("float32", True), ("bfloat16", True), ("float32", False), ("bfloat16", False)],
)
def test_a_restored_checkpoint_continues_bit_by_bit(dtype, distributed_optimizer, rows, tmp_path):
    settings = {"dtype": dtype, "distributed_optimizer": distributed_optimizer}
    with rank("megatron", **settings) as made:
        save(made, str(tmp_path / "start"))
        for step in (1, 2):
            made.train_step(plan(rows, step=step), *rows)
        made.stage()
        for step in (3, 4):
            made.train_step(plan(rows, step=step), *rows)
        made.write(str(tmp_path / "two")).result()  # what was copied, whatever was trained meanwhile
        expected = weights(made)

    for folder, steps in (("start", (1, 2, 3, 4)), ("two", (3, 4))):
        with rank("megatron", **settings) as made:
            made.restore(str(tmp_path / folder))
            for step in steps:
                made.train_step(plan(rows, step=step), *rows)
            found = weights(made)
        assert all(torch.equal(found[name], value) for name, value in expected.items()), folder


def test_a_restored_checkpoint_of_the_reference_learner_continues_bit_by_bit(rows, tmp_path):
    with rank("torch") as made:
        made.train_step(plan(rows, share=False, step=1), *rows)
        made.stage()
        made.train_step(plan(rows, share=False, step=2), *rows)
        made.write(str(tmp_path / "one")).result()
        expected = weights(made)
    with rank("torch") as made:
        made.restore(str(tmp_path / "one"))
        made.train_step(plan(rows, share=False, step=2), *rows)
        found = weights(made)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_checkpoint_that_is_missing_broken_or_of_another_model_is_refused(tmp_path):
    with rank("megatron", "tiny-qwen2") as made:
        save(made, str(tmp_path / "other"))
    with rank("megatron") as made:
        save(made, str(tmp_path / "good"))
        shutil.copytree(tmp_path / "good", tmp_path / "broken")
        state = tmp_path / "broken" / "rank-00000.safetensors"
        state.write_bytes(state.read_bytes()[:-100])
        before = weights(made)

        with pytest.raises(
            CheckpointError, match=r"missing is not a complete checkpoint of a learner: it has no model"
        ):
            made.restore(str(tmp_path / "missing"))
        with pytest.raises(CheckpointError, match="other is of another model: model_type qwen2 there, llama here"):
            made.restore(str(tmp_path / "other"))
        with pytest.raises(CheckpointError, match=r"broken is incomplete: rank-00000\.safetensors is cut short"):
            made.restore(str(tmp_path / "broken"))
        after = weights(made)
        made.restore(str(tmp_path / "good"))

    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not list(tmp_path.glob(".*partial"))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_start_weights_are_exported_bit_by_bit_under_their_names(family):
    source = load_file(resolve_model(family) / "model.safetensors")
    with rank("megatron", family, dtype="bfloat16") as made:
        buckets_expected = made.num_buckets()
        manifest, *buckets = made.export(5)

    found = unpack(manifest, buckets)
    assert manifest.version == 5
    assert len(buckets) == buckets_expected > 1
    assert found.keys() == source.keys()
    assert all(found[name].dtype == value.dtype and torch.equal(found[name], value) for name, value in source.items())


@pytest.mark.parametrize("kind", ["torch", "megatron"])
def test_an_exported_folder_loads_in_transformers_with_the_trained_weights(kind, rows, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with rank(kind, "tiny-qwen2") as made:
        made.train_step(plan(rows, share=kind == "megatron"), *rows)
        made.export_huggingface(str(tmp_path / "model"))
        expected = weights(made)
        with pytest.raises(FileExistsError, match="choose another folder"):
            made.export_huggingface(str(tmp_path / "model"))

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template
    assert loaded.dtype == torch.float32
    found = dict(loaded.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_bfloat16_stays_close_to_float32(rows):
    results = {}
    for dtype in ("float32", "bfloat16"):
        with rank("megatron", dtype=dtype) as made:
            results[dtype] = made.train_step(plan(rows), *rows)

    assert results["bfloat16"].grad_norm == pytest.approx(results["float32"].grad_norm, rel=0.03)
    assert results["bfloat16"].metrics["entropy"] == pytest.approx(results["float32"].metrics["entropy"], rel=0.01)


def changed_config(tmp_path: Path, **changes: Any) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(resolve_model("tiny-llama"), folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model family 'gpt2' is not supported .* supported: llama, qwen2, qwen3"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
            r"does not support rope scaling \(linear\) for llama",
        ),
        ({"attention_bias": True}, "does not support attention_bias"),
        ({"num_hidden_layers": 3}, "weights missing: .*layers.2"),
        ({"num_hidden_layers": 1}, "not of this model: .*layers.1"),
    ],
)
def test_a_model_that_megatron_cannot_represent_is_refused_with_the_reason(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message), rank("megatron", changed_config(tmp_path, **changes)):
        pass


def test_exports_leave_nothing_on_the_parameters_that_a_backward_pass_would_run(rows):
    with rank("megatron") as made:
        weights(made)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*an autograd kernel was not registered")
            made.train_step(plan(rows), *rows)
