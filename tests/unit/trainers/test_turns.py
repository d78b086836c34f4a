"""Devices change hands in one order, and no further than what failed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from trainers.rank_group import LocalWorker, RankError, RankGroup
from trainers.turns import Turns

pytestmark = pytest.mark.timeout(30)
TO_RANKS = ["unroute a b", "sleep a", "sleep b", "onload policy", "onload critic"]
TO_MAKERS = ["offload policy", "offload critic", "wake a", "wake b", "route a b"]


@dataclass
class Fake:
    """Maker, buffer and rank at once; each by its own methods."""

    name: str
    log: list[str]
    fails: set[str] = field(default_factory=set)

    async def sleep(self) -> None:
        self._note("sleep")

    async def wake(self) -> None:
        self._note("wake")

    async def unroute(self, makers: Sequence[str]) -> None:
        self.log.append("unroute " + " ".join(makers))
        if "unroute" in self.fails:
            await asyncio.Event().wait()

    async def route(self, makers: Sequence[str]) -> None:
        self.log.append("route " + " ".join(makers))

    def onload(self) -> None:
        self._note("onload")

    def offload(self) -> None:
        self._note("offload")

    def _note(self, what: str) -> None:
        if what in self.fails:
            raise ValueError("out of memory")
        self.log.append(f"{what} {self.name}")


def turns(log: list[str], *, fails: dict[str, str] | None = None) -> Turns:
    fakes = {name: Fake(name, log) for name in ("a", "b", "buffer", "policy", "critic")}
    for name, method in (fails or {}).items():
        fakes[name].fails.add(method)
    ranks = [RankGroup([LocalWorker(fakes[role], role)], timeout=5.0) for role in ("policy", "critic")]
    return Turns([fakes["a"], fakes["b"]], fakes["buffer"], ranks, timeout=0.2)


def in_parts(log: list[str]) -> list[list[str]]:
    """What happens at the same time, in any order within itself."""
    parts: list[list[str]] = []
    for line in log:
        same = parts and parts[-1][0].split()[0] == line.split()[0]
        (parts[-1] if same else parts.append([]) or parts[-1]).append(line)  # type: ignore[func-returns-value]
    return [sorted(part) for part in parts]


def test_makers_are_unrouted_and_asleep_before_the_ranks_return_and_the_other_way_round() -> None:
    log: list[str] = []

    async def main() -> None:
        shared = turns(log)
        await shared.hand_to("ranks")
        await shared.hand_to("makers")

    asyncio.run(main())
    assert in_parts(log) == in_parts(TO_RANKS + TO_MAKERS)


def test_who_has_the_devices_already_gets_them_without_a_call() -> None:
    log: list[str] = []

    async def main() -> None:
        shared = turns(log)
        await shared.hand_to("makers")
        assert log == []
        await shared.hand_to("ranks")
        before = list(log)
        await shared.hand_to("ranks")
        assert log == before

    asyncio.run(main())


def test_ranks_stay_away_from_devices_that_a_maker_would_not_leave() -> None:
    log: list[str] = []
    shared = turns(log, fails={"b": "sleep"})
    with pytest.raises(ValueError, match="out of memory"):
        asyncio.run(shared.hand_to("ranks"))
    assert not any(line.startswith("onload") for line in log)
    assert shared.holder == "makers"


def test_makers_sleep_on_while_a_rank_could_not_leave() -> None:
    log: list[str] = []

    async def main() -> None:
        shared = turns(log, fails={"critic": "offload"})
        await shared.hand_to("ranks")
        with pytest.raises(RankError, match="rank critic failed"):
            await shared.hand_to("makers")

    asyncio.run(main())
    assert not any(line.startswith(("wake", "route")) for line in log)


def test_a_maker_that_never_finishes_its_rows_is_named_with_the_deadline() -> None:
    with pytest.raises(TimeoutError, match=r"hand-over of shared devices: unroute the makers took over 0\.2 s"):
        asyncio.run(turns([], fails={"buffer": "unroute"}).hand_to("ranks"))
