"""What goes with every call to a maker, as lists of plain values.

Ray passes those by a short path of its own; an object of a class is pickled instead, which costs about as much as the rest
of a call. Whatever else a prompt's fields hold goes through unchanged, only slower.
"""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from typing import Any

from buffer.records import Lease, Produced, Prompt

LEASE = [field.name for field in fields(Lease)]
PROMPT = LEASE.index("prompt")
_of_lease = attrgetter(*LEASE)
_of_prompt = attrgetter(*(field.name for field in fields(Prompt)))
_of_produced = attrgetter(*(field.name for field in fields(Produced)))


def pack_lease(lease: Lease) -> list[Any]:
    values = list(_of_lease(lease))
    values[PROMPT] = list(_of_prompt(lease.prompt))
    return values


def unpack_lease(values: list[Any]) -> Lease:
    prompt = Prompt(*values[PROMPT])
    return Lease(*values[:PROMPT], prompt, *values[PROMPT + 1 :])


def pack_produced(produced: Produced) -> list[Any]:
    return list(_of_produced(produced))


def unpack_produced(values: list[Any]) -> Produced:
    return Produced(*values)
