"""Who is killed as a supervisor that hangs, and who is not; in fractions of a second."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from topology.oversight import oversee

LIMIT = 0.2


class FakeSupervisor:
    """Its `ping.remote()` behaves as it is told."""

    def __init__(self, behave: Callable[[], Awaitable[None]]) -> None:
        self.ping = self
        self.remote = behave


async def hangs() -> None:
    await asyncio.Event().wait()


async def answers() -> None:
    pass


async def is_dead() -> None:
    raise ConnectionError("gone")


def ended(
    supervisors: list[FakeSupervisor], *, adoptable: bool = True, limit: float = LIMIT, seconds: float = 1.0
) -> list[str]:
    """The causes of all ends. Each end takes the first supervisor away; without one, nobody has the name."""
    causes: list[str] = []

    def find() -> FakeSupervisor:
        if not supervisors:
            raise ValueError("no such actor")
        return supervisors[0]

    def end(supervisor: FakeSupervisor, cause: str) -> None:
        assert supervisor is supervisors.pop(0)
        causes.append(cause)

    async def watch() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(oversee(find, end, lambda: adoptable, limit), seconds)

    asyncio.run(watch())
    return causes


def test_a_supervisor_that_does_not_answer_is_ended_once() -> None:
    assert ended([FakeSupervisor(hangs)]) == ["supervisor: hung, no answer for 0.2 s"]


@pytest.mark.parametrize("behave", [answers, is_dead])
def test_a_supervisor_that_answers_or_is_gone_is_left_alone(behave: Callable[[], Awaitable[None]]) -> None:
    assert ended([FakeSupervisor(behave)], limit=3.0, seconds=1.2) == []  # a busy machine is no supervisor that hangs


def test_a_supervisor_that_nobody_could_follow_is_left_alone() -> None:
    assert ended([FakeSupervisor(hangs)], adoptable=False) == []


def test_a_name_that_nobody_has_is_asked_for_again() -> None:
    assert ended([]) == []
