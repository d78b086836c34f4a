"""What a run folder says about the run's past: its metrics, its events, and the figures that sum it up.

Guarantees: reads only files of the folder, of a run that goes on as well as of one that ended; a half-written last line
is left out; when a step was recorded twice (resume), the later record counts. Free of ray and torch.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENDS = 5  # steps at the start and at the end that the objective is averaged over
# What a run is judged by, by metric: the first of these that it has.
OBJECTIVES = {"reward/mean": "reward", "distill/kl": "distillation KL", "loss": "loss"}
TIME_SPLIT = ("wait_for_batch", "train", "publish", "hand_over", "checkpoint")  # what a trainer does, without overlap


def objective_of(steps: Sequence[Mapping[str, Any]]) -> str:
    """The key of OBJECTIVES by which a run with these metrics is judged."""
    have = (key for key in OBJECTIVES if any(isinstance(row.get(key), int | float) for row in steps))
    return next(have, next(iter(OBJECTIVES)))


@dataclass(frozen=True)
class Held:
    """One evaluation on held-out prompts: the score of samples, or the ranks' loss of held-out rows."""

    step: int
    score: float
    error: float  # standard error of the score
    kind: str = "score"  # or loss


@dataclass(frozen=True)
class History:
    """Everything recorded of one run. `steps` in the order of the steps."""

    name: str
    state: str
    cause: str | None
    config: str
    steps: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]

    def series(self, key: str) -> list[tuple[float, float]]:
        """(step, value) wherever the value is a number."""
        return [(row["step"], row[key]) for row in self.steps if isinstance(row.get(key), int | float)]

    @property
    def is_job(self) -> bool:
        """Nobody trained: a line of metrics is of a part, and counts what was collected."""
        return any("collected/rows" in row for row in self.steps)

    @property
    def objective(self) -> str:
        """The metric by which the run is judged."""
        return objective_of(self.steps)

    @property
    def held_out(self) -> list[Held]:
        scores = {}
        for event in self.events:
            if event["event"] == "evaluation" and event.get("score") is not None:
                scores[event["step"]] = Held(event["step"], event["score"], event.get("stderr") or 0.0)
            elif event["event"] == "validation":
                scores[event["step"]] = Held(event["step"], event["loss"], 0.0, "loss")
        return [scores[step] for step in sorted(scores)]

    def time_split(self) -> list[tuple[str, list[float]]]:
        """Seconds of each step by what the trainer ever did; `other` is evaluation and bookkeeping."""
        every = [(name, [float(row.get(f"time/{name}") or 0.0) for row in self.steps]) for name in TIME_SPLIT]
        named = [(name, values) for name, values in every if any(values)]
        whole = [float(row.get("time/step") or 0.0) for row in self.steps]
        known = [sum(values[index] for _, values in named) for index in range(len(whole))]
        return [*named, ("other", [max(0.0, w - k) for w, k in zip(whole, known, strict=True)])]


@dataclass(frozen=True)
class Summary:
    """The figures a reader asks for first. None where nothing was recorded."""

    steps: int
    seconds: float
    objective: str  # its name
    objective_first: float | None
    objective_last: float | None
    held_before: Held | None
    held_after: Held | None
    max_staleness: float | None
    generated_per_s: float | None
    trained_per_s: float | None
    time_shares: Mapping[str, float]
    bound_by: str | None
    knob: str | None
    skipped: int
    failures: Mapping[str, float]


def read_history(folder: Path) -> History:
    """Read a run folder. Raises FileNotFoundError when it has no `metrics.jsonl`."""
    folder = Path(folder)
    if not (folder / "metrics.jsonl").is_file():
        raise FileNotFoundError(f"{folder} has no metrics.jsonl: it is not the folder of a run, or no step was made")
    by_step = {row["step"]: row for row in _objects(folder / "metrics.jsonl")}
    status = json.loads(_text(folder / "status.json") or "{}")
    return History(
        name=status.get("name") or folder.resolve().name,
        state=status.get("state") or "unknown",
        cause=status.get("cause"),
        config=_text(folder / "config.yaml"),
        steps=[by_step[step] for step in sorted(by_step)],
        events=_objects(folder / "events.jsonl"),
    )


def summarise(history: History) -> Summary:
    steps, held = history.steps, history.held_out
    objective = [value for _, value in history.series(history.objective)]
    split = {name: sum(values) for name, values in history.time_split()}
    seconds = sum(split.values())
    bounds = Counter(row["bound_by"] for row in steps if row.get("bound_by"))
    bound = bounds.most_common(1)[0][0] if bounds else None
    knobs = [row.get("knob") for row in steps if bound is not None and row.get("bound_by") == bound]
    return Summary(
        steps=len(steps),
        seconds=seconds,
        objective=OBJECTIVES[history.objective],
        objective_first=_mean(objective[:ENDS]),
        objective_last=_mean(objective[-ENDS:]),
        held_before=held[0] if held else None,
        held_after=held[-1] if len(held) > 1 else None,
        max_staleness=max((value for _, value in history.series("staleness/max")), default=None),
        generated_per_s=_rate(history, "tokens_per_s/generated"),
        trained_per_s=_rate(history, "tokens_per_s/trained"),
        time_shares={name: value / seconds if seconds else 0.0 for name, value in split.items()},
        bound_by=bound,
        knob=knobs[-1] if knobs else None,
        skipped=sum(event["event"] == "step_skipped" for event in history.events),
        failures={kind: _last(history, f"failures/{kind}") for kind in ("infra", "data", "timeout")},
    )


def _rate(history: History, key: str) -> float | None:
    """Mean of a rate over time: each step counts by its length."""
    timed = [(row[key], row.get("time/step") or 0.0) for row in history.steps if isinstance(row.get(key), int | float)]
    seconds = sum(length for _, length in timed)
    return sum(rate * length for rate, length in timed) / seconds if seconds else _mean([rate for rate, _ in timed])


def _last(history: History, key: str) -> float:
    """Of a counter: its newest value, 0 where it was never recorded."""
    return history.series(key)[-1][1] if history.series(key) else 0


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _text(file: Path) -> str:
    return file.read_text() if file.is_file() else ""


def _objects(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in _text(file).splitlines() if line.endswith("}")]
