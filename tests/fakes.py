"""Hand-written stand-ins for the buffer's collaborators: a clock, prompts, and makers that answer, fail, hang or wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from buffer.records import Lease, MakerInfo, Produced, Prompt


class ManualClock:
    """Time that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakePrompts:
    """Prompts p0, p1, ...; without `count` they never end."""

    def __init__(self, count: int | None = None) -> None:
        self.cursor = 0
        self._count = count

    def next(self) -> Prompt | None:
        if self.cursor == self._count:
            return None
        self.cursor += 1
        return Prompt(id=f"p{self.cursor - 1}", content="1 + 1 =", fields={"part": self.cursor % 2})

    def seek(self, cursor: int) -> None:
        self.cursor = cursor


def answer(lease: Lease, version: int | None = None, **changes: Any) -> Produced:
    """What a healthy maker says about a lease: 10 tokens and 100 bytes a sample in a rollout, a reward of 0.5."""
    if lease.stage != "rollout":
        stats = {"reward_mean": 0.5, "pass_rate": 0.25}
        return Produced(**{"samples": lease.samples, "tokens": 0, "nbytes": 10, "stats": stats, **changes})
    version = lease.min_version if version is None else version
    made: dict[str, Any] = {"samples": lease.samples, "tokens": 10 * lease.samples, "nbytes": 100 * lease.samples}
    return Produced(**{**made, "min_version": version, "max_version": version, "seconds": 0.25, **changes})


class FakeMaker:
    """Implements MakerHandle. `behave` is awaited before the answer: it may wait, raise, or give the answer itself."""

    def __init__(
        self,
        stage: str = "rollout",
        needs: tuple[str, ...] = (),
        *,
        name: str | None = None,
        slots: int = 4,
        behave: Callable[[Lease], Awaitable[Produced | None]] | None = None,
    ) -> None:
        self.info = MakerInfo(name or f"maker/{stage}/0", stage, stage, needs, slots)
        self.leases: list[Lease] = []
        self.inputs: list[Sequence[Any]] = []
        self.running = 0
        self.most_running = 0
        self.cancelled: list[int] = []
        self._behave = behave

    async def make(self, lease: Lease, inputs: Sequence[Any]) -> tuple[Produced, Any]:
        self.leases.append(lease)
        self.inputs.append(inputs)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(0)
            produced = await self._behave(lease) if self._behave else None
            return produced or answer(lease), f"{lease.stage} of row {lease.row_id}"
        except asyncio.CancelledError:
            self.cancelled.append(lease.row_id)
            raise
        finally:
            self.running -= 1


def reward_maker(**arguments: Any) -> FakeMaker:
    return FakeMaker("reward", ("rollout",), **arguments)


async def hang(lease: Lease) -> None:
    await asyncio.Event().wait()


def fail_with(
    error: Exception, rows: Callable[[int], bool] = lambda row_id: True
) -> Callable[[Lease], Awaitable[None]]:
    """Raises `error` for the rows chosen."""

    async def behave(lease: Lease) -> None:
        if rows(lease.row_id):
            raise error

    return behave


async def settle(turns: int = 50) -> None:
    """Lets everything happen that can happen without time passing."""
    for _ in range(turns):
        await asyncio.sleep(0)
