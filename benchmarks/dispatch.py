"""Lease and commit pairs a second of the buffer, with makers that do nothing.

The baseline makes the same calls on the same makers by bare asyncio: no table, no leases, no deadlines, no ledger. The
ratio is what the bookkeeping costs; the rate is the most that a run's makers together can ask of one buffer, without Ray.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.harness import Result, alternate, describe, ratio_of_medians
from buffer.buffer import Buffer
from buffer.config import BufferConfig
from buffer.records import Lease, MakerInfo, Produced, Prompt

MAKERS = 8  # of each stage
SLOTS = 8
GROUPS = 64  # rows a step
STEPS = 60
ROUNDS = 5
STAGES = ("rollout", "reward")
TIMEOUT = 60.0  # seconds without a complete batch


@dataclass
class IdleMaker:
    """Answers at once, after one turn of the event loop."""

    info: MakerInfo

    async def make(self, lease: Lease, inputs: Sequence[Any]) -> tuple[Produced, Any]:
        await asyncio.sleep(0)
        version = lease.min_version if self.info.stage == "rollout" else None
        return Produced(samples=1, tokens=1, nbytes=64, min_version=version, max_version=version), inputs


class Counting:
    """Prompts without end."""

    def __init__(self) -> None:
        self.cursor = 0

    def next(self) -> Prompt:
        self.cursor += 1
        return Prompt(id=str(self.cursor), content="")

    def seek(self, cursor: int) -> None:
        self.cursor = cursor


def run() -> list[Result]:
    rates = alternate({"buffer": partial(_rate, _through_buffer), "bare": partial(_rate, _bare)}, ROUNDS)
    note = f"{describe(rates)}; {2 * MAKERS} makers x {SLOTS} slots, {len(STAGES)} stages a row, one thread"
    ratio = ratio_of_medians(rates, "buffer", "bare")
    return [Result("dispatch", ratio, None, "the same calls by bare asyncio", "lease+commit pairs/s", note)]


def _rate(measure: Any) -> float:
    start = time.perf_counter()
    asyncio.run(measure())
    return GROUPS * STEPS * len(STAGES) / (time.perf_counter() - start)


def _makers() -> list[IdleMaker]:
    needs = {"rollout": (), "reward": ("rollout",)}
    return [
        IdleMaker(MakerInfo(f"{stage}/{index}", stage, stage, needs[stage], SLOTS))
        for stage in STAGES
        for index in range(MAKERS)
    ]


async def _through_buffer() -> None:
    """Consumes rows as a trainer does that takes no time."""
    buffer = Buffer(
        BufferConfig(), Counting(), stages=STAGES, groups_per_step=GROUPS, every=1, samples=1, total_rows=None, seed=0
    )
    for maker in _makers():
        buffer.attach(maker)
    buffer.published(0, 0)
    for step in range(1, STEPS + 1):
        rows = await buffer.sample(GROUPS, TIMEOUT)
        buffer.trained([row.row_id for row in rows], step)
        buffer.published(step, step)
    await buffer.close()


async def _bare() -> None:
    """As many workers as there are slots take turns: rollout, then reward."""
    waiting = iter(range(GROUPS * STEPS))
    makers = _makers()

    async def work(rollout: IdleMaker, reward: IdleMaker) -> None:
        for row in waiting:
            _, columns = await rollout.make(_lease(row, rollout), ())
            await reward.make(_lease(row, reward), (columns,))

    pairs = zip(makers[:MAKERS], makers[MAKERS:], strict=True)
    await asyncio.gather(*(work(*pair) for pair in pairs for _ in range(SLOTS)))


def _lease(row: int, maker: IdleMaker) -> Lease:
    stage, name = maker.info.stage, maker.info.name
    return Lease(row, row, stage, name, Prompt(str(row), ""), samples=1, min_version=0, seed=0, timeout=TIMEOUT)
