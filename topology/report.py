"""The report of a run, from its folder only: `report.html` (one file, nothing loaded from elsewhere) and a terminal summary.

Works on a run that goes on, ended or failed. Free of ray and torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from topology.charts import Series, line_chart, moving_average, stacked_bars
from topology.history import OBJECTIVES, Held, History, Summary, read_history, summarise
from topology.job_report import job_cards, job_charts
from topology.report_page import PAGE, duration, figure, number

SMOOTH = 5  # steps of the moving average drawn over the objective
LABELS = {
    "wait_for_batch": "waiting for rows",
    "train": "training",
    "publish": "publishing",
    "hand_over": "handing devices over",
    "checkpoint": "checkpoints",
    "other": "other",
}
COLORS = {"wait_for_batch": 2, "train": 0, "publish": 4, "hand_over": 1, "checkpoint": 3, "other": 5}


def build_report(run_folder: Path) -> Path:
    """Write `report.html` into the run folder and return its path. Raises FileNotFoundError without metrics."""
    history = read_history(run_folder)
    figures = summarise(history)
    file = Path(run_folder) / "report.html"
    draft = file.with_suffix(".new")
    draft.write_text(
        PAGE.format(
            title=escape(history.name),
            state=escape(history.state),
            cause=f'<p class="cause">{escape(history.cause)}</p>' if history.cause else "",
            cards="".join(_card(*card) for card in _cards(history, figures)),
            bound=_bound(figures),
            charts="".join(_charts(history)),
            events=_events(history),
            config=escape(history.config) or "no config.yaml in the run folder",
        )
    )
    draft.replace(file)
    return file


def summary(run_folder: Path) -> RenderableType:
    """What the end of a run prints. Raises FileNotFoundError without metrics."""
    history = read_history(run_folder)
    figures = summarise(history)
    table = Table.grid(padding=(0, 3))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value, note in _cards(history, figures):
        table.add_row(name, Text.assemble((value, "bold"), f"  {note}" if note else ""))
    if not history.is_job:
        shares = ", ".join(f"{LABELS[name]} {share:.0%}" for name, share in figures.time_shares.items())
        table.add_row("trainer's time", shares)
    if figures.bound_by:
        table.add_row("bound by", Text.assemble((figures.bound_by, "bold"), f"  {figures.knob or ''}"))
    lost = [f"{count:g} {kind}" for kind, count in figures.failures.items() if count]
    lost += [f"{figures.skipped} steps skipped"] if figures.skipped else []
    if lost:
        table.add_row("failures", ", ".join(lost))
    style = {"done": "green", "failed": "red"}.get(history.state, "yellow")
    panel = Panel(table, title=f"{history.name}: {history.state}", title_align="left", border_style=style, expand=False)
    return Group(panel, Text(history.cause, style=style)) if history.cause else panel


def _cards(history: History, figures: Summary) -> list[tuple[str, str, str]]:
    """(name, value, note) of the figures at the top."""
    if history.is_job:
        return job_cards(history, figures)
    first, last = figures.objective_first, figures.objective_last
    cards = [
        ("steps", f"{figures.steps}", f"in {duration(figures.seconds)}"),
        (figures.objective, f"{number(first)} → {number(last)}", "mean of the first and the last 5 steps"),
    ]
    before, after = figures.held_before, figures.held_after
    if before is not None:
        value = f"{before.score:.3f} → {after.score:.3f}" if after else f"{before.score:.3f}"
        note = _gap(before, after) if after else f"at step {before.step}"
        cards.append((f"held-out {before.kind}", value, note))
    cards += [
        ("max staleness", number(figures.max_staleness, "g"), "published versions behind, at training"),
        ("tokens/s generated", number(figures.generated_per_s, ".0f"), "all makers together"),
        ("tokens/s trained", number(figures.trained_per_s, ".0f"), "response tokens of trained rows"),
    ]
    return cards


def _gap(before: Held, after: Held) -> str:
    error = (before.error**2 + after.error**2) ** 0.5
    return f"{after.score - before.score:+.3f}" + (f" (± {error:.3f})" if before.kind == "score" else "")


def _charts(history: History) -> Iterable[str]:
    if history.is_job:
        yield from job_charts(history)
        return
    objective, name = history.series(history.objective), OBJECTIVES[history.objective]
    smooth = moving_average([value for _, value in objective], SMOOTH)
    trend = [(step, value) for (step, _), value in zip(objective, smooth, strict=True)]
    yield figure(
        name[0].upper() + name[1:],
        "mean of a step, and its mean over 5 steps",
        line_chart([Series("", objective, 0, faint=True), Series("mean of 5", trend, 0)], label=name),
    )
    held = history.held_out
    points = [(item.step, item.score) for item in held]
    line = Series("held out", points, 1, dots=True, errors=[item.error for item in held])
    kind = held[0].kind if held else "score"
    note = (
        "nats a token of rows nobody trains on" if kind == "loss" else "prompts nobody trains on, ± one standard error"
    )
    yield figure(f"Held-out {kind}", note, line_chart([line], label=kind))
    layers = [(LABELS[name], COLORS[name], values) for name, values in history.time_split()]
    bars = stacked_bars([row["step"] for row in history.steps], layers, label="time of a step", unit="s")
    keys = [Series(name, (), color) for name, color, _ in layers]
    yield figure("Trainer's time", "seconds of each step", bars, keys)
    age = [
        Series("mean", history.series("staleness/mean"), 2),
        Series("max", history.series("staleness/max"), 3),
    ]
    yield figure("Staleness", "published versions a row was behind", line_chart(age, label="age", zero=True), age)
    rates = [
        Series("generated", history.series("tokens_per_s/generated"), 4),
        Series("trained", history.series("tokens_per_s/trained"), 0),
    ]
    yield figure("Tokens per second", "over each step", line_chart(rates, label="tokens/s", zero=True), rates)
    length = [
        Series("mean", history.series("response_length/mean"), 4),
        Series("max", history.series("response_length/max"), 3),
    ]
    yield figure("Response length", "tokens", line_chart(length, label="tokens", zero=True), length)
    gap = [Series("k3 KL", history.series("mismatch/kl"), 5)]
    yield figure("Trainer against maker", "KL at equal version", line_chart(gap, label="mismatch", zero=True))
    entropy = [Series("entropy", history.series("entropy"), 1)]
    yield figure("Entropy", "nats a token", line_chart(entropy, label="entropy"))


def _card(name: str, value: str, note: str) -> str:
    return f'<div class="card"><small>{escape(name)}</small><b>{escape(value)}</b><small>{escape(note)}</small></div>'


def _bound(figures: Summary) -> str:
    if not figures.bound_by:
        return ""
    knob = f" To change that: {escape(figures.knob)}." if figures.knob else ""
    return f'<p class="bound">Most steps were bound by the <b>{escape(figures.bound_by)}</b>.{knob}</p>'


def _events(history: History) -> str:
    rows = ""
    for event in history.events:
        when = datetime.fromtimestamp(event["time"]).strftime("%H:%M:%S") if "time" in event else ""
        rest = ", ".join(f"{key} {_plain(value)}" for key, value in event.items() if key not in ("time", "event"))
        rows += f"<tr><td>{when}</td><td>{escape(str(event['event']))}</td><td>{escape(rest)}</td></tr>"
    return rows or "<tr><td>no events</td></tr>"


def _plain(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
