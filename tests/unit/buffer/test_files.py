"""A buffer's cut on disk."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from buffer.files import CutError, read_cut, write_cut

STATE = {
    "filled": [{"id": 3, "produced": {"rollout": {}, "reward": {}}}, {"id": 5, "produced": {"rollout": {}}}],
    "x": [1.5],
}


def columns() -> list[dict[str, np.ndarray]]:
    rollout = {
        "ids": np.arange(5, dtype=np.int32),
        "offsets": np.array([0, 2, 5], np.int64),
        "logprobs": np.array([-0.0, np.nan, -np.inf, 1e-45, -1.5], np.float32),
        "reasons": np.array([0, 1], np.int8),
    }
    reward = {"rewards": np.array([0.1], np.float64), "flags": np.array([True, False]), "half": np.zeros(0, np.float16)}
    return [rollout, reward, {"ids": np.arange(20, dtype=">i4")[::2]}]


def test_a_cut_is_read_as_it_was_written_in_every_bit(tmp_path: Path) -> None:
    write_cut(tmp_path / "buffer", STATE, columns())
    state, found = read_cut(tmp_path / "buffer")
    assert state == STATE
    for mine, theirs in zip(found, columns(), strict=True):
        assert mine.keys() == theirs.keys()
        for name, array in theirs.items():
            assert mine[name].dtype == array.dtype.newbyteorder("=")
            assert mine[name].tobytes() == array.astype(array.dtype.newbyteorder("=")).tobytes()


def test_a_cut_without_rows_is_read_too(tmp_path: Path) -> None:
    write_cut(tmp_path, {"filled": []}, [])
    assert read_cut(tmp_path) == ({"filled": []}, [])


@pytest.mark.parametrize("dtype", ["|O", "|S4", "<M8[ns]", "i4,f4", "nonsense"])
def test_columns_that_are_not_numbers_are_refused(tmp_path: Path, dtype: str) -> None:
    write_cut(tmp_path, STATE, columns())
    records = parquet.read_table(tmp_path / "columns.parquet").to_pylist()
    records[0]["dtype"] = dtype
    parquet.write_table(pa.Table.from_pylist(records), tmp_path / "columns.parquet")
    with pytest.raises(CutError, match="cannot be read"):
        read_cut(tmp_path)


def test_files_that_are_missing_broken_or_pickled_are_refused(tmp_path: Path) -> None:
    touched = tmp_path / "touched"

    class Hostile:
        def __reduce__(self) -> Any:
            return Path.touch, (touched,)

    broken: list[tuple[str, bytes]] = [
        ("state.json", b"{"),
        ("columns.parquet", b"PAR1"),
        *((name, pickle.dumps(Hostile())) for name in ("state.json", "columns.parquet")),
        ("state.json", json.dumps({"filled": [{"id": 99, "produced": {"rollout": {}}}]}).encode()),
    ]
    for name, content in broken:
        write_cut(tmp_path / "buffer", STATE, columns())
        (tmp_path / "buffer" / name).write_bytes(content)
        with pytest.raises(CutError, match=r"buffer cannot be read"):
            read_cut(tmp_path / "buffer")
        (tmp_path / "buffer" / name).unlink()
        with pytest.raises(CutError, match=r"buffer cannot be read"):
            read_cut(tmp_path / "buffer")
    assert not touched.exists()
