"""A job of a sampler, a process scorer and an outcome scorer: real Ray, real vLLM, tiny generated models."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForTokenClassification

from tests.command_line import tandem
from topology.models import resolve_model

CONFIG = str(Path(__file__).resolve().parents[2] / "configs/sample-two-scorers.yaml")

pytestmark = pytest.mark.timeout(300)


def test_a_sample_is_kept_with_the_score_that_both_scorers_give_it(tmp_path: Path) -> None:
    done = tandem(tmp_path, "run", CONFIG, "--set", "collect.select={type: all}", "--set", "prompts.size=4")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    files = sorted((tmp_path / "runs/sample-two-scorers/collected").glob("*.parquet"))
    rows = [record for file in files for record in pq.read_table(file).to_pylist()]
    assert len({(row["row_id"], row["sample"]) for row in rows}) == len(rows) == 4 * 4
    path = resolve_model("tiny-llama-process-reward")
    model = AutoModelForTokenClassification.from_pretrained(path, dtype=torch.float32)
    for row in rows:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row["prompt_ids"] + row["response_ids"]])).logits
        process = logits[0, len(row["prompt_ids"]) :, 0]
        assert row["reward/prm_token_scores"] == pytest.approx(process.tolist(), abs=1e-4)
        seen = re.sub(r"<\|.*?\|>", "", row["completion"])  # a scorer sees no special tokens
        assert row["reward_reward/regex"] == float(re.search("[0-9]", seen) is not None)
        assert row["score"] == pytest.approx(row["reward_reward/regex"] + 0.5 * float(process.min()), abs=1e-3)
    assert {row["reward_reward/regex"] for row in rows} == {0.0, 1.0}
