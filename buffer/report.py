"""What the table says about itself: numbers for the status, sentences for an error. Costs O(rows): not for every event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from buffer.rows import Row
from buffer.table import ExperienceTable

ROWS_NAMED = 4


def table_status(table: ExperienceTable) -> dict[str, Any]:
    """One plain object: rows by stage, bytes, ledger, ages in versions, failures by kind."""
    newest = table.versions.newest
    ages = [row.age(newest) for row in table.live.unsampled.values() if row.complete]
    return {
        "published": table.versions.published,
        "step": table.versions.step,
        "rows": {
            **{f"{stage}/waiting": len(queue) for stage, queue in table.work.waiting.items()},
            **{f"{stage}/leased": sum(stage in row.leases for row in table.rows.values()) for stage in table.stages},
            "complete": table.live.complete,
            "sampled": len(table.live.sampled),
            "unpublished": table.steps.unpublished,
        },
        "capacity": table.capacity,
        "bytes": table.live.nbytes,
        "max_bytes": table.config.max_bytes,
        "admission_stalled_by": table.stalled_by(),
        "ledger": table.ledger.as_dict(),
        "age": {"mean": sum(ages) / len(ages) if ages else 0.0, "max": max(ages, default=0), "bound": table.max_age},
        "failures": {kind: table.failures.counts[kind] for kind in ("infra", "data", "timeout", "died")},
    }


def who_waits(table: ExperienceTable, clock: Callable[[], float]) -> str:
    """Which rows are not complete and what each waits for, oldest first; then why no row is admitted."""
    unfinished = [row for row in table.live.unsampled.values() if not row.complete]
    parts = [f"{row} waits for {_wait_of(table, row, clock())}" for row in unfinished[:ROWS_NAMED]]
    if len(unfinished) > ROWS_NAMED:
        parts.append(f"{len(unfinished) - ROWS_NAMED} more rows are unfinished")
    stalled_by = table.stalled_by()
    if stalled_by is not None:
        parts.append(
            f"no row is admitted because of: {stalled_by} ({table.charged} of {table.capacity} rows in flight, "
            f"{table.steps.unpublished} of them trained for a version that is not published; {table.live.nbytes} of "
            f"{table.config.max_bytes} bytes; published version {table.versions.published})"
        )
    return "; ".join(parts) or "no row is unfinished"


def _wait_of(table: ExperienceTable, row: Row, now: float) -> str:
    waits = []
    for stage in table.stages:
        attempts = f" after {row.attempts[stage]} failed" if stage in row.attempts else ""
        if stage in row.leases:
            held = table.work.leases[row.leases[stage]]
            waits.append(f"{stage}{attempts} (on {held.lease.maker} for {now - held.since:.1f} s)")
        elif row.id in table.work.waiting[stage]:
            makers = len(table.roster.takers_by_name(stage, row.prompt))
            there = f"a free slot on one of {makers} makers" if makers else "no maker that takes it is there"
            waits.append(f"{stage}{attempts} ({there})")
        elif stage not in table.roster.needs:
            waits.append(f"{stage} (no maker was ever attached)")
    return ", ".join(waits)
