"""What a run that was played tells about how fast it recovers. A fault counts only if the next one came after the recovery."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise, zip_longest
from statistics import median
from typing import Any

from tests.chaos.observer import Observer, actor
from tests.chaos.play import Done, Played

ATTACH = "seconds from `attach` to the first committed row of the newcomer"
MAKER = "seconds from the kill of a maker until it is back and commits rows"
RANK = "seconds from the kill of a trainer rank to the next trained step"
DURING = "steps a second while a maker is attached, against before"
GAP = "longest time between two steps while a maker is attached, seconds"
REISSUED = "leases issued again after the kill of a maker"
STEPS_BEFORE = 10
UNITS = (ATTACH, MAKER, RANK, DURING, GAP, REISSUED)

Figures = Mapping[str, Sequence[float]]


def figures(played: Played) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    seen = played.observer
    if seen is None:
        return found
    for done, next_one in zip_longest(played.done, played.done[1:]):
        after = float("inf") if next_one is None else next_one.time
        kind = (done.fault.deed, done.fault.victim)
        if kind[0] == "attach":
            seconds = seen.first(done.time, lambda status, name=done.actor: _commits(status, name, None))
            if _note(found, ATTACH, seconds, done, after) and kind[1] == "maker/rollout":
                _during(found, seen, done, seconds or 0.0, played)
        elif kind in (("kill", "maker/rollout"), ("kill", "maker/reward")):
            seconds = seen.first(done.time, lambda status, name=done.actor, pid=done.pid: _commits(status, name, pid))
            if _note(found, MAKER, seconds, done, after):
                found[REISSUED].append(_again(seen.at(done.time + (seconds or 0.0))) - _again(seen.at(done.time)))
        elif kind == ("kill", "trainer/policy/rank"):
            steps = [line["time"] - done.time for line in played.metrics if line["time"] > done.time]
            back = [
                event["time"] - done.time for event in played.events if _is_restart(event) and event["time"] > done.time
            ]
            if back:
                _note(found, RANK, next((s for s in steps if s > back[0] - 1.0), None), done, after)
    return found


def summary(all_figures: Sequence[Figures]) -> list[dict[str, Any]]:
    """Median, least and most of each figure over all runs."""
    rows = []
    for name in UNITS:
        values = [value for figures in all_figures for value in figures.get(name, ())]
        if values:
            rows.append({"name": name, "median": round(median(values), 2), "min": min(values), "max": max(values)})
            rows[-1]["count"] = len(values)
    return rows


def _note(found: dict[str, list[float]], name: str, seconds: float | None, done: Done, after: float) -> bool:
    clean = seconds is not None and done.time + seconds < after
    if clean:
        found[name].append(round(seconds or 0.0, 2))
    return clean


def _during(found: dict[str, list[float]], seen: Observer, done: Done, seconds: float, played: Played) -> None:
    """Against the steps since the run was last not what it should be, if there were enough of them."""
    times = [line["time"] for line in played.metrics]
    unwell = (status["time"] for status in reversed(seen.statuses) if status["time"] < done.time and not _well(status))
    since = next(unwell, 0.0)
    calm = [time for time in times if since < time < done.time][-STEPS_BEFORE:]
    during = [time for time in times if done.time <= time <= done.time + seconds]
    if len(calm) >= 4:
        found[DURING].append(round(len(during) / seconds / ((len(calm) - 1) / (calm[-1] - calm[0])), 2))
    found[GAP].append(round(max(b - a for a, b in pairwise([done.time, *during, done.time + seconds])), 2))


def _well(status: dict[str, Any]) -> bool:
    return status["state"] == "running" and all(row["state"] == "healthy" for row in status["actors"])


def _commits(status: dict[str, Any], name: str, before: int | None) -> bool:
    """Whether the maker, as a process other than `before`, has committed something."""
    found = actor(status, name)
    return found is not None and found["pid"] not in (None, before) and bool(found["committed"])


def _again(status: dict[str, Any]) -> int:
    """Leases that ended with their maker: told by its death, or by the call that failed first."""
    failures = status.get("failures", {})
    return failures.get("died", 0) + failures.get("infra", 0)


def _is_restart(event: dict[str, Any]) -> bool:
    return event["event"] == "restart" and event["actor"] == "training"
