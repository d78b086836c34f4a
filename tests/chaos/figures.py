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
DURING = "steps a second while a maker is attached, against as long before"
GAP = "longest time between two steps while a maker is attached, seconds"
REISSUED = "leases issued again after the kill of a maker"
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
            _note(found, MAKER, seconds, done, after)
            found[REISSUED].append(_died(seen.at(done.time + 5.0)) - _died(seen.at(done.time)))
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
    """Against the time before, if nothing was done in that."""
    before = seen.at(done.time - seconds)
    if any(done.time - seconds < other.time < done.time for other in played.done) or before["step"] < 2:
        return
    start, end = seen.at(done.time), seen.at(done.time + seconds)
    rates = [(b["step"] - a["step"]) / max(b["time"] - a["time"], 1e-9) for a, b in ((before, start), (start, end))]
    if rates[0] > 0:
        found[DURING].append(round(rates[1] / rates[0], 2))
    times = [line["time"] for line in played.metrics if done.time <= line["time"] <= done.time + seconds]
    edges = [done.time, *times, done.time + seconds]
    found[GAP].append(round(max(b - a for a, b in pairwise(edges)), 2))


def _commits(status: dict[str, Any], name: str, before: int | None) -> bool:
    """Whether the maker, as a process other than `before`, has committed something."""
    found = actor(status, name)
    return found is not None and found["pid"] not in (None, before) and bool(found["committed"])


def _died(status: dict[str, Any]) -> int:
    return status.get("failures", {}).get("died", 0)


def _is_restart(event: dict[str, Any]) -> bool:
    return event["event"] == "restart" and event["actor"] == "training"
