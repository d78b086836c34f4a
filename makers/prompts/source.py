"""Order, passes and the cursor over data: the PromptSource that the buffer admits from.

Invariants: the order of a pass is a function of (seed, pass, number of rows); prompt number c of a run is row
`order(c // rows)[c % rows]`, so a cursor is all that a checkpoint needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from buffer.records import Prompt
from makers.prompts.rows import PromptsError, Rows


class IndexedPrompts:
    """Prompts from data with random access."""

    def __init__(self, rows: Rows, *, seed: int, shuffle: bool, epochs: int | None) -> None:
        if len(rows) == 0:
            raise PromptsError("the data is empty: at least one row is needed")
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._total = None if epochs is None else epochs * len(rows)
        self._cursor = 0
        self._order: tuple[int, np.ndarray] | None = None  # (pass, row indices [rows])

    def __len__(self) -> int:
        """Rows in one pass."""
        return len(self._rows)

    @property
    def cursor(self) -> int:
        """Prompts handed out so far."""
        return self._cursor

    @property
    def epoch(self) -> int:
        """The pass, from 0, that the next prompt belongs to."""
        return self._cursor // len(self._rows)

    def seek(self, cursor: int) -> None:
        """Go on as if `cursor` prompts had been handed out. Raises PromptsError where the data ends before that."""
        if cursor < 0 or (self._total is not None and cursor > self._total):
            raise PromptsError(
                f"cannot go on at prompt {cursor}: this data ends after {self._total} "
                f"({len(self._rows)} rows a pass); was it shortened since the checkpoint?"
            )
        self._cursor = cursor

    def next(self) -> Prompt | None:
        """The next prompt, or None when the last pass is over."""
        if self._cursor == self._total:
            return None
        epoch, position = divmod(self._cursor, len(self._rows))
        prompt = self._rows.prompt(self._index(epoch, position))
        self._cursor += 1
        return prompt

    def _index(self, epoch: int, position: int) -> int:
        if not self._shuffle:
            return position
        if self._order is None or self._order[0] != epoch:
            generator = np.random.Generator(np.random.PCG64([self._seed & 0xFFFFFFFFFFFFFFFF, epoch]))
            self._order = (epoch, generator.permutation(len(self._rows)))
        return int(self._order[1][position])


class StreamedPrompts:
    """Prompts from an iterable without a length: in its own order, started anew for each pass.

    `restart` gives a fresh iterator; `seek` reads and drops, because nothing else reaches row n of a stream.
    """

    def __init__(self, restart: Callable[[], Iterable[Prompt]], *, epochs: int | None) -> None:
        self._restart = restart
        self._epochs = epochs
        self._rewind()

    @property
    def cursor(self) -> int:
        return self._cursor

    @property
    def epoch(self) -> int:
        return self._epoch

    def seek(self, cursor: int) -> None:
        if cursor < 0:
            raise PromptsError(f"cannot go on at prompt {cursor}")
        self._rewind()
        while self._cursor < cursor:
            if self.next() is None:
                raise PromptsError(f"cannot go on at prompt {cursor}: this data ends after {self._cursor}")

    def next(self) -> Prompt | None:
        while self._epochs is None or self._epoch < self._epochs:
            prompt = next(self._iterator, None)
            if prompt is not None:
                self._cursor += 1
                self._in_pass += 1
                return prompt
            self._end_pass()
        return None

    def _rewind(self) -> None:
        self._cursor = 0
        self._epoch = 0
        self._in_pass = 0
        self._iterator: Iterator[Prompt] = iter(self._restart())

    def _end_pass(self) -> None:
        if self._in_pass == 0:
            raise PromptsError(
                "the data is empty: at least one row is needed"
                if self._epoch == 0
                else f"the iterable gave nothing on pass {self._epoch + 1}: let __iter__ start anew, or set epochs: 1"
            )
        self._epoch += 1
        self._in_pass = 0
        if self._epochs is None or self._epoch < self._epochs:
            self._iterator = iter(self._restart())
