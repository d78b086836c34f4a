"""Samples a second of the same topology, one version of staleness allowed against none. Reported, without a target."""

from __future__ import annotations

from benchmarks.harness import CORES, Result
from benchmarks.tandem_run import STEPS, measure


def run() -> list[Result]:
    synchronous, asynchronous = measure(0), measure(1)
    note = (
        f"max_staleness 1: {asynchronous.samples_per_second:.3g} (bound by {asynchronous.bound_by}), "
        f"0: {synchronous.samples_per_second:.3g} (bound by {synchronous.bound_by}); {STEPS} steps, {CORES} cores "
        "that makers and trainer share"
    )
    ratio = asynchronous.samples_per_second / synchronous.samples_per_second
    return [Result("async_vs_sync", ratio, None, "the same run with max_staleness 0", "samples/s", note)]
