"""From what a judge wrote to a score. It reads the answer alone: what a completion claims of itself is never parsed."""

from __future__ import annotations

import re

from makers.config import Call, JudgeParser, LastNumber, Words
from makers.dotted import load_dotted
from makers.rewards.extract import as_number, extract

LARGEST = 3e38  # of a float32, about; a NaN is not below it either


class Verdicts:
    """Raises ValueError when the parser of one's own cannot be found."""

    def __init__(self, parser: JudgeParser) -> None:
        self._parser = parser
        self._own = load_dotted(parser.path) if isinstance(parser, Call) else None

    def score(self, answer: str) -> float | None:
        """A score, finite as float32; None: the answer holds none."""
        value = self._read(answer)
        return value if value is not None and abs(value) <= LARGEST else None

    def _read(self, answer: str) -> float | None:
        parser = self._parser
        if isinstance(parser, Call):
            assert self._own is not None
            found = self._own(answer)
            return None if found is None else float(found)
        if isinstance(parser, Words):
            return _last_word(answer, parser.scores)
        if isinstance(parser, LastNumber):
            number = as_number(extract("last_number", answer))
        else:
            matches = list(re.finditer(parser.pattern, answer))
            number = as_number(matches[-1][1]) if matches else None
        return None if number is None else _within(float(number), parser.range)


def _within(number: float, bounds: tuple[float, float] | None) -> float | None:
    """On [0, 1] where there is a range, of which everything outside is no score."""
    if bounds is None:
        return number
    low, high = bounds
    return (number - low) / (high - low) if low <= number <= high else None


def _last_word(answer: str, scores: dict[str, float]) -> float | None:
    """Of the word that stands last: a judge that thinks first says its verdict at the end. Whole words, in any case."""
    by_word = {word.casefold(): score for word, score in scores.items()}
    longest_first = sorted(by_word, key=len, reverse=True)
    found = re.findall(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)", answer.casefold())
    return by_word[found[-1]] if found else None
