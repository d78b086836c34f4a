"""Prompts of which a fraction is answered by a dataset, the others by the policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from buffer.records import Prompt
from makers.prompts.rows import PromptsError
from makers.prompts.source import IndexedPrompts, StreamedPrompts

FROM_DATASET: Final = "from_dataset"  # the reserved field of a prompt that says which of the two its row is


class MixedPrompts:
    """Gives every prompt of a source the field `from_dataset`: true with probability 1 - `on_policy`.

    Invariant: the draw is a function of the seed and the prompt's place in the source alone, so that a source that goes on
    at a cursor, and a row whose prompt is asked for again, draw what they drew before.
    """

    def __init__(self, source: IndexedPrompts | StreamedPrompts, *, on_policy: float, seed: int) -> None:
        self._source = source
        self._on_policy = on_policy
        self._seed = seed & 0xFFFFFFFFFFFFFFFF

    @property
    def cursor(self) -> int:
        return self._source.cursor

    def seek(self, cursor: int) -> None:
        self._source.seek(cursor)

    def next(self) -> Prompt | None:
        """None: the source has ended. Raises PromptsError for a prompt that has the field already."""
        place = self._source.cursor
        prompt = self._source.next()
        if prompt is None:
            return None
        refuse_reserved(prompt.fields)
        drawn = np.random.Generator(np.random.PCG64([self._seed, place])).random()
        return replace(prompt, fields={**prompt.fields, FROM_DATASET: bool(drawn >= self._on_policy)})


def refuse_reserved(columns: Mapping[str, Any] | tuple[str, ...]) -> None:
    """Raises PromptsError."""
    if FROM_DATASET in columns:
        raise PromptsError(f"the column `{FROM_DATASET}` is set by `distill.lmbda` below 1: give yours another name")
