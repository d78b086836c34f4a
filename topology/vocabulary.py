"""Do two checkpoint folders mean the same by a token id? Read from their tokenizer files alone.

Tokens travel as ids and are never encoded again, so a model that scores them must number them as the policy does. The
size of the embedding may differ: families pad it differently from size to size.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

OPAQUE = ("tokenizer.model", "tiktoken.model", "vocab.txt")  # compared byte by byte
SHOWN = 3


def tokens_by_id(folder: Path) -> dict[int, str] | None:
    """None where the folder has no tokenizer file that is JSON."""
    whole = _read(folder / "tokenizer.json")
    if whole is not None:
        pieces = whole["model"]["vocab"]  # by token, or, of a unigram model, [[token, score], ...]
        by_token = pieces if isinstance(pieces, dict) else {piece: i for i, (piece, _) in enumerate(pieces)}
        added = {entry["content"]: entry["id"] for entry in whole.get("added_tokens", ())}
    else:
        by_token, added = _read(folder / "vocab.json"), _read(folder / "added_tokens.json") or {}
        if by_token is None:
            return None
    return {number: token for token, number in {**by_token, **added}.items()}


def difference(policy: Path, other: Path) -> str | None:
    """How the tokenizer of `other` numbers tokens otherwise than that of `policy`; None: it does not."""
    if policy == other:
        return None
    mine, theirs = tokens_by_id(policy), tokens_by_id(other)
    if mine is None or theirs is None:
        same = any(_bytes(policy / name) == _bytes(other / name) is not None for name in OPAQUE)
        return None if same else f"the tokenizer files of {other} are not those of {policy}"
    wrong = sorted(number for number in mine.keys() | theirs.keys() if mine.get(number) != theirs.get(number))
    if not wrong:
        return None
    shown = ", ".join(f"{number} is {theirs.get(number)!r}, not {mine.get(number)!r}" for number in wrong[:SHOWN])
    return (
        f"{len(wrong)} of {len(mine)} token ids mean something else in {other} than in {policy} "
        f"({shown}{', ...' if len(wrong) > SHOWN else ''})"
    )


def _read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def _bytes(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None
