"""A job through the command line: real Ray, real vLLM, no trainer."""

from __future__ import annotations

import json
import os
import signal
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from tests.command_line import Command, assert_nothing_left, function, lines, tandem, wait_for
from topology.config import ConfigError
from topology.launch import resume
from topology.runs import RunFolder

pytestmark = pytest.mark.timeout(300)
CONFIG = Path(__file__).resolve().parents[2] / "configs/sample-best-of-n.yaml"
ROWS, PER_PART, SAMPLES, KEPT = 64, 4, 8, 2
SLOW = """
import time

def slow(completions, **columns):
    time.sleep(0.15)
    return [float(len(text) % 4 == 0) for text in completions]
"""  # six rows a second at most, so that the job still goes on when it is stopped
SETTINGS = {
    "model.path": "tiny-llama",
    "prompts.size": ROWS,
    "collect.rows_per_part": PER_PART,
    "collect.report": "{pass_at: [1, 4, 8], threshold: 1.0}",
    "makers.rollout.sampling.max_tokens": 8,
}


def test_a_job_goes_on_after_the_death_of_its_collector_and_after_a_stop_without_a_gap_or_a_duplicate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "runs/sample-best-of-n")

    def parts() -> int:
        return len(list(folder.collected.glob("*.parquet")))

    def restarted() -> bool:
        return any(event["event"] == "restart" for event in lines(folder.path / "events.jsonl"))

    (tmp_path / "my_rewards.py").write_text(SLOW)
    settings = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
    with Command(tmp_path, "run", str(CONFIG), *settings, "--set", function("my_rewards:slow")) as job:
        wait_for(lambda: parts() >= 2, 120, "the second part")
        (collector,) = [actor for actor in folder.status()["actors"] if actor["name"] == "collector"]
        os.kill(collector["pid"], signal.SIGKILL)
        wait_for(restarted, 60, "the collector's restart")
        job.send_signal(signal.SIGINT)
        job.wait(timeout=60)
    assert folder.status()["state"] == "stopped"
    assert parts() < ROWS // PER_PART
    resumed = tandem(tmp_path, "resume", str(folder.path))
    assert resumed.returncode == 0, resumed.stderr
    _check_files(folder.collected)
    _check_report(folder)
    assert f"samples kept {KEPT * ROWS} of {SAMPLES * ROWS}" in " ".join(resumed.stdout.split())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="its prompts are used up"):
        resume(folder.path)
    assert_nothing_left(folder.path)


def _check_files(collected: Path) -> None:
    records = _records(collected)
    assert [one["row_id"] for one in records] == [row for row in range(ROWS) for _ in range(KEPT)]
    assert len({(one["row_id"], one["sample"]) for one in records}) == KEPT * ROWS
    written = [line for file in sorted(collected.glob("*.jsonl")) for line in lines(file)]
    assert sorted(written, key=_place) == records


def _check_report(folder: RunFolder) -> None:
    status = folder.status()
    assert status["state"] == "done"
    report = json.loads((folder.collected / "report.json").read_text())
    assert report == status["collected"]
    assert (report["rows"], report["samples"], report["kept"]) == (ROWS, SAMPLES * ROWS, KEPT * ROWS)
    assert 0 < report["pass@1"] <= report["pass@4"] <= report["pass@8"] <= 1
    assert report["pass@1"] == pytest.approx(report["score"])
    best = [max(one["score"] for one in group) for _, group in groupby(_records(folder.collected), _row)]
    assert report["pass@8"] == pytest.approx(sum(best) / ROWS)  # the best sample of a row is always kept


def _records(collected: Path) -> list[dict[str, Any]]:
    files = sorted(collected.glob("*.parquet"))
    return sorted((one for file in files for one in parquet.read_table(file).to_pylist()), key=_place)


def _place(record: dict[str, Any]) -> tuple[int, int]:
    return record["row_id"], record["sample"]


def _row(record: dict[str, Any]) -> int:
    return record["row_id"]
