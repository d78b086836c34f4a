"""Which part of a completion is the answer."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Literal, get_args

Extract = Literal["auto", "whole", "last_number", "answer_tag"]

# A sign belongs to a number only where nothing that could be an operand stands before it: 7-3 ends in 3, =-3 in -3.
_NUMBER = re.compile(r"(?:(?<![\w.)\]}])[-+])?(?:\d+(?:,\d{3})+(?!\d)|\d+)?(?:(?<=\d)\.\d+|(?<![\d.])\.\d+)?(?:(?<=\d)[eE][-+]?\d+)?")
_SIMPLE_NUMBER = re.compile(r"(?:(?<![\w.)\]}])[-+])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+\b)?")
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
