"""The columns of stage `teacher` as a trainer reads them. numpy only.

Log-probs are at temperature 1: the ones of a token's likeliest followers, and of the token itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

# Labels of the tokens, float32 each: two columns, and whether the row's tokens were sampled by no policy.
MASS, TARGET, DEMONSTRATED = "teacher_mass", "teacher_target_logprobs", "demonstrated"


@dataclass(frozen=True, slots=True)
class TeacherTop:
    """Of response tokens: `ids` int32 and `log_probs` float32 [T, K], in any order; an id may come twice."""

    ids: np.ndarray
    log_probs: np.ndarray

    def __getitem__(self, tokens: slice) -> TeacherTop:
        return TeacherTop(self.ids[tokens], self.log_probs[tokens])

    @classmethod
    def joined(cls, parts: Sequence[TeacherTop], like: TeacherTop) -> TeacherTop:
        """One after another; none at all is of no token."""
        every = [like[0:0], *parts]
        return cls(np.concatenate([part.ids for part in every]), np.concatenate([part.log_probs for part in every]))


def teacher_top(columns: Mapping[str, np.ndarray], tokens: int, vocab: int | None = None) -> TeacherTop:
    """Of a row with so many response tokens. Raises ValueError where the columns do not fit the tokens or the vocabulary."""
    ids, log_probs = columns["teacher_ids"], columns["teacher_logprobs"]
    if ids.size != log_probs.size or ids.size % tokens:
        raise ValueError(
            f"the teacher has {ids.size} ids and {log_probs.size} log-probs for {tokens} response tokens, needs K of each "
            "for every token"
        )
    for name in (MASS, TARGET):
        if columns[name].shape != (tokens,):
            raise ValueError(f"{name} has {columns[name].size} entries for {tokens} response tokens")
    if vocab is not None and ids.size and not 0 <= ids.min() <= ids.max() < vocab:
        raise ValueError(f"teacher_ids go from {ids.min()} to {ids.max()}, the vocabulary from 0 to {vocab - 1}")
    return TeacherTop(ids.reshape(tokens, -1), log_probs.reshape(tokens, -1))


def check_width(widths: Sequence[int]) -> None:
    """Raises ValueError unless all rows of a step have the same K."""
    if len(set(widths)) > 1:
        raise ValueError(f"teachers give {sorted(set(widths))} log-probs a token: all rows of a run need the same K")
