"""Makers and trainer ranks that take no time, in the real actors: what is left is the path between them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from buffer.columns import Columns, nbytes
from buffer.records import Lease, MakerInfo, Produced
from topology.actors import BufferActor, MakerActor
from topology.groups import function, worker
from topology.handles import RayMaker

SAMPLES, TOKENS = 8, 100  # of a row: samples, and tokens of each
PROMPT_TOKENS = 64
SLOTS = 32  # calls in flight on a host, all its makers together


@functools.cache
def _rollout(version: int) -> Columns:
    rng = np.random.default_rng(version)
    total = SAMPLES * TOKENS
    return {
        "prompt_ids": rng.integers(0, 50_000, PROMPT_TOKENS).astype(np.int32),
        "response_ids": rng.integers(0, 50_000, total).astype(np.int32),
        "response_offsets": np.arange(SAMPLES + 1, dtype=np.int64) * TOKENS,
        "behaviour_logprobs": -rng.random(total).astype(np.float32),
        "policy_versions": np.full(total, version, dtype=np.int32),
        "finish_reasons": np.zeros(SAMPLES, dtype=np.int8),
        "temperatures": np.ones(SAMPLES, dtype=np.float32),
    }


REWARDS: Columns = {"rewards": np.ones(SAMPLES, dtype=np.float32), "reward/exact": np.ones(SAMPLES, dtype=np.float32)}


class Simulated:
    """A maker whose columns are there at once. `slots` is of the makers that share its process, together."""

    slots = SLOTS

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.needs = () if stage == "rollout" else ("rollout",)

    async def start(self) -> None: ...

    async def make(self, lease: Lease, inputs: Mapping[str, Columns]) -> tuple[Produced, Columns]:
        if self.stage == "reward":
            return Produced(SAMPLES, 0, nbytes(REWARDS), stats={"reward_mean": 1.0}), REWARDS
        columns, version = _rollout(lease.min_version), lease.min_version
        return Produced(SAMPLES, SAMPLES * TOKENS, nbytes(columns), version, version), columns

    def status(self) -> dict[str, Any]:
        return {}

    async def close(self) -> None: ...


class HostActor(MakerActor):
    """Also answers a call that asks for nothing and checks nothing."""

    async def bare(self, row: int, *inputs: Any) -> tuple[int, Columns]:
        return row, REWARDS if inputs else _rollout(0)


class CallerActor(BufferActor):
    """Also makes the bare calls: one at a time in each slot, a row at a time, as many rows ahead as the buffer admits."""

    async def attach_hosted(self, info: MakerInfo, host: str) -> None:
        self._buffer.attach(RayMaker(info, self.actor(host)))

    async def bare_start(self, hosts: Sequence[tuple[str, str]], ahead: int) -> None:
        self._room, self._made = asyncio.Semaphore(ahead), asyncio.Queue[dict[str, Any]]()
        pairs = [[self.actor(name).bare.options(num_returns=2) for name in pair] for pair in hosts]
        self._loops = [asyncio.create_task(self._bare(*pair)) for pair in pairs for _ in range(SLOTS)]

    async def _bare(self, rollout: Any, reward: Any) -> None:
        for row in range(1 << 30):
            await self._room.acquire()
            answer, columns = rollout.remote(row)
            await answer
            answer, rewards = reward.remote(row, columns)
            await answer
            self._made.put_nowait({"rollout": columns, "reward": rewards})

    async def bare_take(self, rows: int) -> list[dict[str, Any]]:
        return [await self._made.get() for _ in range(rows)]

    async def bare_done(self, rows: int) -> None:
        for _ in range(rows):
            self._room.release()


@worker(group="ranks")
class Rank:
    """A trainer rank: gets the rollouts of its share of the rows."""

    @function(dispatch=lambda ranks, rank, rollouts: rollouts[rank::ranks], collect=sum)
    def train_step(self, *rollouts: Columns) -> int:
        return sum(columns["response_ids"].size for columns in rollouts)
