"""From a prompt to the token ids that a model sees; done once, by the rollout maker, and never again downstream.

Chat messages go through the tokenizer's chat template. Plain text does too, as one user message, when there is a
template; without one the text is encoded as it is, with the special tokens the tokenizer adds by itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from buffer.records import DataFailure, Prompt

MARK = "end-of-turn-goes-here"  # an assistant's text that no template changes


class PromptEncoder:
    """The tokenizer of a checkpoint folder."""

    def __init__(self, model_path: str | Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(model_path), trust_remote_code=False)
        self._ending: list[int] | None = None

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids [prompt tokens], at least one. Raises DataFailure for what the template or tokenizer refuses."""
        messages = prompt.content
        if not self._tokenizer.chat_template:
            if not isinstance(messages, str):
                raise DataFailure(
                    f"prompt {prompt.id!r} is chat messages, and the tokenizer has no chat template: give text, or "
                    "a model with a template"
                )
            ids = self._tokenizer.encode(messages)
        else:
            if isinstance(messages, str):
                messages = [{"role": "user", "content": messages}]
            ids = self._encode_chat(prompt.id, messages)
        if not ids:
            raise DataFailure(f"prompt {prompt.id!r} is empty: no token to start from")
        return list(ids)

    def encode_completion(self, text: str) -> list[int]:
        """Token ids of what the assistant says to a prompt, ended as the model ends it. Raises DataFailure."""
        if self._ending is None:
            self._ending = self._end_of_turn()
        return [*self._tokenizer.encode(text, add_special_tokens=False), *self._ending]

    def _end_of_turn(self) -> list[int]:
        """What the chat template puts behind an assistant's text, up to its first special token; else the EOS token."""
        if self._tokenizer.chat_template:
            turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": MARK}]
            try:
                text = self._tokenizer.apply_chat_template(turns, tokenize=False)
            except Exception:  # a template that wants other turns than these
                text = ""
            ids = self._tokenizer.encode(text.rpartition(MARK)[2], add_special_tokens=False)
            special = [place for place, token in enumerate(ids) if token in self._tokenizer.all_special_ids]
            if special:
                return list(ids[: special[0] + 1])
        if self._tokenizer.eos_token_id is None:
            raise DataFailure("the tokenizer has no EOS token, so a completion cannot be ended")
        return [int(self._tokenizer.eos_token_id)]

    @property
    def generation_prompt(self) -> list[int]:
        """The ids that the chat template opens an answer with, at the end of every prompt; none without a template."""
        if not self._tokenizer.chat_template:
            return []
        message = [{"role": "user", "content": "x"}]
        closed, opened = (
            self._tokenizer.apply_chat_template(message, add_generation_prompt=opens, tokenize=False)
            for opens in (False, True)
        )
        ids: list[int] = self._tokenizer.encode(opened.removeprefix(closed), add_special_tokens=False)
        return ids

    def _encode_chat(self, name: str, messages: list[dict[str, str]]) -> list[int]:
        try:
            text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # whatever a template's own code raises: bad roles, missing keys
            raise DataFailure(f"prompt {name!r}: the chat template refused it: {error!r}") from error
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)  # the template has them already
        return ids


class TextEncoder:
    """Text that is no more than text, as one user message behind a fixed system text: special tokens in it are spelled out."""

    def __init__(self, model_path: str | Path, system: str) -> None:
        """Raises ValueError when the chat template takes no system text, or changes the user's."""
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(model_path), trust_remote_code=False)
        self._system = system
        self._around: tuple[list[int], list[int]] | None = None
        if self._tokenizer.chat_template:
            self._around = self._frame()

    def encode(self, text: str) -> list[int]:
        """Token ids, at least one."""
        if self._around is None:
            plain = f"{self._system}\n\n{text}" if self._system else text
            ids: list[int] = self._tokenizer.encode(plain, split_special_tokens=True)
            return ids
        before, behind = self._around
        return [*before, *self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True), *behind]

    def _frame(self) -> tuple[list[int], list[int]]:
        """What the chat template puts before and behind the user's text."""
        turns = [{"role": "system", "content": self._system}] if self._system else []
        turns.append({"role": "user", "content": MARK})
        try:
            whole = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # whatever a template's own code raises
            raise ValueError(f"the chat template refused a {turns[0]['role']} text: {error!r}") from error
        if whole.count(MARK) != 1:
            raise ValueError("the chat template does not put the user's text in exactly once")
        before, _, behind = whole.partition(MARK)
        return tuple(self._tokenizer.encode(part, add_special_tokens=False) for part in (before, behind))  # type: ignore[return-value]
