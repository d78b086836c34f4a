"""Prompts from JSON lines: the text is held in memory as it is, each row is parsed when it is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from buffer.records import Prompt
from makers.prompts.rows import PromptsError, PromptsSummary, as_prompt


class JsonlRows:
    """Every line is parsed and checked once at the start, so that a broken one ends the run before it begins."""

    def __init__(self, files: Sequence[Path], *, column: str, name: str) -> None:
        self._name = name
        self._column = column
        self._data = [file.read_bytes() for file in files]
        spans: list[tuple[int, int, int]] = []  # (file, first byte, end)
        for number, (file, data) in enumerate(zip(files, self._data, strict=True)):
            for line, start, end in _lines(data):
                where = f"{file}, line {line}"
                as_prompt(_parse(data[start:end], where), column=column, id="", where=where)
                spans.append((number, start, end))
        self._spans = np.array(spans, dtype=np.int64).reshape(-1, 3)  # [rows, 3]

    def __len__(self) -> int:
        return len(self._spans)

    def prompt(self, index: int) -> Prompt:
        number, start, end = (int(value) for value in self._spans[index])
        where = f"{self._name}, row {index}"
        row = _parse(self._data[number][start:end], where)
        return as_prompt(row, column=self._column, id=f"{self._name}/{index}", where=where)


def check_jsonl(files: Sequence[Path], column: str, rows: int = 64) -> PromptsSummary:
    """Check the first `rows` rows. Raises PromptsError."""
    columns: dict[str, None] = {}
    seen = 0
    for where, line in _first_lines(files, rows):
        columns.update(dict.fromkeys(as_prompt(_parse(line, where), column=column, id="", where=where).fields))
        seen += 1
    if not seen:
        raise PromptsError(f"{', '.join(map(str, files))}: the data is empty: at least one row is needed")
    return PromptsSummary(rows=None, columns=tuple(columns))


def _first_lines(files: Sequence[Path], count: int) -> Iterator[tuple[str, bytes]]:
    for file in files:
        with file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield f"{file}, line {number}", line
                    count -= 1
                if count == 0:
                    return


def _lines(data: bytes) -> Iterator[tuple[int, int, int]]:
    """(line number from 1, first byte, end) of every line that is not blank."""
    start, number = 0, 0
    while start < len(data):
        number += 1
        newline = data.find(b"\n", start)
        end = len(data) if newline < 0 else newline
        if data[start:end].strip():
            yield number, start, end
        start = end + 1


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:  # malformed JSON and malformed UTF-8
        raise PromptsError(f"{where}: not valid JSON ({error})") from error
    if not isinstance(row, dict):
        raise PromptsError(f"{where}: holds {type(row).__name__}; one object {{...}} a line is needed")
    return row
