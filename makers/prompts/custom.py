"""Prompts from a class (or function) of the user: `package.module:Class`, called with `options`.

What it returns is either
- a sequence (`__len__` and `__getitem__`): any order, shuffling and seeking are free; or
- an iterable (`__iter__`): read in its own order, started anew for each pass, and read again from its start on resume.

Its items are `buffer.records.Prompt`, or mappings with a `prompt` key (text or chat messages) whose other keys
reach the reward functions. A mapping's id is its position; a Prompt keeps the id it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from buffer.records import Prompt
from makers.config import CustomPrompts
from makers.dotted import load_dotted, short_traceback
from makers.prompts.rows import PromptsError, as_content, as_prompt
from makers.prompts.source import IndexedPrompts, StreamedPrompts


def open_custom(config: CustomPrompts) -> IndexedPrompts | StreamedPrompts:
    """Raises PromptsError."""
    data = _build(config)
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        rows = _SequenceRows(data, config.type)
        return IndexedPrompts(rows, seed=config.seed, shuffle=config.shuffle, epochs=config.epochs)
    if not isinstance(data, Iterable):
        raise PromptsError(
            f"{config.type}: gave {type(data).__name__}; a sequence (__len__, __getitem__) or an iterable is needed"
        )
    if config.shuffle:
        raise PromptsError(f"{config.type}: shuffle needs __len__ and __getitem__; this is an iterable without them")
    return StreamedPrompts(lambda: _converted(data, config.type), epochs=config.epochs)


class _SequenceRows:
    def __init__(self, data: Any, name: str) -> None:
        self._data = data
        self._name = name

    def __len__(self) -> int:
        return len(self._data)

    def prompt(self, index: int) -> Prompt:
        try:
            item = self._data[index]
        except Exception as error:
            raise PromptsError(f"{self._name}, row {index}: raised\n{short_traceback(error)}") from error
        return _convert(item, index, self._name)


def _build(config: CustomPrompts) -> Any:
    try:
        factory = load_dotted(config.type)
    except ValueError as error:
        raise PromptsError(str(error)) from error
    try:
        return factory(**config.options)
    except Exception as error:
        raise PromptsError(
            f"{config.type}(**options) raised; options: {config.options}\n{short_traceback(error)}"
        ) from error


def _converted(data: Iterable[Any], name: str) -> Iterator[Prompt]:
    index = 0
    iterator = iter(data)
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            raise PromptsError(f"{name}, row {index}: raised\n{short_traceback(error)}") from error
        yield _convert(item, index, name)
        index += 1


def _convert(item: Any, index: int, name: str) -> Prompt:
    where = f"{name}, row {index}"
    if isinstance(item, Prompt):
        as_content(item.content, where)
        return item
    if isinstance(item, Mapping):
        return as_prompt(item, column="prompt", id=f"{name.rpartition(':')[2]}/{index}", where=where)
    raise PromptsError(f"{where}: is {type(item).__name__}; a Prompt or a mapping with `prompt` is needed")
