"""Rewards of a function and of two reward models through the command line: real Ray, real vLLM, tiny generated models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from tests.command_line import status, tandem
from topology.models import resolve_model

CONFIG = str(Path(__file__).resolve().parents[2] / "configs/reward-model.yaml")
NAME, STEPS = "reward-model", 2
MODELS = "[{group: preference, weight: 0.5}, {group: steps, reduce: mean, weight: 2.0}]"
PROCESS = (
    "makers.steps={kind: reward_model, granularity: token, model: {path: tiny-llama-process-reward}, dtype: float32}"
)

pytestmark = pytest.mark.timeout(300)


def settings(*values: str) -> list[str]:
    return [part for value in values for part in ("--set", value)]


def test_a_run_is_trained_on_what_the_models_say_of_the_tokens_that_were_sampled(tmp_path: Path) -> None:
    steps = f"trainers.policy.steps={STEPS}"
    done = tandem(tmp_path, "run", CONFIG, *settings(steps, "rows.every=1", PROCESS, f"makers.reward.models={MODELS}"))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found = status(tmp_path, NAME)
    assert (found["state"], found["step"]) == ("done", STEPS)

    files = sorted((tmp_path / "runs" / NAME / "rows").glob("*.parquet"))
    rows = [record for file in files for record in pq.read_table(file).to_pylist()]
    assert len(rows) == STEPS * 4 * 4
    whole = AutoModelForSequenceClassification.from_pretrained(resolve_model("tiny-llama-reward"), dtype=torch.float32)
    each = AutoModelForTokenClassification.from_pretrained(
        resolve_model("tiny-llama-process-reward"), dtype=torch.float32
    )
    for row in rows:
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        with torch.no_grad():
            preference = float(whole(input_ids=ids).logits)
            mean = float(each(input_ids=ids).logits[0, len(row["prompt_ids"]) :].mean())
        assert (row["reward/preference"], row["reward/steps"]) == pytest.approx((preference, mean), abs=1e-4)
        assert row["reward"] == pytest.approx(row["reward/regex"] + 0.5 * preference + 2.0 * mean, abs=1e-3)
    assert np.std([row["reward/preference"] for row in rows]) > 0.01


def test_a_policy_as_a_reward_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    done = tandem(tmp_path, "run", CONFIG, "--set", "makers.preference.model.path=tiny-llama")
    assert done.returncode == 2
    assert "makers.preference.model.path: has no head for granularity `sequence`" in done.stderr
    assert not (tmp_path / "runs").exists()
