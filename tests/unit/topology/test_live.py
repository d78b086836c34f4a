from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from topology.live import LiveView, render, seconds_left, sparkline

STATUS: dict[str, Any] = {
    "name": "arithmetic",
    "state": "running",
    "cause": None,
    "step": 3,
    "steps": 10,
    "phase": "train",
    "versions": {"trainer": 3, "maker_min": 2, "maker_max": 3},
    "actors": [{"name": "buffer", "state": "ready"}, {"name": "maker/rollout/0", "state": "dead"}],
    "buffer": {"rows": {"rollout/leased": 5, "reward/leased": 0, "complete": 2}, "bytes": 2048},
    "ledger": {"admitted": 20, "trained": 12, "dropped": {"data": 1}, "in_flight": 7},
    "bound_by": "maker",
    "knob": "add replicas",
    "held_out": {"step": 0, "score": 0.16},
    "folder": "runs/arithmetic",
}


def metrics(*rewards: float) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "reward/mean": reward,
            "staleness/mean": 0.5,
            "staleness/max": 1,
            "staleness/dropped": 0,
            "time/step": 6.0,
            "tokens_per_s/generated": 410.2,
            "tokens_per_s/trained": 120.0,
            "idle/trainer": 0.25,
            "idle/maker": None,
            "bound_by": "maker",
        }
        for step, reward in enumerate(rewards, start=1)
    ]


def shown(status: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    console = Console(width=80, file=io.StringIO(), color_system=None)
    console.print(render(status, rows))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return [line.strip("│ \u00a0").rstrip() for line in text.splitlines()]


def test_live_view_shows_every_figure_of_a_running_run() -> None:
    lines = shown(STATUS, metrics(0.2, 0.3, 0.6))
    assert lines[0].startswith("╭─ arithmetic  running ─")
    assert lines[1].startswith("step       3/10  ━━━━")
    assert lines[1].endswith("42 s left")
    assert lines[2:-1] == [
        "trainer    training",
        "reward     0.600  ▁▃█  held-out 0.160 at step 0",
        "staleness  mean 0.50, max 1",
        "versions   trainer 3, makers 2 to 3",
        "buffer     rollout/leased 5, complete 2 (2 KiB)",
        "rows       20 admitted, 12 trained, 1 dropped (data)",
        "rates      410 tokens/s generated, 120 trained; idle: trainer 25%, makers –",
        "bound by   maker  add replicas",
        "actors     ●\u00a0buffer  ●\u00a0maker/rollout/0\u00a0(dead)",
    ]


def test_live_view_before_the_first_step_and_after_a_failure() -> None:
    starting = STATUS | {
        "state": "failed",
        "cause": "maker/rollout/0: its process died",
        "step": 0,
        "phase": None,
        "versions": {"trainer": None, "maker_min": None, "maker_max": None},
        "buffer": {"rows": {}, "bytes": 0},
        "ledger": {},
        "bound_by": None,
        "held_out": None,
    }
    lines = shown(starting, [])
    assert [" ".join(line.split()) for line in lines[2:4]] == ["versions trainer –, makers –", "buffer empty (0 B)"]
    assert lines[-1] == "maker/rollout/0: its process died"


def test_run_whose_supervisor_has_not_spoken_yet_can_be_shown() -> None:
    lines = shown({"name": "x", "state": "starting", "cause": None, "step": 0, "folder": "runs/x"}, [])
    assert lines[0].startswith("╭─ x  starting ─")


def test_time_left_is_estimated_from_the_last_steps() -> None:
    assert seconds_left(STATUS, metrics(0.1, 0.1)) == 42.0
    assert seconds_left(STATUS, []) is None


def test_sparkline_spans_from_the_lowest_to_the_highest_value() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([2.0, 2.0]) == "▅▅"
    assert sparkline([]) == ""


def test_pipe_gets_one_plain_line_for_each_step_and_each_change_of_state() -> None:
    out = io.StringIO()
    with LiveView(Console(width=200, file=out)) as view:
        rows = metrics(0.2, 0.3, 0.6)
        view.update(STATUS | {"state": "starting", "step": 0}, [])
        view.update(STATUS, rows[:2])
        view.update(STATUS, rows)
        view.update(STATUS, rows)
        view.update(STATUS | {"state": "failed", "cause": "trainer: out of memory"}, rows)
    assert out.getvalue().splitlines() == [
        "arithmetic: starting",
        "arithmetic: running",
        "step 1/10, reward 0.200, staleness 1, 410 tok/s, bound by maker, 54 s left",
        "step 2/10, reward 0.300, staleness 1, 410 tok/s, bound by maker, 48 s left",
        "step 3/10, reward 0.600, staleness 1, 410 tok/s, bound by maker, 42 s left",
        "arithmetic: failed: trainer: out of memory",
    ]


def test_terminal_gets_the_full_view() -> None:
    out = io.StringIO()
    with LiveView(Console(width=80, file=out, force_terminal=True)) as view:
        view.update(STATUS, metrics(0.2))
    assert "rollout/leased 5" in out.getvalue()
