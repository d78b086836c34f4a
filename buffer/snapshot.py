"""The state of an experience table as something JSON can hold, and back.

Guarantees: a snapshot restored is the same table: no row lost, none twice, the samples of a prompt together. Makers and
leases are left out: a stage that was being made is made again. Sampled rows are written as complete, for the cut of a
trainer's checkpoint is at the end of a step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from buffer.ledger import Ledger
from buffer.rows import Decode, Encode, Row
from buffer.table import ExperienceTable


def snapshot(table: ExperienceTable, encode: Encode) -> dict[str, Any]:
    """`encode(row id, stage, reference)` turns a reference to columns into something JSON can hold."""
    return {
        "rows": [table.rows[row_id].to_state(encode) for row_id in sorted(table.rows)],
        "next_row": table.next_row,
        "ledger": table.ledger.as_dict(),
        "unpublished": [list(pair) for pair in table.unpublished_steps],
        "published": table.versions.published,
        "step": table.versions.step,
        "failures": dict(table.failures),
        "data_failures_in_a_row": table.data_failures_in_a_row,
    }


def restore(table: ExperienceTable, state: Mapping[str, Any], decode: Decode) -> None:
    """Into a table without rows; makers may be attached before or after. Raises ValueError if it has had rows."""
    admitted = table.ledger.rows.admitted
    if admitted:
        raise ValueError(f"a snapshot can be restored into a fresh table only; this one has {admitted} rows behind it")
    table.ledger = Ledger.from_dict(state["ledger"])
    table.versions.published, table.versions.step = state["published"], state["step"]
    table.failures = Counter(state["failures"])
    table.unpublished_steps = deque((step, rows) for step, rows in state["unpublished"])
    for row in state["rows"]:
        table.put_back(Row.from_state(row, decode, table.clock()))
    table.next_row = state["next_row"]
    table.data_failures_in_a_row = state["data_failures_in_a_row"]
    table.check()
