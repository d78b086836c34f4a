"""The teacher maker, and the reference maker on vLLM, against transformers in float32."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from buffer.columns import Columns, validate_answer
from buffer.records import DataFailure, InfraFailure, Lease, Prompt
from makers.config import ReferenceMaker, TeacherMaker
from makers.factory import build_maker
from makers.prompt_ids import PromptEncoder
from tests.live_maker import with_started
from tests.rollouts import rollout_columns
from topology.models import resolve_model

pytestmark = pytest.mark.timeout(90)
TOLERANCE = 1e-4  # float32 on both sides
ENGINE = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "kv_cache_gib": 0.05, "threads": 1}
PRIVILEGED = "What is 1 + 1? The answer is 2."


@functools.cache
def model_path() -> str:
    return str(resolve_model("tiny-llama"))


@functools.cache
def model():
    return AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32).eval()


def lease(stage: str, row: int = 5, samples: int = 3, fields=None) -> Lease:
    return Lease(
        id=row, row_id=row, stage=stage, maker="m", prompt=Prompt(f"p{row}", "x", fields or {}), min_version=0, seed=1,
        samples=samples, timeout=60.0,
    )  # fmt: skip


def rollout(prompt_ids=None, responses=(7, 1, 20), seed=0) -> Columns:
    columns = rollout_columns(np.random.default_rng(seed), 13, responses)
    own = PromptEncoder(model_path()).encode(Prompt("p", "What is 1 + 1?"))
    ids = np.asarray(own if prompt_ids is None else prompt_ids, np.int32)
    return {**columns, "prompt_ids": ids, "temperatures": np.ones(len(responses), np.float32)}


def with_maker(config, scenario, folder=None):
    maker = build_maker(config, name="maker/x/0", model_path=str(folder or model_path()), weights=None, seed=0)
    return with_started(maker, scenario)


def teacher(**changes) -> TeacherMaker:
    return TeacherMaker.model_validate({"kind": "teacher", "engine": ENGINE, "top_k": 5} | changes)


async def made(maker, columns, row=5, fields=None) -> Columns:
    asked = lease(maker.stage, row, columns["response_offsets"].size - 1, fields)
    produced, answer = await maker.make(asked, {"rollout": columns})
    validate_answer(asked, produced, answer, {"rollout": columns})
    return answer


def truth(columns: Columns, prompt_ids=None) -> torch.Tensor:
    """[response tokens, vocabulary]: at each token, given those before it, one sample at a time."""
    prompt = (columns["prompt_ids"] if prompt_ids is None else np.asarray(prompt_ids)).tolist()
    rows = []
    for response in np.split(columns["response_ids"], columns["response_offsets"][1:-1]):
        with torch.no_grad():
            logits = model()(torch.tensor([[*prompt, *response.tolist()]])).logits[0]
        rows.append(torch.log_softmax(logits[len(prompt) - 1 : -1], -1))
    return torch.cat(rows)


def assert_is_truth(answer: Columns, expected: torch.Tensor, columns: Columns, k: int) -> None:
    sampled = torch.from_numpy(columns["response_ids"].astype(np.int64))
    target = expected.gather(1, sampled[:, None])[:, 0]
    np.testing.assert_allclose(answer["teacher_target_logprobs"], target.numpy(), atol=TOLERANCE)
    ids = torch.from_numpy(answer["teacher_ids"].astype(np.int64)).reshape(-1, k)
    logprobs = answer["teacher_logprobs"].reshape(-1, k)
    assert all(len(set(row)) == k for row in ids.tolist())
    np.testing.assert_allclose(logprobs, expected.gather(1, ids).numpy(), atol=TOLERANCE)
    np.testing.assert_allclose(logprobs, expected.topk(k).values.numpy(), atol=TOLERANCE)
    np.testing.assert_allclose(answer["teacher_mass"], expected.topk(k).values.exp().sum(1), atol=TOLERANCE)


def test_what_a_teacher_says_is_what_transformers_says_behind_each_rows_own_prompt_or_its_privileged_one():
    async def scenario(maker):
        plain, told = rollout(), rollout(seed=1)
        answers = await asyncio.gather(
            made(maker, plain, 1),
            made(maker, told, 2, {"teacher_prompt": PRIVILEGED}),
            made(maker, plain, 3, {"teacher_prompt": ""}),
        )
        return plain, told, answers

    # Steps of 16 tokens: every sequence goes through the engine in chunks.
    plain, told, (first, second, empty) = with_maker(teacher(micro_batch_tokens=16), scenario)
    assert_is_truth(first, truth(plain), plain, 5)
    privileged = PromptEncoder(model_path()).encode(Prompt("p", PRIVILEGED))
    assert_is_truth(second, truth(told, privileged), told, 5)
    assert np.abs(second["teacher_target_logprobs"] - truth(told).gather(
        1, torch.from_numpy(told["response_ids"].astype(np.int64))[:, None])[:, 0].numpy()).max() > 0.01  # fmt: skip
    assert_is_truth(empty, truth(plain), plain, 5)


def make_successor(folder: Path) -> Path:
    """A model that expects token + 1 behind a token, then token + 2, then token + 3, wherever the token stands."""
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    size = 320
    config = LlamaConfig(
        vocab_size=size, hidden_size=size, intermediate_size=32, num_hidden_layers=1, num_attention_heads=10,
        num_key_value_heads=10, head_dim=32, max_position_embeddings=2048, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    made = LlamaForCausalLM(config)
    weights = dict(made.named_parameters())
    with torch.no_grad():
        for name in ("self_attn.o_proj", "mlp.down_proj"):  # nothing but the token itself reaches the end
            weights[f"model.layers.0.{name}.weight"].zero_()
        weights["model.embed_tokens.weight"].copy_(torch.eye(size))
        weights["lm_head.weight"].copy_(sum(torch.eye(size).roll(step, 0) / (2 * step) for step in (1, 2, 3)))
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_each_token_has_the_row_of_its_own_position_in_chunks_in_ragged_rows_and_behind_privileged_prompts(tmp_path):
    """No token comes twice in a row, so what a successor is expected of tells the position."""
    rng = np.random.default_rng(0)

    def ragged(lengths) -> Columns:
        columns = rollout(responses=lengths)
        ids = rng.permutation(300)[: sum(lengths)].astype(np.int32)
        return {**columns, "response_ids": ids}

    rows = [ragged(lengths) for lengths in ((1, 90, 2), (17, 16, 15, 33), (1,))]
    fields = [{}, {"teacher_prompt": PRIVILEGED}, {"teacher_prompt": "No."}]

    async def scenario(maker):
        return await asyncio.gather(*(made(maker, row, i, fields[i]) for i, row in enumerate(rows)))

    answers = with_maker(teacher(top_k=3, micro_batch_tokens=16), scenario, make_successor(tmp_path / "successor"))
    for columns, answer in zip(rows, answers, strict=True):
        samples = np.split(columns["response_ids"], columns["response_offsets"][1:-1])
        before = np.concatenate([[columns["prompt_ids"][-1], *sample[:-1]] for sample in samples])
        ids = answer["teacher_ids"].reshape(-1, 3)
        np.testing.assert_array_equal(ids, (before[:, None] + [1, 2, 3]) % 320)


def test_all_of_the_vocabulary_and_none_of_it_are_allowed_and_each_bad_row_fails_as_data_with_its_numbers():
    async def everything(maker):
        return await made(maker, rollout())

    whole = with_maker(teacher(top_k=320), everything)
    assert_is_truth(whole, truth(rollout()), rollout(), 320)
    np.testing.assert_allclose(whole["teacher_mass"], 1.0, atol=1e-5)

    async def nothing(maker):
        answer = await made(maker, rollout())
        with pytest.raises(
            DataFailure, match=r"row 7 \(prompt 'p7'\), teacher: 3\d\d prompt tokens \(teacher_prompt\) \+ 20 resp"
        ):
            await made(maker, rollout(), 7, {"teacher_prompt": "x" * 300})
        with pytest.raises(DataFailure, match="do not both end with the generation prompt"):
            await made(maker, rollout(prompt_ids=[1, 2, 3]), 8, {"teacher_prompt": PRIVILEGED})
        await maker.sleep(1)
        waiting = asyncio.create_task(made(maker, rollout()))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await maker.wake()
        np.testing.assert_array_equal((await waiting)["teacher_target_logprobs"], answer["teacher_target_logprobs"])
        return answer

    none = with_maker(teacher(top_k=0), nothing)
    assert (none["teacher_ids"].size, none["teacher_logprobs"].size) == (0, 0)
    assert not none["teacher_mass"].any()
    np.testing.assert_allclose(none["teacher_target_logprobs"], whole["teacher_target_logprobs"], atol=TOLERANCE)


def test_more_tokens_than_the_vocabulary_has_are_refused_at_the_start():
    with pytest.raises(InfraFailure, match="top_k 321 is above the 320 tokens of the vocabulary"):
        with_maker(teacher(top_k=321), None)


def test_a_reference_on_vllm_gives_the_logprobs_of_the_sampled_tokens_and_refuses_other_temperatures():
    async def scenario(maker):
        columns = rollout()
        answer = await made(maker, columns)
        with pytest.raises(InfraFailure, match=r"sampled at temperature 0\.7, but vLLM gives"):
            await made(maker, {**columns, "temperatures": np.asarray([1, 0.7, 1], np.float32)})
        return columns, answer

    config = ReferenceMaker.model_validate({"kind": "reference", "engine": ENGINE})
    columns, answer = with_maker(config, scenario)
    sampled = torch.from_numpy(columns["response_ids"].astype(np.int64))
    expected = truth(columns).gather(1, sampled[:, None])[:, 0].numpy()
    np.testing.assert_allclose(answer["reference_logprobs"], expected, atol=TOLERANCE)
