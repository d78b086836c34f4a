"""The reward model maker against transformers' own classes, which are given one sample at a time."""

from __future__ import annotations

import asyncio
import functools
import shutil
from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from buffer.columns import validate_answer
from buffer.records import DataFailure, InfraFailure, Lease, Prompt
from makers.config import RewardModelMaker
from makers.factory import build_maker
from tests.rollouts import rollout_columns
from topology.models import resolve_model

pytestmark = pytest.mark.timeout(60)
TOLERANCE = 1e-5  # float32 on both sides; scores are about 1
TOKEN = {"granularity": "token"}


@functools.cache
def folder(name: str = "tiny-llama-reward") -> str:
    return str(resolve_model(name))


def rollout(prompt=13, responses=(7, 1, 20, 7)) -> dict[str, np.ndarray]:
    return rollout_columns(np.random.default_rng(3), prompt, responses, vocab=256)  # without the token for padding


def score(columns, path: str, **changes) -> dict[str, np.ndarray]:
    settings = {"kind": "reward_model", "model": {"path": path}, "dtype": "float32", "threads": 1} | changes
    config = RewardModelMaker.model_validate(settings)
    samples = columns["response_offsets"].size - 1
    lease = Lease(1, 5, "reward/judge", "m", Prompt("p5", "x"), 0, 1, samples, 30.0)

    async def main():
        maker = build_maker(config, name="maker/judge/0", model_path=path, weights=None, seed=0)
        await maker.start()
        try:
            assert (maker.stage, maker.needs) == ("reward/judge", ("rollout",))
            produced, made = await maker.make(lease, {"rollout": columns})
            validate_answer(lease, produced, made, {"rollout": columns})
            return made
        finally:
            await maker.close()

    return asyncio.run(main())


def own_logits(auto, path: str, columns) -> list[torch.Tensor]:
    model = auto.from_pretrained(path, dtype=torch.float32).eval()
    found = []
    for begin, end in pairwise(columns["response_offsets"].tolist()):
        ids = torch.from_numpy(np.concatenate([columns["prompt_ids"], columns["response_ids"][begin:end]])).long()
        with torch.no_grad():
            found.append(model(input_ids=ids[None]).logits[0])
    return found


@pytest.mark.parametrize("micro_batch_tokens", [1, 45, 4096])
def test_a_samples_score_is_what_transformers_gives_it_alone(micro_batch_tokens):
    columns = rollout()
    truth = torch.cat(own_logits(AutoModelForSequenceClassification, folder(), columns)).numpy()
    assert truth.std() > 0.1
    found = score(columns, folder(), micro_batch_tokens=micro_batch_tokens)
    np.testing.assert_allclose(found["scores"], truth, atol=TOLERANCE)


def test_a_model_without_a_token_for_padding_gives_the_same_scores(tmp_path):
    columns = rollout()
    model = AutoModelForSequenceClassification.from_pretrained(folder())
    model.config.pad_token_id = None
    model.save_pretrained(tmp_path)
    np.testing.assert_allclose(
        score(columns, str(tmp_path))["scores"], score(columns, folder())["scores"], atol=TOLERANCE
    )


@pytest.mark.parametrize("labels", [1, 2])
def test_a_tokens_score_is_its_logit_or_the_probability_of_the_second_of_two_labels(labels, tmp_path):
    path = folder("tiny-llama-process-reward")
    if labels == 2:
        torch.manual_seed(0)
        model = AutoModelForTokenClassification.from_pretrained(path, num_labels=2, ignore_mismatched_sizes=True)
        model.save_pretrained(path := str(tmp_path))
    columns = rollout()
    logits = [of[columns["prompt_ids"].size :] for of in own_logits(AutoModelForTokenClassification, path, columns)]
    truth = torch.cat([of[:, 0] if labels == 1 else of.softmax(-1)[:, 1] for of in logits]).numpy()
    found = score(columns, path, micro_batch_tokens=45, **TOKEN)
    assert list(found) == ["token_scores"]
    np.testing.assert_allclose(found["token_scores"], truth, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (rollout(prompt=2000, responses=(60, 3)), "2000 prompt tokens .* 60 response tokens exceed the 2048 positions"),
        ({**rollout(responses=(1,)), "response_ids": np.array([320], np.int32)}, "token id 320 is beyond .* of 320"),
    ],
)
def test_a_row_that_the_model_cannot_take_fails_as_data_with_the_numbers(columns, message):
    with pytest.raises(DataFailure, match=rf"row 5 \(prompt 'p5'\), reward/judge: {message}"):
        score(columns, folder())


def test_scores_that_are_not_finite_fail_the_row(tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(folder())
    torch.nn.init.constant_(model.score.weight, float("nan"))
    model.save_pretrained(tmp_path)
    with pytest.raises(DataFailure, match="4 of 4 scores of the model are not finite"):
        score(rollout(), str(tmp_path))


def test_a_checkpoint_without_the_weights_of_its_head_is_refused_and_never_scores_at_random(tmp_path):
    shutil.copytree(folder("tiny-llama"), tmp_path, dirs_exist_ok=True)
    with pytest.raises(InfraFailure, match=r"maker/judge/0: no reward model from .*its weights lack score.weight"):
        score(rollout(), str(tmp_path))
