"""Rows a second from makers to trainer through the real actors, with makers and trainers that take no time.

The baseline is bare Ray calls of the same shape, between the same processes: for each row one call of a rollout maker and
one of a reward maker, two returns each, columns by reference; three calls a step by the trainer, who fetches the columns of
every row. Nothing is leased, checked, timed or counted there. A row has the columns of 8 samples x 100 tokens.

More than HOSTS makers of a stage share HOSTS processes: all of them are attached to the buffer by a name of their own, only
the processes are fewer. Flatness is the rate with the most over the rate with the fewest makers, or trainer ranks.
"""

from __future__ import annotations

import statistics
from importlib.metadata import version

from benchmarks.harness import CORES, Result, describe, ratio_of_medians, run_json
from benchmarks.sides.makers_path import GROUPS, HOSTS

TARGET = 0.8
MAKERS = (1, 4, 16, 64, 256)  # of each stage
RANKS = (1, 4, 16)
PASSES = 2  # over all numbers of makers and ranks
ROUNDS = 3  # windows of each side in a pass
STEPS = 12  # of a window
TIMEOUT = 900.0

Rates = dict[str, dict[str, list[float]]]  # by number of makers or ranks, then by side


def run() -> list[Result]:
    counts = ["--makers", *map(str, MAKERS), "--ranks", *map(str, RANKS)]
    lengths = ["--passes", str(PASSES), "--rounds", str(ROUNDS), "--steps", str(STEPS)]
    rates = run_json("benchmarks.sides.makers_path", *counts, *lengths, threads=1, timeout=TIMEOUT)
    return [
        *(_against_bare(makers, rates["makers"][str(makers)]) for makers in MAKERS),
        _flat("makers", rates["makers"]),
        _flat("ranks", rates["ranks"]),
    ]


def _against_bare(makers: int, rates: dict[str, list[float]]) -> Result:
    note = f"{describe(rates)}; {makers} makers of each stage in {min(makers, HOSTS)} processes, {GROUPS} rows a step"
    ratio = ratio_of_medians(rates, "tandem", "bare")
    return Result(f"makers_path/{makers}", ratio, TARGET, f"bare Ray calls, ray {version('ray')}", "rows/s", note)


def _flat(what: str, rates: Rates) -> Result:
    medians = {number: statistics.median(found["tandem"]) for number, found in rates.items()}
    fewest, most = min(medians, key=int), max(medians, key=int)
    shown = ", ".join(f"{number} {what}: {rate:.0f}" for number, rate in medians.items())
    note = f"{shown}; {CORES} cores for all processes"
    return Result(
        f"makers_path/flat-{what}", medians[most] / medians[fewest], TARGET, f"{fewest} of them", "rows/s", note
    )
