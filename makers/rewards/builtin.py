"""The built-in reward functions. Each is a class whose fields are its options, called with the completions of a row.

Guarantees: every score is a float, in [0, 1] where the function judges an answer; data that cannot be scored (no reference
answer, an unknown dataset) is an error, never a silent 0. `columns` names what the data must hold.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from makers.rewards.extract import check_mode, extract, same_answer
from makers.rewards.http import Http


@dataclass(frozen=True, kw_only=True)
class ExactMatch:
    """1 where the answer equals the text in column `field` (or one of its texts, if it is a list), else 0.

    `extract` picks the answer in the completion, `extract_field` in the column (last_number for columns that hold a
    worked solution). Numbers are compared as numbers.
    """

    field: str = "answer"
    extract: str = "whole"
    extract_field: str = "whole"
    ignore_case: bool = False

    def __post_init__(self) -> None:
        check_mode(self.extract, "extract")
        check_mode(self.extract_field, "extract_field")

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.field,)

    def __call__(self, completions: list[str], **fields: Any) -> list[float]:
        references = [_reference(self.extract_field, text, self.field) for text in _texts(fields[self.field])]
        return [float(any(self._matches(text, reference) for reference in references)) for text in completions]

    def _matches(self, text: str, reference: str) -> bool:
        return same_answer(extract(self.extract, text, reference), reference, self.ignore_case)


@dataclass(frozen=True, kw_only=True)
class Regex:
    """Without `field`: 1 where `pattern` is found. With it: 1 where the last match equals the text of that column.

    `group` (number or name) is the part of the match that counts; null: the first group, or the whole match if the
    pattern has none.
    """

    pattern: str
    field: str | None = None
    group: int | str | None = None
    ignore_case: bool = False

    def __post_init__(self) -> None:
        try:
            groups = re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"option pattern: {self.pattern!r} is not a regular expression ({error})") from error
        known = [*range(groups.groups + 1), *groups.groupindex]
        if self.group is not None and self.group not in known:
            raise ValueError(f"option group: {self.pattern!r} has no group {self.group!r}; it has {known}")

    @property
    def columns(self) -> tuple[str, ...]:
        return () if self.field is None else (self.field,)

    def __call__(self, completions: list[str], **fields: Any) -> list[float]:
        pattern = re.compile(self.pattern, re.IGNORECASE if self.ignore_case else 0)
        if self.field is None:
            return [float(pattern.search(text) is not None) for text in completions]
        group = self.group if self.group is not None else min(pattern.groups, 1)
        references = [text.strip() for text in _texts(fields[self.field])]
        answers = [self._last(pattern, text, group) for text in completions]
        return [float(any(same_answer(answer, each, self.ignore_case) for each in references)) for answer in answers]

    @staticmethod
    def _last(pattern: re.Pattern[str], text: str, group: int | str) -> str | None:
        matches = list(pattern.finditer(text))
        found = matches[-1].group(group) if matches else None
        return None if found is None else found.strip()


@dataclass(frozen=True, kw_only=True)
class MathVerify:
    """1 where math-verify finds the answer equal to the one in column `field`, else 0.

    `seconds` bounds each parsing and each comparison; an expression that takes longer counts as wrong.
    """

    field: str = "answer"
    extract_field: str = "whole"
    seconds: int = 1

    def __post_init__(self) -> None:
        check_mode(self.extract_field, "extract_field")
        if not isinstance(self.seconds, int) or self.seconds < 1:
            raise ValueError(f"option seconds: {self.seconds!r}; a whole number of at least 1 is needed")
        import math_verify  # noqa: F401  an installation that lacks it is refused when the function is built

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.field,)

    def __call__(self, completions: list[str], **fields: Any) -> list[float]:
        from math_verify import parse, verify

        text = _reference(self.extract_field, str(fields[self.field]), self.field)
        gold = parse(text, parsing_timeout=self.seconds) or parse(f"${text}$", parsing_timeout=self.seconds)
        if not gold:
            raise ValueError(f"column {self.field!r} holds no mathematical expression: {text[:200]!r}")
        answers = (parse(completion, parsing_timeout=self.seconds) for completion in completions)
        return [float(bool(answer) and verify(gold, answer, timeout_seconds=self.seconds)) for answer in answers]


@dataclass(frozen=True, kw_only=True)
class ReasoningGym:
    """The score that the row's own reasoning-gym dataset gives to the answer.

    `extract` picks the answer in the completion. `partial: false` keeps full scores only: many datasets give a
    fraction to an answer that contains the right one (13 or -3 where 3 is right scores 0.5). `dataset` names the
    dataset where the data has no such column (files made elsewhere).
    """

    extract: str = "auto"
    partial: bool = True
    dataset: str | None = None

    def __post_init__(self) -> None:
        check_mode(self.extract, "extract")
        import reasoning_gym  # noqa: F401  an installation that lacks it is refused when the function is built

        if self.dataset is not None:
            _gym_dataset(self.dataset, "{}")

    @property
    def columns(self) -> tuple[str, ...]:
        return ("answer", "metadata") if self.dataset is not None else ("answer", "metadata", "dataset")

    def __call__(self, completions: list[str], **fields: Any) -> list[float]:
        name = fields["dataset"] if self.dataset is None else self.dataset
        dataset = _gym_dataset(name, json.dumps(fields.get("dataset_config", {}), sort_keys=True))
        reference = fields["answer"]  # some datasets have many right answers and no reference
        answers = [extract(self.extract, text, reference) for text in completions]
        scores = [0.0 if answer is None else _gym_score(dataset, answer, fields) for answer in answers]
        return scores if self.partial else [float(score >= 1.0) for score in scores]


@dataclass(frozen=True, kw_only=True)
class Overlong:
    """0 up to `max_tokens` - `cache` tokens, then falling evenly to -1 at `max_tokens`, and -1 beyond.

    The soft overlong punishment of DAPO (arXiv 2503.14476, equation 13).
    """

    max_tokens: int
    cache: int
    columns = ()

    def __post_init__(self) -> None:
        if not 0 < self.cache <= self.max_tokens:
            raise ValueError(f"option cache: {self.cache!r} of max_tokens {self.max_tokens!r}; 0 < cache <= max_tokens")

    def __call__(self, completions: list[str], completion_tokens: list[int], **fields: Any) -> list[float]:
        free = self.max_tokens - self.cache
        return [max(-1.0, min(0.0, (free - length) / self.cache)) for length in completion_tokens]


def _gym_score(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    try:
        return float(dataset.score_answer(answer, entry))
    except Exception:
        # Some scorers raise on an answer they cannot parse, which is a wrong answer. An entry they cannot score at
        # all raises for its own reference too, and that is an error of the data.
        dataset.score_answer(entry["answer"], entry)
        return 0.0


@functools.lru_cache(maxsize=256)
def _gym_dataset(name: str, config: str) -> Any:
    from reasoning_gym.factory import DATASETS, create_dataset

    if name not in DATASETS:
        near = ", ".join(difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.4))
        raise ValueError(f"reasoning-gym has no dataset {name!r}" + (f"; near: {near}" if near else ""))
    return create_dataset(name, seed=0, **json.loads(config))


def _texts(value: Any) -> list[str]:
    """A column's reference answers as text: one, or those of a list."""
    values = value if isinstance(value, (list, tuple)) else [value]
    if not values or any(each is None for each in values):
        raise ValueError(f"the reference answer is {value!r}")
    return [str(each) for each in values]


def _reference(mode: str, text: str, field: str) -> str:
    found = extract(mode, text)
    if found is None:
        raise ValueError(f"column {field!r}: {mode} finds nothing in {text[:200]!r}")
    return found


BUILTIN: Mapping[str, Callable[..., Any]] = {
    "exact_match": ExactMatch,
    "http": Http,
    "math_verify": MathVerify,
    "overlong": Overlong,
    "reasoning_gym": ReasoningGym,
    "regex": Regex,
}


def build_builtin(name: str, options: Mapping[str, Any]) -> Any:
    """Raises ValueError: unknown, missing or wrong options, or a package that is not installed."""
    kind = BUILTIN[name]
    known = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(options.keys() - known.keys())
    if unknown:
        raise ValueError(f"no option {', '.join(unknown)}; there are: {', '.join(known)}")
    missing = [key for key, field in known.items() if field.default is dataclasses.MISSING and key not in options]
    if missing:
        raise ValueError(f"option {', '.join(missing)} is missing")
    try:
        return kind(**options)
    except ImportError as error:
        raise ValueError(f"cannot be imported here ({error}); pip install {name.replace('_', '-')}") from error
