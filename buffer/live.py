"""The live rows of a table: where each is, and what they come to. A row is live until it is trained or dropped."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any

from buffer.records import Produced
from buffer.rows import Row


class LiveRows:
    """Every live row is either with the trainer (`sampled`) or not (`unsampled`). Counts are kept, not counted anew."""

    def __init__(self) -> None:
        self.by_id: dict[int, Row] = {}
        self.unsampled: OrderedDict[int, Row] = OrderedDict()  # in the order of their ids
        self.sampled: dict[int, Row] = {}
        self.complete = 0  # complete rows among the unsampled
        self.with_columns = 0
        self.nbytes = 0

    def add(self, row: Row, sampled: bool = False) -> None:
        """A row later than those there."""
        self.by_id[row.id] = row
        (self.sampled if sampled else self.unsampled)[row.id] = row
        self.with_columns += bool(row.columns)
        self.nbytes += row.nbytes

    def fill(self, row: Row, stage: str, maker: str, produced: Produced, columns: Any) -> None:
        self.with_columns += not row.columns
        self.nbytes += produced.nbytes
        row.columns[stage], row.produced[stage], row.makers[stage] = columns, produced, maker

    def completed(self, row: Row) -> None:
        """An unsampled row has all its columns."""
        row.complete = True
        self.complete += 1

    def empty(self, row: Row, stages: Collection[str]) -> int:
        """Takes out what these stages have made: its tokens."""
        tokens, had_columns = 0, bool(row.columns)
        for stage in row.produced.keys() & stages:
            produced = row.produced.pop(stage)
            tokens += produced.tokens
            del row.makers[stage]
            if stage in row.columns:
                self.nbytes -= produced.nbytes
                del row.columns[stage]
        self.with_columns -= had_columns and not row.columns
        if row.complete and row.id in self.unsampled:
            self.complete -= 1
        row.complete = False
        return tokens

    def sample(self, row: Row) -> None:
        """A complete row goes to the trainer."""
        self.sampled[row.id] = self.unsampled.pop(row.id)
        self.complete -= 1

    def give_back(self, rows: Sequence[Row]) -> None:
        """From the trainer, each to its old place."""
        for row in rows:
            self.unsampled[row.id] = self.sampled.pop(row.id)
            self.complete += row.complete
        if rows:
            self.unsampled = OrderedDict(sorted(self.unsampled.items()))

    def remove(self, row: Row) -> None:
        del self.by_id[row.id]
        if self.sampled.pop(row.id, None) is None:
            del self.unsampled[row.id]
            self.complete -= row.complete
        self.with_columns -= bool(row.columns)
        self.nbytes -= row.nbytes
