"""Prompts from Parquet and Arrow files (the form in which `datasets` saves to disk), read with pyarrow alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from buffer.records import Prompt
from makers.prompts.rows import PromptsError, PromptsSummary, as_content, as_prompt, missing_column


class ArrowRows:
    """The prompt column is checked whole at the start; other columns become Python values when a row is asked for."""

    def __init__(self, files: Sequence[Path], *, column: str, name: str) -> None:
        tables = [_read(file) for file in files]
        for file, table in zip(files, tables, strict=True):
            _check_type(table.schema, column, str(file))
        self._table = pa.concat_tables(tables, promote_options="default")
        self._column = column
        self._name = name
        _check_values(self._table.column(column), name)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def prompt(self, index: int) -> Prompt:
        row = self._table.slice(index, 1).to_pylist()[0]
        where = f"{self._name}, row {index}"
        return as_prompt(row, column=self._column, id=f"{self._name}/{index}", where=where)


def check_arrow(files: Sequence[Path], column: str) -> PromptsSummary:
    """Check schemas and count rows without reading the data. Raises PromptsError."""
    rows, columns = 0, dict[str, None]()
    for file in files:
        schema, count = _describe(file)
        _check_type(schema, column, str(file))
        rows += count
        columns.update(dict.fromkeys(name for name in schema.names if name != column))
    if rows == 0:
        raise PromptsError(f"{', '.join(map(str, files))}: the data is empty: at least one row is needed")
    return PromptsSummary(rows=rows, columns=tuple(columns))


def _describe(file: Path) -> tuple[pa.Schema, int]:
    if file.suffix != ".parquet":
        table = _read(file)  # memory-mapped: nothing but the schema and the lengths is touched
        return table.schema, table.num_rows
    try:
        metadata = pq.read_metadata(file)
    except (pa.ArrowException, OSError) as error:
        raise PromptsError(f"{file}: cannot be read as Parquet ({error})") from error
    return metadata.schema.to_arrow_schema(), metadata.num_rows


def _read(file: Path) -> pa.Table:
    try:
        if file.suffix == ".parquet":
            return pq.ParquetFile(file).read()  # this file alone: no partition columns from the folder's name
        source = pa.memory_map(str(file))
        try:
            return pa.ipc.open_stream(source).read_all()
        except pa.ArrowInvalid:  # not the stream form: the file form has its own magic number
            return pa.ipc.open_file(source).read_all()
    except (pa.ArrowException, OSError) as error:
        kind = "Parquet" if file.suffix == ".parquet" else "Arrow"
        raise PromptsError(f"{file}: cannot be read as {kind} ({error})") from error


def _check_type(schema: pa.Schema, column: str, where: str) -> None:
    if column not in schema.names:
        raise missing_column(column, schema.names, where)
    kind = schema.field(column).type
    if not _is_text(kind) and not _is_messages(kind):
        raise PromptsError(
            f"{where}: column {column!r} holds {kind}; text, or lists of messages {{role, content}}, is needed"
        )


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return any((pa.types.is_string(kind), pa.types.is_large_string(kind), pa.types.is_string_view(kind)))


def _is_messages(kind: pa.DataType) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not is_list or not pa.types.is_struct(kind.value_type):
        return False
    keys = {field.name: field.type for field in kind.value_type}
    return all(key in keys and _is_text(keys[key]) for key in ("role", "content"))


def _check_values(values: pa.ChunkedArray, name: str) -> None:
    if _is_text(values.type):
        text = values.cast(pa.large_string())
        blank = pc.equal(pc.utf8_length(pc.utf8_trim_whitespace(text)), 0)
        index = pc.index(pc.fill_null(blank, True), True).as_py()
        if index >= 0:
            as_content(values[index].as_py(), f"{name}, row {index}")
        return
    for index, value in enumerate(values):
        as_content(value.as_py(), f"{name}, row {index}")
