"""One row of data -> one `Prompt`, or a PromptsError that says which row is wrong and how."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from buffer.records import Messages, Prompt


class PromptsError(ValueError):
    """The data is missing, empty, broken or of the wrong form; the message names the place and the remedy."""


@dataclass(frozen=True, slots=True)
class PromptsSummary:
    """What is known of a source before it is opened; None where it is not known."""

    rows: int | None
    columns: tuple[str, ...] | None  # what reward functions receive besides the prompt


class Rows(Protocol):
    """Data with a length and random access; `prompt(i)` is the same for the same i, always."""

    def __len__(self) -> int: ...

    def prompt(self, index: int) -> Prompt: ...


def as_content(value: Any, where: str) -> str | Messages:
    """Text or chat messages, checked. Raises PromptsError that starts with `where`."""
    if isinstance(value, str):
        if not value.strip():
            raise PromptsError(f"{where}: the prompt is empty")
        return value
    if isinstance(value, (list, tuple)):
        if not value:
            raise PromptsError(f"{where}: the prompt is an empty list of messages")
        return [_as_message(message, f"{where}, message {i}") for i, message in enumerate(value)]
    raise PromptsError(
        f"{where}: the prompt is {_kind(value)}; text, or a list of messages {{role, content}}, is needed"
    )


def as_prompt(row: Mapping[str, Any], *, column: str, id: str, where: str) -> Prompt:
    """`row[column]` becomes the content, all other columns the fields. Raises PromptsError."""
    if column not in row:
        raise missing_column(column, row, where)
    fields = {name: value for name, value in row.items() if name != column}
    return Prompt(id=id, content=as_content(row[column], where), fields=fields)


def missing_column(column: str, columns: Collection[str], where: str) -> PromptsError:
    return PromptsError(f"{where}: no column {column!r}; there are: {', '.join(columns) or 'none'}")


def _as_message(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise PromptsError(f"{where}: is {_kind(value)}; {{role, content}} is needed")
    message = {key: item for key, item in value.items() if item is not None}  # Arrow fills absent keys with nulls
    wrong = [key for key in ("role", "content") if key not in message]
    if wrong:
        raise PromptsError(f"{where}: has no {' and no '.join(wrong)} (keys: {', '.join(message) or 'none'})")
    for key, item in message.items():
        if not isinstance(item, str):
            raise PromptsError(f"{where}: {key} is {_kind(item)}; text is needed")
    return message


def _kind(value: Any) -> str:
    return "null" if value is None else f"of type {type(value).__name__}"
