"""Samples a second that one reward maker scores by exact match, through its real process, all of it on one core.

The ratio is against the 1,000 samples a second that a run on a small model may ask for: what leaves more to the engines is
not needed, what gives less would be the run's limit.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from benchmarks.harness import Result, describe, say
from buffer.records import Lease, Prompt
from makers.config import RewardMaker as RewardMakerConfig
from makers.reward import RewardMaker
from topology.models import resolve_model

NEEDED = 1000.0  # samples/s
SAMPLES, TOKENS = 8, 64  # of a row, of a sample
ROWS, ROUNDS = 300, 5


def run() -> list[Result]:
    with one_core():
        rates = {"maker": asyncio.run(_rates())}
    ratio = statistics.median(rates["maker"]) / NEEDED
    note = f"{describe(rates)}; rows of {SAMPLES} samples x {TOKENS} tokens, maker and its process on one core"
    return [Result("rewards", ratio, 1.0, f"{NEEDED:g} samples/s", "samples/s", note)]


@contextmanager
def one_core() -> Iterator[None]:
    """This process, and what it starts meanwhile, on one core (where the system can do that)."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


async def _rates() -> list[float]:
    config = RewardMakerConfig.model_validate({"kind": "reward", "functions": [{"name": "exact_match"}]})
    maker = RewardMaker(config, name="maker/reward/0", model_path=str(resolve_model("tiny-llama")))
    await maker.start()
    try:
        rates = []
        for number in range(ROUNDS):
            start = time.perf_counter()
            await _score(maker, config.slots)
            rates.append(ROWS * SAMPLES / (time.perf_counter() - start))
            say(f"round {number + 1}/{ROUNDS}: {rates[-1]:.0f}/s")
        return rates
    finally:
        await maker.close()


async def _score(maker: RewardMaker, slots: int) -> None:
    rows = iter(range(ROWS))
    random = np.random.default_rng(0)
    rollout = {
        "response_ids": random.integers(97, 123, SAMPLES * TOKENS).astype(np.int32),  # letters
        "response_offsets": np.arange(0, SAMPLES * TOKENS + 1, TOKENS),
    }

    async def slot() -> None:
        for row in rows:
            prompt = Prompt(id=str(row), content="2 + 2 =", fields={"answer": "4"})
            lease = Lease(row, row, "reward", "maker/reward/0", prompt, SAMPLES, 0, 0, 60.0)
            await maker.make(lease, {"rollout": rollout})

    await asyncio.gather(*(slot() for _ in range(slots)))
