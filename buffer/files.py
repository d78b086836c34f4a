"""The cut of a buffer on disk: its state as JSON, the columns of its rows as Parquet.

Guarantees: what is read is what was written, dtypes and bits included; reading runs no code that the files hold, and
refuses columns that are not flat arrays of numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from pyarrow import parquet

from buffer.columns import Columns
from buffer.snapshot import places

STATE, COLUMNS = "state.json", "columns.parquet"
KINDS = "biuf"  # of dtypes: booleans and numbers


class CutError(ValueError):
    """Files that hold no cut of a buffer."""


def write_cut(folder: Path, state: Mapping[str, Any], columns: Sequence[Columns]) -> None:
    """`columns[i]` are those of `places(state)[i]`. One record of the Parquet file is one array, in little-endian bytes."""
    records = [
        {
            "row": row,
            "stage": stage,
            "column": name,
            "dtype": array.dtype.newbyteorder("<").str,
            "values": _bytes(array),
        }
        for (row, stage), arrays in zip(places(state), columns, strict=True)
        for name, array in arrays.items()
    ]
    texts = [(name, pa.string()) for name in ("stage", "column", "dtype")]
    schema = pa.schema([("row", pa.int64()), *texts, ("values", pa.large_binary())])
    folder.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(records, schema=schema), folder / COLUMNS)
    (folder / STATE).write_text(json.dumps(state))


def read_cut(folder: Path) -> tuple[dict[str, Any], list[Columns]]:
    """What `write_cut` was given. Raises CutError."""
    found: dict[tuple[int, str], Columns] = {}
    try:
        state = json.loads((folder / STATE).read_text())
        for record in parquet.read_table(folder / COLUMNS).to_pylist():
            dtype = np.dtype(record["dtype"])
            if dtype.kind not in KINDS:
                raise ValueError(f"{record['column']} of row {record['row']} has dtype {record['dtype']}")
            array = np.frombuffer(record["values"], dtype)
            found.setdefault((record["row"], record["stage"]), {})[record["column"]] = array
        return state, [found[place] for place in places(state)]
    except (OSError, ValueError, TypeError, KeyError, pa.ArrowException) as error:
        raise CutError(f"{folder} cannot be read ({type(error).__name__}: {error})") from error


def _bytes(array: np.ndarray) -> bytes:
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
