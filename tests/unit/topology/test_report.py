from __future__ import annotations

import io
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from topology.charts import Series, line_chart, moving_average, nice_ticks, stacked_bars
from topology.history import read_history, summarise
from topology.report import build_report, summary


def step(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": number,
        "time": 1000.0 + number,
        "reward/mean": number / 10,
        "staleness/mean": 0.5,
        "staleness/max": number % 2,
        "time/wait_for_batch": 4.0,
        "time/train": 5.0,
        "time/publish": 0.5,
        "time/step": 10.0,
        "tokens_per_s/generated": 100.0,
        "tokens_per_s/trained": 40.0,
        "failures/data": number,
        "failures/infra": 0,
        "failures/timeout": 0,
        "bound_by": "maker",
        "knob": "add rollout replicas",
    } | changes


def run_folder(folder: Path, steps: list[dict[str, Any]], events: list[dict[str, Any]]) -> Path:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps) + '{"step": 99, "rew')
    (folder / "events.jsonl").write_text("".join(json.dumps({"time": 1000.0, **event}) + "\n" for event in events))
    (folder / "config.yaml").write_text("name: arithmetic\nnote: <b>&</b>\n")
    (folder / "status.json").write_text(json.dumps({"name": "arithmetic", "state": "done", "cause": None}))
    return folder


EVENTS: list[dict[str, Any]] = [
    {"event": "evaluation", "step": 0, "version": 0, "score": 0.16, "stderr": 0.03},
    {"event": "step_skipped", "step": 3, "reason": "nonfinite", "cause": "loss is nan"},
    {"event": "evaluation", "step": 10, "version": 10, "score": 0.71, "stderr": 0.04},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return run_folder(tmp_path, [step(number) for number in range(1, 11)], EVENTS)


def test_summary_has_the_figures_of_the_run(folder: Path) -> None:
    found = summarise(read_history(folder))
    assert found.steps == 10
    assert found.seconds == 100.0
    assert (found.objective, found.objective_first, found.objective_last) == (
        "reward",
        pytest.approx(0.3),
        pytest.approx(0.8),
    )
    assert found.held_before is not None
    assert found.held_after is not None
    assert (found.held_before.score, found.held_after.score) == (0.16, 0.71)
    assert found.max_staleness == 1
    assert (found.generated_per_s, found.trained_per_s) == (100.0, 40.0)
    assert found.time_shares == pytest.approx({"wait_for_batch": 0.4, "train": 0.5, "publish": 0.05, "other": 0.05})
    assert (found.bound_by, found.knob, found.skipped) == ("maker", "add rollout replicas", 1)
    assert found.failures == {"infra": 0, "data": 10, "timeout": 0}


def test_checkpoints_and_hand_overs_have_shares_of_their_own_where_there_were_any(tmp_path: Path) -> None:
    steps = [step(1, **{"time/checkpoint": 0.0}), step(2, **{"time/checkpoint": 0.2, "time/hand_over": 0.1})]
    shares = summarise(read_history(run_folder(tmp_path, steps, []))).time_shares
    assert (shares["checkpoint"], shares["hand_over"]) == (pytest.approx(0.01), pytest.approx(0.005))
    assert shares["other"] == pytest.approx(0.05 - 0.015)


def test_later_record_of_a_step_counts_and_rates_weigh_by_time(tmp_path: Path) -> None:
    fast = step(2, **{"reward/mean": 0.9, "time/step": 30.0, "tokens_per_s/generated": 200.0})
    run_folder(tmp_path, [step(1), step(2), fast], [])
    found = summarise(read_history(tmp_path))
    assert found.steps == 2
    assert found.objective_last == pytest.approx(0.5)
    assert found.generated_per_s == pytest.approx((10 * 100 + 30 * 200) / 40)


def test_terminal_summary_shows_before_and_after(folder: Path) -> None:
    console = Console(width=120, file=io.StringIO(), color_system=None)
    console.print(summary(folder))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for expected in (
        "arithmetic: done",
        "10  in 1 min 40 s",
        "0.300 → 0.800",
        "0.160 → 0.710  +0.550 (± 0.050)",
        "waiting for rows 40%, training 50%, publishing 5%, other 5%",
        "maker  add rollout replicas",
        "10 data, 1 steps skipped",
    ):
        assert expected in text


def test_report_is_one_file_without_outside_references_and_every_chart_is_valid(folder: Path) -> None:
    file = build_report(folder)
    assert file == folder / "report.html"
    page = file.read_text()
    assert not re.search(r"(src|href)=|@import|url\(", page)
    assert "name: arithmetic\nnote: &lt;b&gt;&amp;&lt;/b&gt;" in page
    assert "0.160 → 0.710" in page
    assert "prefers-color-scheme: dark" in page
    charts = [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    assert len(charts) == 8
    assert len(charts[2].findall("rect")) == 10 * 4  # the trainer's time: four layers a step
    assert [path.name for path in folder.iterdir() if path.name.startswith("report")] == ["report.html"]


@pytest.mark.parametrize(
    ("metrics", "told"), [({"distill/kl": 2.5, "loss": 3.0}, ("distillation KL", 2.5)), ({"loss": 3.0}, ("loss", 3.0))]
)
def test_a_run_without_rewards_is_judged_by_its_divergence_or_its_loss(
    tmp_path: Path, metrics: dict[str, float], told: tuple[str, float]
) -> None:
    run_folder(tmp_path, [step(1, **{"reward/mean": None, **metrics})], [])
    found = summarise(read_history(tmp_path))
    assert (found.objective, found.objective_last) == told


def test_the_loss_of_held_out_rows_is_told_where_no_samples_are_scored(tmp_path: Path) -> None:
    losses = [
        {"event": "validation", "step": at, "loss": loss, "rows": 4, "tokens": 9} for at, loss in ((0, 3.5), (4, 1.25))
    ]
    page = build_report(run_folder(tmp_path, [step(1, **{"reward/mean": None, "loss": 3.0})], losses)).read_text()
    for told in ("held-out loss", "3.500 → 1.250", "-2.250", "Held-out loss"):
        assert told in page


def test_report_of_a_failed_run_without_evaluations_says_why(tmp_path: Path) -> None:
    run_folder(tmp_path, [step(1)], [])
    (tmp_path / "status.json").write_text(json.dumps({"name": "x", "state": "failed", "cause": "buffer <died>"}))
    page = build_report(tmp_path).read_text()
    assert "buffer &lt;died&gt;" in page
    assert "nothing was recorded" in page
    assert "held-out score" not in page


def part(number: int, **changes: Any) -> dict[str, Any]:
    counts = {"rows": 4 * number, "samples": 32 * number, "kept": 8 * number, "tokens": 320 * number}
    figures = {f"collected/{key}": value for key, value in {**counts, "score": 0.25, "pass@8": 0.75}.items()}
    return {"step": number, "time/step": 2.0, "tokens_per_s/generated": 160.0, **figures} | changes


def test_summary_and_report_of_a_job_speak_of_what_was_collected_and_not_of_training(tmp_path: Path) -> None:
    run_folder(tmp_path, [part(number) for number in range(1, 31)], [])
    (tmp_path / "config.yaml").write_text("name: samples\n")
    console = Console(width=120, file=io.StringIO(), color_system=None)
    console.print(summary(tmp_path))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    page = build_report(tmp_path).read_text()
    for expected in ("120  in 30 parts, 1 min 0 s", "240  of 960", "0.250  of all", "pass@8", "0.750", "160", "10.0"):
        assert expected in text
    for word in ("step", "stale", "train", "publish", "entropy", "mismatch"):
        assert word not in text.lower()
        assert word not in page.lower()
    charts = [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    assert len(charts) == 4
    assert "part 30: kept 240" in page


def test_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no metrics.jsonl"):
        build_report(tmp_path)


def test_ticks_are_round_and_enclose_the_values() -> None:
    assert nice_ticks(0.0, 1.0) == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert nice_ticks(0.13, 0.87) == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert nice_ticks(-3.0, 420.0) == [-100.0, 0.0, 100.0, 200.0, 300.0, 400.0, 500.0]


def test_line_runs_from_the_lower_left_to_the_upper_right_and_skips_what_is_not_finite() -> None:
    svg = line_chart([Series("a", [(0, 0.0), (1, float("nan")), (2, 1.0)])], label="a")
    assert 'points="52.0,216.0 626.0,12.0"' in svg


def test_constant_line_and_single_point_are_drawn() -> None:
    assert "polyline" in line_chart([Series("a", [(1, 0.0), (2, 0.0)])], label="a")
    assert "circle" in line_chart([Series("a", [(1, 5.0)])], label="a")


def test_many_bars_are_averaged_in_groups() -> None:
    svg = stacked_bars(list(range(1, 161)), [("a", 0, [1.0, 3.0] * 80)], label="a", unit="s")
    assert svg.count("<rect") == 80
    assert "step 1-2: a 2 s" in svg


def test_moving_average_looks_back() -> None:
    assert moving_average([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]
