"""What must hold of a run after whatever was done to it. Each check gives a sentence for what does not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.chaos.observer import RowsFile
from tests.command_line import lines
from topology.config import load_config


def broken(run: Path, rows: Sequence[RowsFile], status: dict[str, Any]) -> list[str]:
    config = load_config(run / "config.yaml")
    steps, groups = config.trainers["policy"].steps, config.trainers["policy"].groups_per_step
    metrics, events = lines(run / "metrics.jsonl"), lines(run / "events.jsonl")
    return [
        *_end(status, steps),
        *_ledger(status["ledger"], steps * groups),
        *_trained_once(rows),
        *_steps(metrics, events),
        *_staleness(metrics, config.buffer.max_staleness),
        *_versions(metrics),
    ]


def _end(status: dict[str, Any], steps: int) -> Iterator[str]:
    if (status["state"], status["step"]) != ("done", steps):
        yield f"it ended {status['state']} at step {status['step']} of {steps}: {status['cause']}"


def _ledger(ledger: dict[str, Any], trained: int) -> Iterator[str]:
    for what, account in (("rows", ledger), ("tokens", ledger.get("tokens", {}))):
        if not account:
            yield f"there is no ledger of {what}"
        elif account["admitted"] != account["trained"] + sum(account["dropped"].values()) + account["in_flight"]:
            yield f"the ledger does not close in {what}: {account}"
    if ledger and ledger["trained"] != trained:
        yield f"{ledger['trained']} rows count as trained, not {trained}"


def _trained_once(rows: Sequence[RowsFile]) -> Iterator[str]:
    """Not even in a step that is done again: what a rewind leaves behind is dropped."""
    steps: dict[int, int] = {}
    for file in rows:
        for row in sorted(file.row_ids):
            if row in steps:
                yield f"row {row} was trained in step {steps[row]} and in step {file.step}"
            steps[row] = file.step


def _steps(metrics: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]]) -> Iterator[str]:
    """One after another, but for training that was made anew at the step of a checkpoint."""
    restarts = {event["step"] for event in events if event["event"] == "restart" and event["actor"] == "training"}
    before = 0
    for line in metrics:
        if line["step"] != before + 1 and line["step"] - 1 not in restarts:
            yield f"step {line['step']} came after step {before}"
        before = line["step"]


def _staleness(metrics: Sequence[dict[str, Any]], bound: int) -> Iterator[str]:
    for line in metrics:
        if line["staleness/max"] > bound:
            yield f"a row of age {line['staleness/max']} was trained in step {line['step']}, the bound is {bound}"


def _versions(metrics: Sequence[dict[str, Any]]) -> Iterator[str]:
    versions = [line["version/trainer"] for line in metrics]
    for before, after in pairwise(versions):
        if after <= before:
            yield f"version {after} came after version {before}"
