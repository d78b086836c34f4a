"""Which part of a completion is the answer, and when two answers are the same."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Literal, get_args

Extract = Literal["auto", "whole", "last_number", "answer_tag"]

# A sign belongs to a number only where no operand can stand before it: "7-3" ends in 3, "=-3" in -3.
_NUMBER = re.compile(
    r"(?:(?<![\w.)\]}])[-+])?"  # sign
    r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?<!\d)(?=\.\d))"  # 1,234 or 1234 or nothing before .5
    r"(?:\.\d+)?(?:[eE][-+]?\d+)?"
)
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def check_mode(mode: str, option: str) -> None:
    """Raises ValueError."""
    if mode not in get_args(Extract):
        raise ValueError(f"option {option}: {mode!r} is none of {', '.join(get_args(Extract))}")


def extract(mode: str, text: str, reference: str | None = None) -> str | None:
    """The answer in `text`, or None.

    whole: all of it, without white space at its ends; last_number: the last number; answer_tag: inside the last
    <answer>...</answer>; auto: the tag if there is one, else the last number if `reference` is a number, else whole.
    """
    if mode == "auto":
        mode = "answer_tag" if _TAG.search(text) else "whole" if as_number(reference) is None else "last_number"
    if mode == "last_number":
        numbers = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
        return numbers[-1] if numbers else None
    if mode == "answer_tag":
        tags = _TAG.findall(text)
        return tags[-1].strip() if tags else None
    return text.strip()


def as_number(text: str | None) -> Decimal | None:
    """The finite number that `text` is, thousands separators allowed, or None."""
    if text is None or not _NUMBER.fullmatch(text.strip()):
        return None
    try:
        return Decimal(text.strip().replace(",", ""))
    except InvalidOperation:  # an exponent beyond what decimal can hold
        return None


def same_answer(answer: str | None, reference: str, ignore_case: bool = False) -> bool:
    """Equal as text; or, where both are numbers, as numbers (3.0 is 3)."""
    if answer is None:
        return False
    left, right = as_number(answer), as_number(reference)
    if left is not None and right is not None:
        return left == right
    return (answer.casefold() == reference.casefold()) if ignore_case else answer == reference
