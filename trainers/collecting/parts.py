"""The files of a job: `collected/part-000001.parquet` and so on, one record for each kept sample.

Guarantees:
1. A Parquet file that exists is complete and on the disk; it names every row that it accounts for, also those of which no
   sample was kept. So what was collected is what the files say, whatever happens to the processes.
2. A JSON-lines file is there before the Parquet file of its name; without that one it counts for nothing, and is replaced.
3. Numbers grow without a gap.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trainers.collecting.tally import RowCount

ROWS = b"tandem.rows"  # the key of the file's metadata under which the rows are


class Parts:
    def __init__(self, folder: Path, jsonl: bool) -> None:
        self._folder = Path(folder)
        self._jsonl = jsonl
        self._folder.mkdir(parents=True, exist_ok=True)
        for partial in self._folder.glob(".*"):
            partial.unlink()
        self.count = len(self._files())

    def counts(self) -> Iterator[RowCount]:
        """Of all rows in the files. Raises ValueError for a file that was not written here."""
        for file in self._files():
            told = (pq.read_schema(file).metadata or {}).get(ROWS)
            if told is None:
                raise ValueError(f"{file} is not a part of this job: move it away, so that the job can go on")
            yield from (RowCount(**one) for one in json.loads(told))

    def write(self, records: Sequence[dict[str, Any]], counts: Sequence[RowCount], like: dict[str, Any]) -> Path:
        """The next part. `records` may be none: the part then has no records, but the columns of the record `like`.

        Raises OSError.
        """
        name = f"part-{self.count + 1:06d}"
        table = pa.Table.from_pylist([*records, like]).slice(0, len(records))
        told = json.dumps([asdict(one) for one in counts]).encode()
        table = table.replace_schema_metadata({ROWS: told})
        if self._jsonl:
            lines = "".join(json.dumps(record) + "\n" for record in table.to_pylist())
            self._put(f"{name}.jsonl", lambda draft: draft.write_text(lines))
        file = self._put(f"{name}.parquet", lambda draft: pq.write_table(table, draft))
        self.count += 1
        return file

    def _put(self, name: str, write: Any) -> Path:
        draft, file = self._folder / f".{name}", self._folder / name
        try:
            write(draft)
            _sync(draft)
            draft.replace(file)
        finally:
            draft.unlink(missing_ok=True)
        _sync(self._folder)
        return file

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("part-*.parquet"))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
