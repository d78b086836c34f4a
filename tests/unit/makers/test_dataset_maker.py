"""The dataset maker: what a prompt's own columns become."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from buffer.columns import NO_POLICY, validate_answer
from buffer.records import DataFailure, Lease, Prompt
from makers.config import DatasetMaker as Config
from makers.dataset import DatasetMaker, DatasetRows
from makers.prompt_ids import PromptEncoder
from topology.models import resolve_model

QUESTION = [{"role": "user", "content": "2 + 3"}]
ANSWER = {"role": "assistant", "content": "5"}


@pytest.fixture(scope="module")
def folder() -> str:
    return str(resolve_model("tiny-llama"))


@pytest.fixture(scope="module")
def encoder(folder: str) -> PromptEncoder:
    return PromptEncoder(folder)


def rows(folder: str, **settings) -> DatasetRows:
    return DatasetRows(Config(kind="dataset", **settings), folder)


def test_a_completion_is_what_the_model_would_sample_after_the_prompt(folder: str, encoder: PromptEncoder) -> None:
    columns = rows(folder, completion="answer").columns(Prompt("a", "2 + 3", {"answer": "five"}))
    tokenizer = encoder._tokenizer
    assert columns["prompt_ids"].tolist() == encoder.encode(Prompt("a", "2 + 3"))
    whole = np.concatenate([columns["prompt_ids"], columns["response_ids"]]).tolist()
    turns = [{"role": "user", "content": "2 + 3"}, {"role": "assistant", "content": "five"}]
    assert tokenizer.decode(whole) == tokenizer.apply_chat_template(turns, tokenize=False).rstrip("\n")
    assert columns["response_ids"][-1] == tokenizer.eos_token_id
    assert columns["finish_reasons"].tolist() == [0]


def test_the_last_turn_of_messages_and_a_column_of_messages_are_the_same_row(folder: str) -> None:
    turn = rows(folder).columns(Prompt("a", [*QUESTION, ANSWER], {}))
    for value in ("5", [ANSWER], [*QUESTION, ANSWER]):
        column = rows(folder, completion="said").columns(Prompt("a", QUESTION, {"said": value}))
        assert all(np.array_equal(turn[name], column[name]) for name in turn)


def test_a_pair_is_one_row_of_two_samples_chosen_first(folder: str, encoder: PromptEncoder) -> None:
    columns = rows(folder, chosen="good", rejected="bad").columns(Prompt("a", "x", {"good": "yes", "bad": "no"}))
    first, second = np.split(columns["response_ids"], columns["response_offsets"][1:-1])
    assert first.tolist() == encoder.encode_completion("yes")
    assert second.tolist() == encoder.encode_completion("no")


def test_a_row_has_no_policy_and_passes_the_buffers_checks(folder: str) -> None:
    maker = DatasetMaker(Config(kind="dataset", completion="answer"), name="maker/dataset/0", model_path=folder)
    lease = Lease(1, 7, "rollout", "maker/dataset/0", Prompt("a", "x", {"answer": "y"}), 3, 0, 1, 10.0)

    async def made():
        await maker.start()
        return await maker.make(lease, {})

    produced, columns = asyncio.run(made())
    validate_answer(lease, produced, columns)
    assert (produced.min_version, produced.max_version) == (None, None)
    assert set(columns["policy_versions"]) == {NO_POLICY}
    assert not columns["behaviour_logprobs"].any()
    columns["policy_versions"][0] = 3
    with pytest.raises(ValueError, match="policy_versions"):
        validate_answer(lease, produced, columns)


def test_a_long_completion_is_cut_and_says_so_or_fails_with_its_numbers(folder: str, encoder: PromptEncoder) -> None:
    prompt = Prompt("p/4", "x", {"answer": "one two three four five"})
    whole = encoder.encode_completion("one two three four five")
    cut = rows(folder, completion="answer", max_tokens=3).columns(prompt)
    assert cut["response_ids"].tolist() == whole[:3]
    assert cut["finish_reasons"].tolist() == [1]
    with pytest.raises(DataFailure, match=rf"'p/4': its completion has {len(whole)} tokens, max_tokens is 3"):
        rows(folder, completion="answer", max_tokens=3, overlong="fail").columns(prompt)


def test_a_row_beyond_the_context_fails_with_its_numbers(folder: str) -> None:
    prompt = Prompt("p/5", "x " * 5000, {"answer": "y"})
    with pytest.raises(DataFailure, match=r"'p/5': \d+ prompt tokens \+ \d+ of the completion exceed"):
        rows(folder, completion="answer").columns(prompt)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (Prompt("p/1", "x", {"other": "y"}), "'p/1' has no column 'answer'; there are: other"),
        (Prompt("p/2", "x", {"answer": None}), "'p/2': answer is null or empty"),
        (Prompt("p/3", "x", {"answer": 5}), "'p/3': answer is of type int"),
        (Prompt("p/4", "x", {"answer": QUESTION}), "'p/4': answer does not end with a turn of the role `assistant`"),
        (Prompt("p/5", "x", {"answer": [*QUESTION, ANSWER]}), "'p/5': answer begins with other turns"),
    ],
)
def test_a_row_without_its_completion_is_named(folder: str, prompt: Prompt, said: str) -> None:
    with pytest.raises(DataFailure) as failure:
        rows(folder, completion="answer").columns(prompt)
    assert said in str(failure.value)


def test_text_without_a_completion_column_is_told_what_to_name(folder: str) -> None:
    with pytest.raises(DataFailure, match="is text, so it has no last turn"):
        rows(folder).columns(Prompt("a", "x", {"answer": "y"}))


@pytest.mark.parametrize(
    "settings", [{"chosen": "a"}, {"rejected": "a"}, {"chosen": "a", "rejected": "b", "completion": "c"}]
)
def test_a_pair_has_both_columns_and_nothing_else(settings) -> None:
    with pytest.raises(ValueError, match="pair needs both|give either"):
        Config(kind="dataset", **settings)
