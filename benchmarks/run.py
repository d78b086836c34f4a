"""`make bench [ONLY=name]`: run the benches, print a table, write results.json beside this file.

Exit codes: 0 all benches ran (a missed target is shown, not fatal: the numbers are of this machine at this moment);
1 some bench failed to run; 2 there is no bench of that name.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import signal
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.harness import Result, SideFailed, pin_cores, say

BENCHES = (
    "dispatch",
    "rewards",
    "makers_path",
    "learner",
    "rollout",
    "job",
    "teacher",
    "trainer_overhead",
    "algorithms",
    "distillation_step",
    "distillation",
    "async_vs_sync",
    "loop",
)  # in this order, the shortest first
RESULTS = Path(__file__).with_name("results.json")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"one of: {', '.join(BENCHES)}")
    only = parser.parse_args(arguments).only
    if only is not None and only not in BENCHES:
        print(f"no bench {only!r}; there are: {', '.join(BENCHES)}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that what was started is ended
    pin_cores()
    results: list[Result] = []
    failures: dict[str, str] = {}
    for name in [only] if only else BENCHES:
        start = time.monotonic()
        say(f"{name} ...")
        try:
            results += importlib.import_module(f"benchmarks.{name}").run()
        except (SideFailed, ImportError) as error:
            failures[name] = str(error)
        say(f"{name} took {time.monotonic() - start:.0f} s")
    RESULTS.write_text(json.dumps([dataclasses.asdict(result) for result in results], indent=2) + "\n")
    console = Console()
    console.print(table(results))
    for name, cause in failures.items():
        console.print(f"[red]{name} failed:[/red] ", end="")
        console.print(cause, markup=False, highlight=False)
    console.print(f"written: {RESULTS}")
    return 1 if failures else 0


def table(results: list[Result]) -> Table:
    shown = Table("bench", "ratio", "target", "against", "rates", title="Ratios, measured in this run")
    for result in results:
        colour = "green" if result.met else "red"
        target = "report" if result.target is None else f">= {result.target:g}"
        ratio = f"[{colour}]{result.ratio:.2f}[/{colour}]"
        shown.add_row(result.name, ratio, target, result.baseline, f"{result.unit}: {result.note}")
    return shown


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
