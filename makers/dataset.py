"""The dataset maker: a row's completions are columns of its prompt, tokenised; no policy samples them.

Guarantees:
1. `prompt_ids` are those that a rollout maker would give the model, and `response_ids` what the model would have to sample:
   the completion and the end of the assistant's turn. Only they are trained on.
2. A pair is one row of two samples: chosen, then rejected.
3. No token has a policy's version (`NO_POLICY`) and every log-prob is 0: the row has no age, and nothing compares it with
   a maker.
4. A row without its columns, beyond the context, or (`overlong: fail`) beyond `max_tokens` fails as data, with its id.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from buffer.columns import FINISHED_BY_LENGTH, FINISHED_BY_STOP, NO_POLICY, Columns, nbytes
from buffer.records import DataFailure, Lease, Messages, Produced, Prompt
from makers.config import DatasetMaker as DatasetMakerConfig
from makers.prompt_ids import PromptEncoder

ASSISTANT = "assistant"


class DatasetRows:
    """From a prompt to the columns of stage `rollout`; needs the tokenizer of a checkpoint folder and nothing else."""

    def __init__(self, config: DatasetMakerConfig, model_path: str | Path) -> None:
        self._config = config
        self._encoder = PromptEncoder(model_path)
        settings = json.loads((Path(model_path) / "config.json").read_text())
        self._positions = settings.get("max_position_embeddings")

    def columns(self, prompt: Prompt) -> Columns:
        """Raises DataFailure that names the prompt."""
        pairs = [_split(prompt, column) for column in self._config.columns]
        prompt_ids = self._encoder.encode(Prompt(prompt.id, pairs[0][0], prompt.fields))
        responses = [self._response(prompt, text) for _, text in pairs]
        lengths = [len(response) for response, _ in responses]
        if self._positions and len(prompt_ids) + max(lengths) > self._positions:
            raise DataFailure(
                f"prompt {prompt.id!r}: {len(prompt_ids)} prompt tokens + {max(lengths)} of the completion exceed the "
                f"{self._positions} positions of the model: lower max_tokens, or leave the row out"
            )
        tokens = sum(lengths)
        return {
            "prompt_ids": np.asarray(prompt_ids, np.int32),
            "response_ids": np.concatenate([np.asarray(response, np.int32) for response, _ in responses]),
            "response_offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            "behaviour_logprobs": np.zeros(tokens, np.float32),
            "policy_versions": np.full(tokens, NO_POLICY, np.int32),
            "finish_reasons": np.asarray([reason for _, reason in responses], np.int8),
            "temperatures": np.ones(len(responses), np.float32),
        }

    def _response(self, prompt: Prompt, text: str) -> tuple[list[int], int]:
        """Token ids, and why they end."""
        ids, longest = self._encoder.encode_completion(text), self._config.max_tokens
        if len(ids) <= longest:
            return ids, FINISHED_BY_STOP
        if self._config.overlong == "fail":
            raise DataFailure(f"prompt {prompt.id!r}: its completion has {len(ids)} tokens, max_tokens is {longest}")
        return ids[:longest], FINISHED_BY_LENGTH


class DatasetMaker:
    """Fills the stage `rollout`; see buffer/columns.py for its columns."""

    stage = "rollout"
    needs: tuple[str, ...] = ()

    def __init__(self, config: DatasetMakerConfig, *, name: str, model_path: str) -> None:
        self.slots = config.slots
        self._config = config
        self._name = name
        self._model_path = model_path
        self._rows: DatasetRows
        self._count = 0
        self._tokens = 0

    async def start(self) -> None:
        """Load the tokenizer."""
        self._rows = DatasetRows(self._config, self._model_path)

    async def make(self, lease: Lease, inputs: Mapping[str, Columns]) -> tuple[Produced, Columns]:
        began = time.perf_counter()
        try:
            columns = self._rows.columns(lease.prompt)
        except DataFailure as failure:
            raise DataFailure(f"row {lease.row_id}: {failure}") from failure
        tokens = columns["response_ids"].size
        self._count += 1
        self._tokens += tokens
        lengths = np.diff(columns["response_offsets"])
        stats = {
            "truncated": float(np.mean(columns["finish_reasons"] == FINISHED_BY_LENGTH)),
            "response_length_mean": float(lengths.mean()),
            "response_length_max": float(lengths.max()),
        }
        seconds = time.perf_counter() - began
        return Produced(len(lengths), tokens, nbytes(columns), seconds=seconds, stats=stats), columns

    def status(self) -> dict[str, float | int | str | None]:
        return {"rows_tokenised": self._count, "tokens_tokenised": self._tokens}

    async def close(self) -> None:
        """It holds nothing."""


def _split(prompt: Prompt, column: str | None) -> tuple[str | Messages, str]:
    """The prompt without its completion, and the completion's text."""
    content = prompt.content
    if column is None:
        if isinstance(content, str):
            raise DataFailure(
                f"prompt {prompt.id!r} is text, so it has no last turn to learn: name the column of its completion "
                f"(`completion`; there are: {', '.join(map(str, prompt.fields)) or 'none'})"
            )
        return content[:-1], _last_turn(prompt, "the prompt", content)
    if column not in prompt.fields:
        raise DataFailure(
            f"prompt {prompt.id!r} has no column {column!r}; there are: {', '.join(map(str, prompt.fields)) or 'none'}"
        )
    value = prompt.fields[column]
    if isinstance(value, str):
        return content, value
    if isinstance(value, list | tuple) and value:
        turns = [content] if isinstance(content, str) else content
        before = [turn if isinstance(content, list) else turn.get("content") for turn in value[:-1]]
        if before and list(before) != list(turns):
            raise DataFailure(f"prompt {prompt.id!r}: {column} begins with other turns than the prompt has")
        return content, _last_turn(prompt, column, value)
    raise DataFailure(f"prompt {prompt.id!r}: {column} is {_kind(value)}; text, or messages, is needed")


def _last_turn(prompt: Prompt, what: str, messages: Any) -> str:
    last = messages[-1]
    if not isinstance(last, Mapping) or last.get("role") != ASSISTANT or not isinstance(last.get("content"), str):
        raise DataFailure(f"prompt {prompt.id!r}: {what} does not end with a turn of the role `{ASSISTANT}` with text")
    return str(last["content"])


def _kind(value: Any) -> str:
    return "null or empty" if not value else f"of type {type(value).__name__}"
