"""The judge on real vLLM, with a tiny generated model, against transformers' own greedy answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from buffer.columns import Columns, validate_answer
from buffer.records import DataFailure, Lease, Prompt
from makers.config import JudgeMaker
from makers.factory import build_maker
from makers.judging.template import fill
from makers.prompt_ids import TextEncoder
from tests.command_line import tandem
from tests.live_maker import with_started
from tests.rollouts import rollout_columns
from topology.models import resolve_model

pytestmark = pytest.mark.timeout(90)
CONFIG = str(Path(__file__).resolve().parents[2] / "configs/judge.yaml")
ENGINE = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "kv_cache_gib": 0.05, "threads": 1}
TEMPLATE, VERDICT = "{prompt} {answer}: {completion}", 5
PARSER = {"type": "function", "path": f"{__name__}:checksum"}


def checksum(answer: str) -> float | None:
    """Of the verdict's text, so that another verdict has another score."""
    return float(sum(i * ord(c) for i, c in enumerate(answer, 1)) % 1009) if "%" not in answer else None


def lease(answer: str = "4") -> Lease:
    return Lease(
        id=1, row_id=5, stage="reward/judge", maker="m", prompt=Prompt("p5", "2 + 2?", {"answer": answer}), min_version=0,
        seed=1, samples=3, timeout=60.0,
    )  # fmt: skip


def expected(texts: list[str]) -> tuple[list[float | None], list[str]]:
    path = resolve_model("tiny-llama")
    encoder, model = TextEncoder(path, ""), AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    answers = []
    for text in texts:
        ids = encoder.encode(fill(TEMPLATE, {"prompt": "2 + 2?", "answer": "4", "completion": text}))
        with torch.no_grad():
            out = model.generate(torch.tensor([ids]), max_new_tokens=VERDICT, do_sample=False)
        answers.append(encoder._tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True))
    return [checksum(answer) for answer in answers], answers


async def asked(maker, rollout: Columns, wanted: Lease) -> Columns:
    produced, columns = await maker.make(wanted, {"rollout": rollout})
    validate_answer(wanted, produced, columns, {"rollout": rollout})
    return columns


def test_each_sample_gets_the_score_of_the_verdict_that_the_model_writes_on_it():
    from makers.reward import load_decoder, split_and_decode

    path = str(resolve_model("tiny-llama"))
    rollout = rollout_columns(np.random.default_rng(0), 13, (7, 1, 20))
    texts = split_and_decode(load_decoder(path), rollout["response_ids"], rollout["response_offsets"])
    scores, answers = expected(texts)
    config = JudgeMaker.model_validate(
        {
            "kind": "judge", "engine": ENGINE, "template": TEMPLATE, "max_tokens": VERDICT, "parser": PARSER,
            "unparsed": -1,
        }
    )  # fmt: skip
    maker = build_maker(config, name="maker/judge/0", model_path=path, weights=None, seed=0)

    async def scenario(maker):
        columns = await asyncio.gather(asked(maker, rollout, lease()), asked(maker, rollout, lease()))
        with pytest.raises(DataFailure, match=r"row 5 \(prompt 'p5'\), reward/judge: sample 0: the judge's prompt has"):
            await asked(maker, rollout, lease("long " * 400))
        return columns, maker.status()

    (first, second), status = with_started(maker, scenario)
    wanted = [-1.0 if score is None else score for score in scores]
    assert first["scores"].tolist() == second["scores"].tolist() == wanted, answers
    assert (status["rows_scored"], status["verdicts_unparsed"]) == (2, 2 * scores.count(None))
    assert len(set(wanted)) > 1


def test_an_unknown_column_in_the_template_is_refused_before_anything_starts(tmp_path: Path) -> None:
    done = tandem(tmp_path, "run", CONFIG, "--set", "makers.judge.template=x {completion} {anwser}")
    assert done.returncode == 2
    assert "makers.judge.template: unknown placeholder {anwser}; there are: {prompt}, {completion}" in done.stderr
    assert not (tmp_path / "runs").exists()
