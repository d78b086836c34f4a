"""Devices that the ranks of trainers and some makers share: who has them, and the order of a hand-over.

To the ranks: the makers get no new rows and finish those they have (`unroute`), sleep, and only then do the ranks bring
their state back (`onload`). To the makers: the ranks move their state to CPU memory (`offload`), the makers wake, and only
then do they get rows again (`route`). So the two never hold device memory at the same time. A publication comes before
the way back: it copies the weights from the ranks, and the makers wake to the new version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, Literal, Protocol

from trainers.rank_group import RankGroup

Holder = Literal["makers", "ranks"]


class Sleeper(Protocol):
    """A maker that can give its device memory back for a while. It is asked for neither while it has a row."""

    name: str

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


class Router(Protocol):
    """The buffer as a hand-over sees it."""

    async def unroute(self, makers: Sequence[str]) -> None:
        """Returns when the makers have no row left; each has its deadline."""
        ...

    async def route(self, makers: Sequence[str]) -> None: ...


class Turns:
    """The makers have the devices at first. `ranks`: of every trainer that shares them. `timeout` (seconds) is for each part."""

    def __init__(self, makers: Sequence[Sleeper], rows: Router, ranks: Sequence[RankGroup], timeout: float) -> None:
        self.holder: Holder = "makers"
        self._makers = list(makers)
        self._names = [maker.name for maker in makers]
        self._rows = rows
        self._ranks = list(ranks)
        self._timeout = timeout

    async def hand_to(self, holder: Holder) -> None:
        """Returns when `holder` has the devices."""
        if holder == self.holder:
            return
        if holder == "ranks":
            await self._part("unroute the makers", self._rows.unroute(self._names))
            await self._part("put the makers to sleep", asyncio.gather(*(maker.sleep() for maker in self._makers)))
            await self._every_rank("onload")
        else:
            await self._every_rank("offload")
            await self._part("wake the makers", asyncio.gather(*(maker.wake() for maker in self._makers)))
            await self._part("route the makers", self._rows.route(self._names))
        self.holder = holder

    async def _every_rank(self, method: str) -> None:
        await asyncio.gather(*(group.call(method, timeout=self._timeout) for group in self._ranks))

    async def _part(self, what: str, waiting: Awaitable[Any]) -> None:
        try:
            await asyncio.wait_for(waiting, self._timeout)
        except TimeoutError as error:
            if str(error):  # somebody else's deadline, named already
                raise
            raise TimeoutError(f"hand-over of shared devices: {what} took over {self._timeout:g} s") from None
