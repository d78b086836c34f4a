"""`make chaos [ONLY=seed] [FAULTS=n]`: hurt real runs at random, print what came of it, write results.json beside this file.

Exit codes: 0 every run went on to its end as it should; 1 some did not; 2 the arguments are wrong.
A run that went wrong leaves its folder (logs, events, metrics) in `tests/chaos/failed/`.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.chaos.figures import figures, summary
from tests.chaos.play import Played, play
from tests.chaos.scenario import scenario

SEEDS = (1, 2, 3, 4, 5, 10)  # together they draw every kind of fault
FAULTS = 10  # of a run
HERE = Path(__file__).parent


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=_seed, help="the seed of one run, or its name: 7 or chaos-7")
    parser.add_argument("--faults", type=int, default=FAULTS, help="of each run")
    options = parser.parse_args(arguments)
    if options.faults < 1:
        parser.error(f"--faults {options.faults}: at least 1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that what was started is ended
    console, runs = Console(), []
    for seed in SEEDS if options.only is None else (options.only,):
        drawn = scenario(seed, options.faults)
        console.print(
            f"seed {seed}: {options.faults} faults, {drawn.ranks} trainer rank(s), "
            f"{'a cluster it joined' if drawn.joined else 'its own cluster'} ...",
            highlight=False,
        )
        runs.append(play(drawn, lambda text: console.print(text, markup=False, highlight=False), HERE / "failed"))
        for what in runs[-1].wrong:
            console.print(f"  wrong: {what}", style="red", markup=False, highlight=False)
    found = summary([figures(played) for played in runs])
    (HERE / "results.json").write_text(
        json.dumps({"runs": [_plain(p) for p in runs], "figures": found}, indent=2) + "\n"
    )
    for table in (runs_table(runs), faults_table(runs), figures_table(found)):
        console.print(table)
    console.print(f"written: {HERE / 'results.json'}; one run again: make chaos ONLY=seed")
    return 1 if any(played.wrong for played in runs) else 0


def runs_table(runs: list[Played]) -> Table:
    table = Table("seed", "faults", "ranks", "cluster", "steps", "seconds", "result", title="Runs")
    for played in runs:
        drawn = played.scenario
        steps = "-" if played.observer is None else str(played.observer.now["step"])
        result = f"[red]{len(played.wrong)} wrong[/red]" if played.wrong else "[green]as it should be[/green]"
        counted, cluster = f"{len(played.done)} of {len(drawn.faults)}", "joined" if drawn.joined else "own"
        table.add_row(str(drawn.seed), counted, str(drawn.ranks), cluster, steps, f"{played.seconds:.0f}", result)
    return table


def faults_table(runs: list[Played]) -> Table:
    counts = Counter(done.fault.kind for played in runs for done in played.done)
    table = Table("fault", "times", title=f"{counts.total()} faults")
    for kind, times in sorted(counts.items()):
        table.add_row(kind, str(times))
    return table


def figures_table(found: list[dict[str, Any]]) -> Table:
    table = Table("figure", "median", "least", "most", "of", title="Figures, measured in these runs")
    for row in found:
        table.add_row(row["name"], *(f"{row[key]:g}" for key in ("median", "min", "max", "count")))
    return table


def _plain(played: Played) -> dict[str, Any]:
    drawn = played.scenario
    return {
        "seed": drawn.seed,
        "ranks": drawn.ranks,
        "joined": drawn.joined,
        "seconds": round(played.seconds, 1),
        "faults": [
            {"fault": done.fault.kind, "actor": done.actor, "phase": done.phase, "time": done.time}
            for done in played.done
        ],
        "figures": figures(played),
        "wrong": played.wrong,
    }


def _seed(text: str) -> int:
    return int(text.removeprefix("chaos-"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
