"""Rows a second through the real actors with simulated makers, and through bare Ray calls of the same shape.

Each number of makers gets a buffer actor of its own and makers of both stages. Both sides use the same processes: the
buffer's actor is the caller of the bare calls too, and a maker's actor answers them. Prints JSON: rows a second of each
window, by number of makers and by number of trainer ranks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import ray

from benchmarks.harness import ROOT
from benchmarks.sides.simulated import SAMPLES, SLOTS, TOKENS, CallerActor, HostActor, Rank
from buffer.records import MakerInfo
from topology.actors import Identity, WeightsActor
from topology.config import RunConfig, parse_config
from topology.groups import DeviceGroup, Resources, groups
from topology.handles import Peer, RayRows
from topology.names import namespace_of

GROUPS = 64  # rows of one step
HOSTS = 4  # processes of one stage at most: with more makers than that, each hosts several
SECONDS = 60.0  # for any one answer
STAGES = ("rollout", "reward")
MIB = 1 << 20


class Tandem:
    """The consumer as a trainer is one: samples, fetches, trains, publishes a version after each step."""

    def __init__(self, buffer: Peer, ranks: Any | None = None) -> None:
        self._rows = RayRows(buffer, SECONDS)
        self._ranks = ranks
        self._step = 0

    async def step(self) -> None:
        self._step += 1
        rows = await self._rows.sample(GROUPS, SECONDS)
        await asyncio.gather(*(self._rows.fetch(row.columns[stage]) for row in rows for stage in STAGES))
        if self._ranks is not None:
            tokens = await self._ranks.train_step.future(*(row.columns["rollout"] for row in rows))
            assert tokens == GROUPS * SAMPLES * TOKENS
        await self._rows.trained([row.row_id for row in rows], self._step)
        await self._rows.published(self._step, self._step)


class Bare:
    """The same calls with nothing behind them."""

    def __init__(self, caller: Any) -> None:
        self._caller = caller

    async def step(self) -> None:
        rows = await self._caller.bare_take.remote(GROUPS)
        await asyncio.gather(*(asyncio.gather(*(row[stage] for stage in STAGES)) for row in rows))
        await self._caller.bare_done.remote(0)
        await self._caller.bare_done.remote(GROUPS)


async def rate(step: Callable[[], Awaitable[None]], steps: int) -> float:
    """Rows a second. What was made beforehand is used up before the clock starts."""
    for _ in range(3):
        await step()
    start = time.perf_counter()
    for _ in range(steps):
        await step()
    return steps * GROUPS / (time.perf_counter() - start)


# --- actors -----------------------------------------------------------------------------------------------------------


def config_of(name: str, folder: Path) -> RunConfig:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i} + {i} =", "answer": str(2 * i)}) + "\n" for i in range(100)))
    makers: dict[str, Any] = {
        stage: {"kind": "benchmarks.sides.simulated:Simulated", "options": {"stage": stage}} for stage in STAGES
    }
    makers["size"] = {"kind": "rollout", "sampling": {"n": SAMPLES}}  # never started: says how large a group is
    trainer = {"algorithm": {"type": "grpo"}, "backend": {"type": "torch"}, "groups_per_step": GROUPS, "steps": 1 << 30}
    return parse_config(
        {
            "name": name,
            "model": {"path": "tiny-llama"},
            "prompts": {"type": "file", "path": str(prompts)},
            "makers": makers,
            "trainers": {"policy": trainer},
            "buffer": {"max_staleness": 1},
        }
    )


@asynccontextmanager
async def actors(makers: int, folder: Path) -> AsyncIterator[tuple[Peer, Any]]:
    """The buffer's actor with so many makers of each stage attached."""
    name = f"makers-{makers}"
    config, hosts = config_of(name, folder), min(makers, HOSTS)

    def create(actor: type, label: str) -> Any:
        identity = Identity(name, label, str(folder), (str(ROOT),), 1, config, "")
        options = {"name": label, "namespace": namespace_of(name), "num_cpus": 0, "max_concurrency": 1000}
        return ray.remote(actor).options(**options).remote(identity)

    weights, caller = create(WeightsActor, "weights"), create(CallerActor, "buffer")
    names = {stage: [f"maker/{stage}/{host}" for host in range(hosts)] for stage in STAGES}
    handles = [create(HostActor, label) for labels in names.values() for label in labels]
    try:
        await asyncio.gather(
            weights.ping.remote(), caller.start.remote(0, None), *(host.start.remote() for host in handles)
        )
        slots = max(1, SLOTS * hosts // makers)
        for stage, labels in names.items():
            for number in range(makers):
                needs = () if stage == "rollout" else ("rollout",)
                info = MakerInfo(f"maker/{stage}/{number}", "custom", stage, needs, slots)
                await caller.attach_hosted.remote(info, labels[number % hosts])
        await caller.published.remote(0, 0)
        await caller.bare_start.remote(list(zip(*names.values(), strict=True)), 2 * GROUPS)
        yield Peer("buffer", namespace_of(name)), caller
    finally:
        for actor in (*handles, caller, weights):
            ray.kill(actor)


async def main() -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--makers", type=int, nargs="*", default=[])
    parser.add_argument("--ranks", type=int, nargs="*", default=[])
    parser.add_argument("--passes", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    rates: dict[str, dict[int, dict[str, list[float]]]] = {
        "makers": {number: {"tandem": [], "bare": []} for number in args.makers},
        "ranks": {number: {"tandem": []} for number in args.ranks},
    }
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        for _ in range(args.passes):
            for makers, found in rates["makers"].items():
                async with actors(makers, Path(folder)) as (buffer, caller):
                    sides = {"tandem": Tandem(buffer), "bare": Bare(caller)}
                    await measure(sides, found, args.rounds, args.steps)
            for ranks, found in rates["ranks"].items():
                async with actors(HOSTS, Path(folder)) as (buffer, _):
                    with groups(DeviceGroup("ranks", ranks, Resources(cpus=0))):
                        await measure({"tandem": Tandem(buffer, Rank())}, found, args.rounds, args.steps)
    return rates


async def measure(sides: dict[str, Any], rates: dict[str, list[float]], rounds: int, steps: int) -> None:
    """Adds the rates of `rounds` windows of each side, in turn."""
    for _ in range(rounds):
        for name, side in sides.items():
            rates[name].append(await rate(side.step, steps))


if __name__ == "__main__":
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=256 * MIB)
    answer = asyncio.run(main())
    ray.shutdown()  # what Ray has to say of its processes comes before the answer
    print(json.dumps(answer), flush=True)
