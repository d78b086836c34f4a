"""The checks of the chaos suite find what they are for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.checks import broken
from tests.chaos.observer import RowsFile
from tests.command_line import TINY
from topology.config import dump_config, load_config

GROUPS = 4  # rows of a step of the tiny config


@pytest.fixture
def good(tmp_path: Path) -> dict[str, Any]:
    """A run of four steps whose training was made anew at step 2 after it had done three; its metrics, events, rows, status."""
    steps, versions = [1, 2, 3, 3, 4], [1, 2, 3, 5, 6]
    account = {"admitted": 24, "trained": 16, "dropped": {"rewound": 4}, "in_flight": 4}
    return {
        "folder": tmp_path,
        "metrics": [
            {"step": step, "version/trainer": version, "staleness/max": 1}
            for step, version in zip(steps, versions, strict=True)
        ],
        "events": [{"event": "restart", "actor": "training", "step": 2}],
        "rows": [RowsFile(0.0, step, frozenset(range(i * GROUPS, (i + 1) * GROUPS))) for i, step in enumerate(steps)],
        "status": {"state": "done", "step": 4, "cause": None, "ledger": {**account, "tokens": dict(account)}},
    }


def said(run: dict[str, Any]) -> list[str]:
    folder = run["folder"]
    (folder / "config.yaml").write_text(dump_config(load_config(TINY)))
    for name in ("metrics", "events"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in run[name]))
    return broken(folder, run["rows"], run["status"])


def test_a_run_that_is_as_it_should_be_breaks_nothing(good: dict[str, Any]) -> None:
    assert said(good) == []


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (lambda run: run["status"].update(state="failed"), "it ended failed at step 4 of 4: None"),
        (lambda run: run["status"].update(step=3), "it ended done at step 3 of 4: None"),
        (lambda run: run["status"]["ledger"].update(in_flight=5), "the ledger does not close in rows: "),
        (lambda run: run["status"]["ledger"]["tokens"].update(trained=15), "the ledger does not close in tokens: "),
        (lambda run: run["status"]["ledger"].update(trained=20, in_flight=0), "20 rows count as trained, not 16"),
        (lambda run: run["rows"].append(RowsFile(0.0, 4, frozenset({8}))), "row 8 was trained in step 3 and in step 4"),
        (lambda run: run["events"].clear(), "step 3 came after step 3"),
        (lambda run: (run["events"].clear(), run["metrics"].pop(1)), "step 3 came after step 1"),
        (
            lambda run: run["metrics"][0].update({"staleness/max": 2}),
            "a row of age 2 was trained in step 1, the bound is 1",
        ),
        (lambda run: run["metrics"][3].update({"version/trainer": 3}), "version 3 came after version 3"),
    ],
)
def test_each_harm_is_named(good: dict[str, Any], harm: Callable[[dict[str, Any]], object], sentence: str) -> None:
    harm(good)
    assert any(found.startswith(sentence) for found in said(good)), said(good)
