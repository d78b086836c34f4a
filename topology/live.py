"""The live view of a run: what `tandem run` and `tandem status --watch` show.

Guarantees: `render` is a pure function of the status object (`tandem status --json`) and the last metrics objects;
where the output is not a terminal, `LiveView` prints one plain line a step and one for each change of state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from topology.history import OBJECTIVES, objective_of
from topology.runs import ENDED

BLOCKS = "▁▂▃▄▅▆▇█"
SPARK = 40  # steps of the curve
RECENT = 10  # steps that the time left is estimated from
STYLES = {"running": "green", "done": "green", "failed": "red", "draining": "yellow", "stopped": "yellow"}

PHASES = {
    "wait_for_batch": "waiting for rows",
    "train": "training",
    "publish": "publishing weights",
    "hand_over": "handing the devices over",
    "evaluate": "evaluating on held-out prompts",
    "checkpoint": "writing a checkpoint",
    "write": "writing a part",
}

Status = Mapping[str, Any]
Metrics = Sequence[Mapping[str, Any]]


def sparkline(values: Sequence[float]) -> str:
    """One block a value, from the lowest to the highest of them."""
    if not values:
        return ""
    low, high = min(values), max(values)
    if high == low:
        return BLOCKS[len(BLOCKS) // 2] * len(values)
    return "".join(BLOCKS[int((value - low) / (high - low) * (len(BLOCKS) - 1) + 0.5)] for value in values)


def seconds_left(status: Status, metrics: Metrics) -> float | None:
    """From the mean length of the last steps; None before the first, and after the end."""
    if status["state"] in ENDED:
        return None
    if status["steps"] is None:  # a job: it ends with its prompts
        return None
    recent = [row["time/step"] for row in metrics[-RECENT:] if row.get("time/step") is not None]
    return sum(recent) / len(recent) * (status["steps"] - status["step"]) if recent else None


def render(status: Status, metrics: Metrics) -> RenderableType:
    """The whole view."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(ratio=1)
    for name, value in _lines(status, metrics):
        table.add_row(name, value)
    state = status["state"]
    title = Text.assemble((status["name"], "bold"), "  ", (state, STYLES.get(state, "cyan")))
    panel = Panel(table, title=title, title_align="left", border_style=STYLES.get(state, "cyan"), padding=(0, 1))
    if status.get("cause"):
        return Group(panel, Text(str(status["cause"]), style=STYLES.get(state, "")))
    return panel


def plain_line(status: Status, metrics: Metrics) -> str:
    """One line for logs and pipes."""
    if not metrics:
        return f"{status['name']}: {status['state']}" + (f": {status['cause']}" if status.get("cause") else "")
    row, objective = metrics[-1], objective_of(metrics)
    parts = [_count(row["step"], status["steps"]), f"{OBJECTIVES[objective]} {_number(row.get(objective), '.3f')}"]
    parts += [f"staleness {_number(row['staleness/max'], 'g')}"] if "staleness/max" in row else []
    if (generated := row.get("tokens_per_s/generated")) is not None:
        parts.append(f"{generated:.0f} tok/s")
    parts += [f"bound by {row['bound_by']}"] if row.get("bound_by") else []
    left = seconds_left(status, metrics)
    return ", ".join(parts) + (f", {_duration(left)} left" if left else "")


class LiveView:
    """Shows a run while it goes on. Use as a context manager, and call `update` with every new status."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self._live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None
        self._shown: tuple[Any, Any] = (None, 0)

    def __enter__(self) -> LiveView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, status: Status, metrics: Metrics) -> None:
        """`metrics`: the last metrics objects, oldest first; about 40 fill the curve."""
        if self._live is not None:
            self._live.update(render(status, metrics), refresh=True)
            return
        state, step = self._shown
        if status["state"] != state:
            self.console.print(plain_line(status, ()), highlight=False, markup=False, soft_wrap=True)
        for count, row in enumerate(metrics, start=1):
            if row["step"] > step:
                line = plain_line({**status, "step": row["step"]}, metrics[:count])
                self.console.print(line, highlight=False, markup=False, soft_wrap=True)
        self._shown = (status["state"], max([step, *(row["step"] for row in metrics)]))


def _lines(status: Status, metrics: Metrics) -> list[tuple[str, RenderableType]]:
    """(name, content) of every line that there is something to say in; a run that is just starting has few."""
    row: Mapping[str, Any] = metrics[-1] if metrics else {}
    is_job = bool(status.get("collected"))
    lines: list[tuple[str, RenderableType]] = []
    if "steps" in status:
        lines.append(("part" if is_job else "step", _progress(status, metrics)))
    if is_job:
        lines.append(("collected", _collected(status["collected"])))
    if status.get("phase") and status["state"] not in ENDED:
        lines.append(("collector" if is_job else "trainer", PHASES.get(status["phase"], str(status["phase"]))))
    if row:
        objective = objective_of(metrics)
        lines.append((OBJECTIVES[objective], _objective(objective, metrics, status.get("held_out"))))
    if "staleness/max" in row:
        lines.append(("staleness", _staleness(row)))
    if "versions" in status and not is_job:
        lines.append(("versions", _versions(status["versions"])))
    if "buffer" in status:
        lines.append(("buffer", _buffer(status["buffer"])))
    if status.get("ledger"):
        lines.append(("rows", _ledger(status["ledger"])))
    if row:
        lines.append(("rates", _rates(row)))
    if status.get("bound_by"):
        knob = f"  {status['knob']}" if status.get("knob") else ""
        lines.append(("bound by", Text.assemble((str(status["bound_by"]), "bold"), knob)))
    if status.get("actors"):
        lines.append(("actors", _actors(status["actors"])))
    return lines


def _count(step: int, steps: int | None) -> str:
    return f"part {step}" if steps is None else f"step {step}/{steps}"


def _collected(figures: Mapping[str, Any]) -> str:
    """What the files of a job hold."""
    counts = f"{figures['rows']:,} rows, {figures['kept']:,} of {figures['samples']:,} samples kept"
    rates = [f"{key} {value:.3f}" for key, value in figures.items() if key.startswith("pass@")]
    return ", ".join([counts, *rates])


def _progress(status: Status, metrics: Metrics) -> RenderableType:
    if status["steps"] is None:
        return Text(f"{status['step']}", style="bold")
    left = seconds_left(status, metrics)
    grid = Table.grid(padding=(0, 2))
    count = Text(f"{status['step']}/{status['steps']}", style="bold")
    time_left = Text(f"{_duration(left)} left" if left else "", style="dim")
    grid.add_row(
        count, ProgressBar(total=status["steps"], completed=status["step"], width=36, complete_style="cyan"), time_left
    )
    return grid


def _objective(key: str, metrics: Metrics, held_out: Mapping[str, Any] | None) -> Text:
    values = [row[key] for row in metrics if row.get(key) is not None][-SPARK:]
    text = Text.assemble((_number(values[-1] if values else None, ".3f"), "bold"), "  ", (sparkline(values), "cyan"))
    held = {**(held_out or {})}
    if (value := held.get("score", held.get("loss"))) is not None:
        text.append(f"  held-out {value:.3f} at step {held['step']}")
    return text


def _staleness(row: Mapping[str, Any]) -> str:
    text = f"mean {_number(row.get('staleness/mean'), '.2f')}, max {_number(row.get('staleness/max'), 'g')}"
    dropped = row.get("staleness/dropped")
    return text + (f", {dropped:g} dropped as stale" if dropped else "")


def _versions(versions: Mapping[str, Any]) -> str:
    low, high = versions.get("maker_min"), versions.get("maker_max")
    makers = _number(low, "g") if low == high else f"{_number(low, 'g')} to {_number(high, 'g')}"
    return f"trainer {_number(versions.get('trainer'), 'g')}, makers {makers}"


def _buffer(buffer: Mapping[str, Any]) -> str:
    stages = ", ".join(f"{stage} {count}" for stage, count in (buffer.get("rows") or {}).items() if count)
    return f"{stages or 'empty'} ({_size(buffer.get('bytes') or 0)})"


def _ledger(ledger: Mapping[str, Any]) -> str:
    dropped = ", ".join(f"{count} dropped ({reason})" for reason, count in (ledger.get("dropped") or {}).items())
    text = f"{ledger.get('admitted', 0)} admitted, {ledger.get('trained', 0)} trained"
    return f"{text}, {dropped}" if dropped else text


def _rates(row: Mapping[str, Any]) -> str:
    generated, trained = row.get("tokens_per_s/generated"), row.get("tokens_per_s/trained")
    if "collected/rows" in row:
        return f"{_number(generated, '.0f')} tokens/s generated"
    parts = [f"{_number(generated, '.0f')} tokens/s generated, {_number(trained, '.0f')} trained"]
    parts += [
        f"idle: trainer {_number(row.get('idle/trainer'), '.0%')}, makers {_number(row.get('idle/maker'), '.0%')}"
    ]
    return "; ".join(parts)


def _actors(actors: Sequence[Mapping[str, Any]]) -> Text:
    """Every actor with its state, the ones that are well in one word."""
    text = Text()
    for position, actor in enumerate(actors):
        well = actor["state"] in ("ready", "running", "alive", "ended")
        color = "red" if actor["state"] in ("dead", "failed") else "yellow" if not well else "green"
        text.append("  " if position else "")
        text.append("●\u00a0", style="dim" if actor["state"] == "ended" else color)
        text.append(str(actor["name"]) + ("" if well else f"\u00a0({actor['state']})"))
    return text


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
