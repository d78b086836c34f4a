"""The state of an experience table as something JSON can hold, and back.

Guarantees: a snapshot restored is the same table: no row lost, none twice, the samples of a prompt together; the ledger
closes. Makers, leases and prompts are left out: a stage that was being made is made again, with the same seed, and a row's
prompt is asked for again at its place in the source, which is the row's id.

Columns are not in the state. It says of the rows in `filled` which stages they had, and the columns of those come beside it:
as references in a cut, as anything that stands for columns when it is restored. Rows without columns are made again, and
their tokens dropped as `lost`.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, Protocol

from buffer.ledger import Ledger
from buffer.records import Produced, Prompt
from buffer.rows import Row
from buffer.table import ExperienceTable

log = logging.getLogger("buffer")
PRODUCED = [field.name for field in fields(Produced)]
_of_produced = attrgetter(*PRODUCED)


class PromptSource(Protocol):
    """Prompts in a fixed order. `cursor` counts those given out; `seek(cursor)` goes on from there."""

    @property
    def cursor(self) -> int: ...

    def next(self) -> Prompt | None:
        """None: the data is finished, for good."""
        ...

    def seek(self, cursor: int) -> None: ...


@dataclass(frozen=True)
class Cut:
    """`state` is JSON-able; `references[i]` are the columns of `places(state)[i]`."""

    state: dict[str, Any]
    references: list[Any]


def places(state: Mapping[str, Any]) -> list[tuple[int, str]]:
    """(row id, stage) of each of a cut's references."""
    return [(row["id"], stage) for row in state["filled"] for stage in row["produced"]]


def snapshot(table: ExperienceTable) -> dict[str, Any]:
    """Without columns, and small: a few flat lists over the live rows. What the trainer has it is known to have."""
    sampled = table.live.sampled.values()
    state = _state(table, sampled)
    state["sampled"] = list(table.live.sampled)
    state["columns_lost"] = table.live.with_columns - sum(bool(row.columns) for row in sampled)
    return state


def cut(table: ExperienceTable) -> Cut:
    """For a checkpoint: with every column of a live row. Rows that the trainer has count as given back."""
    rows = [table.rows[row_id] for row_id in sorted(table.rows) if table.rows[row_id].columns]
    filled = [row for row in rows if row.produced.keys() == row.columns.keys()]
    return Cut(_state(table, filled), [row.columns[stage] for row in filled for stage in row.produced])


def _state(table: ExperienceTable, filled: Iterable[Row]) -> dict[str, Any]:
    rows = [table.rows[row_id] for row_id in sorted(table.rows)]
    return {
        "ids": [row.id for row in rows],
        "min_versions": [row.min_version for row in rows],
        "attempts": [[row.id, row.attempts] for row in rows if row.attempts],
        "filled": [_filled(row) for row in filled],
        "sampled": [],
        "columns_lost": 0,
        "next_row": table.next_row,
        "lives": table.lives,
        "ledger": table.ledger.as_dict(),
        "versions": table.versions.as_dict(),
        "steps": table.steps.as_dict(),
        "rewound": table.rewound,
        "rewound_before": table.rewound_before,
        "failures": dict(table.failures.counts),
        "data_failures_in_a_row": table.failures.data_in_a_row,
    }


def _filled(row: Row) -> dict[str, Any]:
    produced = {stage: dict(zip(PRODUCED, _of_produced(made), strict=True)) for stage, made in row.produced.items()}
    return {"id": row.id, "prompt": row.prompt.id, "produced": produced, "makers": dict(row.makers)}


def restore(
    table: ExperienceTable, state: Mapping[str, Any], prompts: PromptSource, columns: Sequence[Any] | None
) -> None:
    """Into a table without rows; makers may be attached before or after. `prompts` is moved to where it goes on.

    `columns` are those of `places(state)`; None: there are none. Raises ValueError if the table has had rows, if the
    number of columns is another, or if the prompts end before the rows do.
    """
    admitted = table.ledger.rows.admitted
    if admitted:
        raise ValueError(f"a snapshot can be restored into a fresh table only; this one has {admitted} rows behind it")
    if columns is not None and len(columns) != len(places(state)):
        raise ValueError(f"{len(columns)} columns were given for a state of {len(places(state))}")
    table.ledger = Ledger.from_dict(state["ledger"])
    table.versions.load(state["versions"])
    table.steps.load(state["steps"])
    table.rewound, table.rewound_before = state["rewound"], state["rewound_before"]
    table.failures.counts = Counter(state["failures"]) + Counter(infra=state["columns_lost"])
    sampled = set(state["sampled"])
    for row in _rows(state, prompts, columns, sampled, table.clock()):
        table.put_back(row, row.id in sampled)
    table.failures.data_in_a_row = state[
        "data_failures_in_a_row"
    ]  # after the complete rows, each of which ends the count
    table.next_row = state["next_row"]
    table.lives = state["lives"] + 1
    # A maker may still work on leases of the life before: no lease has the name of one of those.
    table.lease_ids = itertools.count(1 + (table.lives << 32))
    kept = sum(row.tokens for row in table.rows.values())
    table.ledger.tokens.drop(table.ledger.tokens.in_flight - kept, "lost")
    table.check()


def _rows(
    state: Mapping[str, Any], prompts: PromptSource, columns: Sequence[Any] | None, sampled: set[int], now: float
) -> Iterator[Row]:
    """The live rows, in the order of their ids. Leaves the source where the next row comes from."""
    filled = {row["id"]: row for row in state["filled"]}
    attempts = dict(state["attempts"])
    given = dict(zip(places(state), columns or (), strict=columns is not None))
    ids, end = state["ids"], state["next_row"]
    min_versions = dict(zip(ids, state["min_versions"], strict=True))
    first = ids[0] if ids else end
    prompts.seek(first)
    for row_id in range(first, end):
        prompt = prompts.next()
        if prompt is None:
            raise ValueError(f"the prompts end at {row_id}, but {end} were taken before: was the data shortened since?")
        if row_id not in min_versions:
            continue
        row = Row(row_id, prompt, min_versions[row_id], now, attempts=dict(attempts.get(row_id, {})))
        if row_id in filled and (columns is not None or row_id in sampled):
            _fill(row, filled[row_id], given)
        yield row


def _fill(row: Row, state: Mapping[str, Any], given: Mapping[tuple[int, str], Any]) -> None:
    if state["prompt"] != row.prompt.id:
        log.warning("%s was prompt %r before: the data is another, and the row is made again", row, state["prompt"])
        return
    row.produced = {stage: Produced(**produced) for stage, produced in state["produced"].items()}
    row.makers = dict(state["makers"])
    row.columns = {stage: given[row.id, stage] for stage in row.produced if (row.id, stage) in given}
