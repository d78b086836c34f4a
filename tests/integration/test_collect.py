"""Jobs through the command line: real Ray, real vLLM, no trainer."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from tests.command_line import Command, assert_nothing_left, events, function, status, tandem, wait_for
from topology.runs import RunFolder

pytestmark = pytest.mark.timeout(300)
CONFIGS = Path(__file__).resolve().parents[2] / "configs"
ROWS = 160
SLOW = """
import time

def slow(completions, **columns):
    time.sleep(0.15)
    return [float(len(text)) for text in completions]
"""  # six rows a second at most, so that the job still goes on when it is stopped


def short(rows: int, per_part: int, tokens: int) -> list[str]:
    settings = {
        "model.path": "tiny-llama",
        "prompts.size": rows,
        "collect.rows_per_part": per_part,
        "makers.rollout.sampling.max_tokens": tokens,
    }
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def records(folder: Path) -> list[dict[str, Any]]:
    return [one for file in sorted(folder.glob("*.parquet")) for one in parquet.read_table(file).to_pylist()]


def test_a_job_goes_on_after_the_death_of_its_collector_and_after_a_stop_without_a_gap_or_a_duplicate(
    tmp_path: Path,
) -> None:
    name = "sample-best-of-n"
    folder = RunFolder(tmp_path / "runs" / name)

    def parts() -> int:
        return len(list(folder.collected.glob("*.parquet")))

    (tmp_path / "my_rewards.py").write_text(SLOW)
    settings = (*short(ROWS, 8, 16), "--set", function("my_rewards:slow"))
    with Command(tmp_path, "run", str(CONFIGS / f"{name}.yaml"), *settings):
        wait_for(lambda: parts() >= 2, 120, "the second part")
        (collector,) = [actor for actor in folder.status()["actors"] if actor["name"] == "collector"]
        os.kill(collector["pid"], signal.SIGKILL)
        wait_for(lambda: any(e["event"] == "restart" for e in events(tmp_path, name)), 60, "the collector's restart")
        stopped = tandem(tmp_path, "stop", name)
        assert stopped.returncode == 0, stopped.stderr
    assert status(tmp_path, name)["state"] == "stopped"
    assert parts() < ROWS // 8
    resumed = tandem(tmp_path, "resume", str(folder.path))
    assert resumed.returncode == 0, resumed.stderr
    found = status(tmp_path, name)
    assert (found["state"], found["collected"]["rows"], found["collected"]["kept"]) == ("done", ROWS, 2 * ROWS)
    collected = records(folder.collected)
    assert sorted(one["row_id"] for one in collected) == [row for row in range(ROWS) for _ in range(2)]
    assert len({(one["row_id"], one["sample"]) for one in collected}) == 2 * ROWS
    lines = [json.loads(line) for file in folder.collected.glob("*.jsonl") for line in file.read_text().splitlines()]
    assert len(lines) == 2 * ROWS
    refused = tandem(tmp_path, "resume", str(folder.path))
    assert refused.returncode == 2
    assert "its prompts are used up" in refused.stderr
    assert_nothing_left(folder.path)


def test_an_evaluation_ends_with_its_report(tmp_path: Path) -> None:
    done = tandem(tmp_path, "run", str(CONFIGS / "evaluate.yaml"), *short(20, 8, 8))
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "runs/evaluate/collected/report.json").read_text())
    assert (report["rows"], report["samples"]) == (20, 160)
    assert 0 <= report["pass@1"] <= report["pass@4"] <= report["pass@8"] <= 1
    assert report["pass@1"] == pytest.approx(report["score"])
    assert report == status(tmp_path, "evaluate")["collected"]


def test_rejection_keeps_what_reaches_the_threshold(tmp_path: Path) -> None:
    settings = (*short(20, 8, 8), "--set", "collect.select.threshold=0.0")
    done = tandem(tmp_path, "run", str(CONFIGS / "rejection-sampling.yaml"), *settings)
    assert done.returncode == 0, done.stderr
    collected = records(tmp_path / "runs/rejection-sampling/collected")
    assert [one["row_id"] for one in sorted(collected, key=lambda one: one["row_id"])] == [
        row for row in range(20) for _ in range(4)
    ]
