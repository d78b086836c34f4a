"""Which complete rows a trainer may take, and what each order costs in staleness.

All three orders are one rule: rows are taken oldest first, and past the oldest row that is left behind at most `reach` row
ids may be taken before it. Reach is 0 for `fifo`, `window` for `window` and unbounded for `ready`.

Let P = groups_per_step * every rows make a version and B = (max_staleness + 1) * P rows be in flight at most. A row that is
admitted when version v is published has at most B - 1 rows before it, and at most `window` rows overtake it. P of those
leave the table with every version, so at training its age is at most (B - 1 + window) // P. With max_staleness 0 no row can
overtake into a later version, because the P - 1 other rows in flight do not fill one: the age is 0. For this the trainer
takes at least groups_per_step rows a step. `ready` has no such bound: rows older than max_staleness are dropped there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from buffer.config import Order
from buffer.rows import Row


def worst_case_age(order: Order, window: int, max_staleness: int, groups_per_step: int, every: int) -> int:
    """The largest age, in versions, a row can have when it is trained."""
    if order != "window" or max_staleness == 0:
        return max_staleness
    rows_per_version = groups_per_step * every
    in_flight = (max_staleness + 1) * rows_per_version
    return (in_flight - 1 + window) // rows_per_version


def choose(unsampled: Iterable[Row], groups: int, order: Order, window: int) -> list[Row]:
    """Up to `groups` complete rows that may be taken now; `unsampled` comes in the order of row ids."""
    reach = {"fifo": 0, "window": window, "ready": math.inf}[order]
    chosen: list[Row] = []
    last = math.inf
    for row in unsampled:
        if len(chosen) == groups or row.id > last:
            break
        if row.complete:
            chosen.append(row)
        elif last == math.inf:
            last = row.id + reach
    return chosen
