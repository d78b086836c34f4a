"""A run as it is seen from outside: its status whenever it changes, and the files of trained rows before they are replaced."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyarrow import parquet

from topology.runs import read_json

LOOK = 0.2  # seconds


@dataclass(frozen=True)
class RowsFile:
    """The ids of the rows that were trained on in one step. A step that is done again has another file of the same name."""

    time: float
    step: int
    row_ids: frozenset[int]


class Observer:
    """Looks at the folder of a run, in a thread, until it is closed."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.statuses: list[dict[str, Any]] = []
        self.rows: list[RowsFile] = []
        self._known: dict[str, tuple[int, int]] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @property
    def now(self) -> dict[str, Any]:
        return self.statuses[-1] if self.statuses else {"state": "starting", "step": 0, "phase": None, "actors": []}

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._look()

    def first(self, after: float, what: Callable[[dict[str, Any]], bool]) -> float | None:
        """Seconds from `after` (since the epoch) to the first status that is so."""
        return next((round(s["time"] - after, 2) for s in self.statuses if s["time"] > after and what(s)), None)

    def at(self, moment: float) -> dict[str, Any]:
        """The last status before."""
        return next((s for s in reversed(self.statuses) if s["time"] <= moment), self.statuses[0])

    def _watch(self) -> None:
        while not self._closing.wait(LOOK):
            self._look()

    def _look(self) -> None:
        status = read_json(self.run / "status.json")
        if status is not None and status.get("time") != self.now.get("time"):
            self.statuses.append(status)
        for file in (self.run / "rows").glob("step-*.parquet"):
            found = file.stat()
            key = (found.st_ino, found.st_mtime_ns)
            if self._known.get(file.name) != key:
                self._known[file.name] = key
                ids = parquet.read_table(file, columns=["row_id"])["row_id"].to_pylist()
                self.rows.append(RowsFile(time.time(), int(file.stem.removeprefix("step-")), frozenset(ids)))


def actor(status: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((row for row in status["actors"] if row["name"] == name), None)
