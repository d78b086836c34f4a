"""What every bench shares: results, sides that run in their own processes, alternation, fairness of cores.

Guarantees:
1. A side is one process (group) with a deadline, and it is gone when `run_side` returns or raises.
2. Both sides of a comparison run on the same cores with the same number of threads, one after the other, never together.
3. Rates are compared within one run only: a result is a ratio, never an absolute time.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CORES = 2
TAIL = 30  # lines of a failed side's log that are shown


class SideFailed(RuntimeError):
    """A side of a comparison did not end well, or not in time."""


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table. `ratio` is candidate / baseline, more is better; `target` None means reported only."""

    name: str
    ratio: float
    target: float | None
    baseline: str  # what the ratio is against, with its version
    unit: str  # of the rates behind the ratio
    note: str  # the rates, and what a reader must know to judge them

    @property
    def met(self) -> bool:
        return self.target is None or self.ratio >= self.target


def pin_cores() -> None:
    """Keep this process, and so all it starts, on the first CORES cores it may use (where the system can do that)."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])


def free_port() -> int:
    """Of this machine, a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def say(text: str) -> None:
    """Progress, on stderr."""
    print(f"  {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def run_side(
    command: Sequence[str | Path],
    *,
    timeout: float,
    threads: int = CORES,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    stop: Callable[[], None] | None = None,
) -> str:
    """Run `command` to its end and return its stdout. Raises SideFailed with the end of its log.

    `timeout` is in seconds. `stop` is called when the deadline has passed or the bench is interrupted, before the
    process is killed: the place to end what the command started elsewhere.
    """
    merged = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": str(ROOT),
        **(env or {}),
    }
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [str(word) for word in command], stdout=out, stderr=log, cwd=cwd, env=merged, start_new_session=True
        )
        try:
            code = process.wait(timeout)
        except BaseException as error:
            if stop is not None:
                stop()
            if isinstance(error, subprocess.TimeoutExpired):
                raise SideFailed(f"{_words(command)} took more than {timeout:g} s{_tail(log)}") from None
            raise
        finally:
            _kill_group(process)
        if code != 0:
            raise SideFailed(f"{_words(command)} ended with code {code}{_tail(out)}{_tail(log)}")
        out.seek(0)
        return out.read()


def run_json(module: str, *arguments: str | Path, python: str | Path = sys.executable, **options: Any) -> Any:
    """Run `python -m module arguments` as a side. Its answer is the JSON on the last line of its stdout."""
    output = run_side([python, "-m", module, *arguments], **options)
    lines = output.strip().splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        raise SideFailed(f"{module} printed no JSON on its last line: {lines[-1:]}") from None


def alternate(sides: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Measure the sides in turn, A B A B ..., and return the rates of each, in order."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, measure in sides.items():
            rates[name].append(measure())
            say(f"round {number + 1}/{rounds}: {name} {_figure(rates[name][-1])}/s")
    return rates


def ratio_of_medians(rates: Mapping[str, Sequence[float]], candidate: str, baseline: str) -> float:
    return statistics.median(rates[candidate]) / statistics.median(rates[baseline])


def median_of_ratios(rates: Mapping[str, Sequence[float]], candidate: str, baseline: str) -> float:
    """Of the rounds: what loads the machine in one round loads both of its measurements."""
    return statistics.median(ours / theirs for ours, theirs in zip(rates[candidate], rates[baseline], strict=True))


def describe(rates: Mapping[str, Sequence[float]]) -> str:
    """`maker 500 (490-510), vllm 495 (480-501)`: medians, with the range where there is one."""
    parts = []
    for name, values in rates.items():
        spread = f" ({_figure(min(values))}-{_figure(max(values))})" if len(values) > 1 else ""
        parts.append(f"{name} {_figure(statistics.median(values))}{spread}")
    return ", ".join(parts)


def _figure(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the process group that this process leads, and wait for its leader."""
    with contextlib.suppress(ProcessLookupError):  # none is left, as it should be
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _words(command: Sequence[str | Path]) -> str:
    words = [Path(str(command[0])).name, *[str(word) for word in command[1:]]]
    text = " ".join(words)
    return text if len(text) < 160 else text[:157] + "..."


def _tail(stream: Any) -> str:
    stream.seek(0)
    lines = stream.read().rstrip().splitlines()[-TAIL:]
    return "".join(f"\n    {line}" for line in lines)
