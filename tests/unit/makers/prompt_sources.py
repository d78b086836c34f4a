"""Prompt sources of a user that the tests name by dotted path."""

from __future__ import annotations

from buffer.records import Prompt


class Squares:
    """A sequence."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"prompt": f"{index} squared is", "answer": index * index}


class Letters:
    """An iterable that starts anew."""

    def __iter__(self):
        return (Prompt(id=f"letter-{letter}", content=letter, fields={"upper": letter.upper()}) for letter in "abc")


def once():
    return ({"prompt": text} for text in ("a", "b"))


def number():
    return 7


def wrong_items():
    return [{"prompt": "fine"}, 3]


def breaks():
    raise RuntimeError("no connection")
