"""Whom the supervisor takes for hung: actors that answer never, or late, in milliseconds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from buffer.config import Resources
from topology.capacity import PlannedActor
from topology.lifecycle import Lifecycle
from topology.members import Member
from topology.watch import Watch

LIMIT = 0.2


class Method:
    def __init__(self, answer: Callable[[], Awaitable[Any]]) -> None:
        self.remote = answer


class Handle:
    """An actor that answers `ping` after so many seconds, and never lets go."""

    def __init__(self, seconds: float) -> None:
        async def ping() -> dict[str, Any]:
            await asyncio.sleep(seconds)
            return {"pid": 1}

        self.ping = Method(ping)
        self.hold = Method(lambda: asyncio.sleep(60))


async def told(handle: Handle, *, started: bool) -> tuple[Member, list[str]]:
    """What is told of the actor within five limits."""
    life = Lifecycle(1, 60.0)
    if started:
        life.joined()
    member = Member(PlannedActor("weights", "weights", Resources(), 0.0), life, handle)
    causes: list[str] = []
    Watch(LIMIT, lambda _, cause: causes.append(cause)).over(member)
    await asyncio.sleep(5 * LIMIT)
    for watcher in member.watchers:
        watcher.cancel()
    return member, causes


def test_an_actor_that_stops_answering_is_told_as_hung_once() -> None:
    member, causes = asyncio.run(told(Handle(60), started=True))
    assert causes == ["weights: hung, no answer for limits.ping = 0.2 s"]
    assert member.state == "suspect"


def test_an_actor_that_is_still_being_started_is_not_hung_however_long_it_is_silent() -> None:
    member, causes = asyncio.run(told(Handle(3 * LIMIT), started=False))
    assert causes == []
    assert member.place == {"pid": 1}


def test_an_actor_that_answers_in_time_is_left_alone() -> None:
    member, causes = asyncio.run(told(Handle(0.0), started=True))
    assert (member.state, causes) == ("healthy", [])
