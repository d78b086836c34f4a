"""What went wrong in a table, counted, and when it is so much that the run cannot go on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal

from buffer.config import BufferConfig
from buffer.records import Lease
from buffer.rows import Row

FailureKind = Literal["data", "infra", "timeout", "died"]


class Failures:
    """`cause`: what ends the run, in words; None while it can go on."""

    def __init__(self, config: BufferConfig) -> None:
        self._config = config
        self.counts: Counter[str] = Counter()
        self.cause: str | None = None
        self.last_of_data: str | None = None
        self.data_in_a_row = 0

    def end_run(self, text: str) -> None:
        self.cause = self.cause or text  # the first cause is the one to tell

    def attempt(self, row: Row, lease: Lease, kind: FailureKind, text: str) -> None:
        """One try of a stage failed, and not for the row's data."""
        self.counts[kind] += 1
        attempts = row.attempts[lease.stage] = row.attempts.get(lease.stage, 0) + 1
        if attempts >= self._config.max_attempts:
            self.end_run(
                f"{row}: {lease.stage} failed {attempts} times (buffer.max_attempts is {self._config.max_attempts}), "
                f"the last time on {lease.maker}: {text}"
            )

    def data(self, text: str) -> None:
        """A row cannot be made; which, and why."""
        self.counts["data"] += 1
        self.data_in_a_row += 1
        self.last_of_data = text
        if self.data_in_a_row > self._config.max_data_failures:
            self.end_run(
                f"{self.data_in_a_row} rows failed as data with no complete row between them "
                f"(buffer.max_data_failures is {self._config.max_data_failures}); the last: {self.last_of_data}"
            )

    def lost(self, row: Row, stages: Iterable[str], text: str) -> None:
        """Columns that were there are gone. No attempt of the stage: made again, it has the same seed."""
        self.counts["infra"] += 1
        row.losses += 1
        if row.losses >= self._config.max_attempts:
            self.end_run(
                f"{row}: its columns were lost {row.losses} times (buffer.max_attempts is {self._config.max_attempts}), "
                f"the last time those of {', '.join(sorted(stages))}: {text}"
            )
