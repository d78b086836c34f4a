"""Makers that join and leave, on a crew whose actors are only noted down."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tests.command_line import TINY
from topology.capacity import PlannedActor
from topology.config import load_config
from topology.crew import RunFailed
from topology.lifecycle import Lifecycle
from topology.members import Member
from topology.recovery import Recovery
from topology.shifts import Shifts


class NotedCrew:
    """`fails`: names of makers that cannot be started. `attached`: those that the buffer calls."""

    def __init__(self, fails: set[str]) -> None:
        self.config = load_config(TINY)
        self.placement = SimpleNamespace(strategy=lambda name: "somewhere", free=lambda name: None)
        self.members: dict[str, Member] = {}
        self.attached: set[str] = set()
        self.draining: set[str] = set()
        self._fails = fails
        for name, kind in (("buffer", "buffer"), ("trainer/policy", "trainer"), ("maker/reward/0", "maker")):
            self.enlist(PlannedActor(name, kind, None, 0.0)).life.joined()  # type: ignore[arg-type]
            self.members[name].handle = name
        self.attached.add("maker/reward/0")

    buffer = property(lambda self: self.members["buffer"])
    consumer = property(lambda self: self.members["trainer/policy"])

    def kind(self, kind: str) -> list[Member]:
        return [member for member in self.members.values() if member.kind == kind]

    def in_training(self, member: Member) -> bool:
        return False

    def enlist(self, planned: PlannedActor) -> Member:
        self.members[planned.name] = Member(planned, Lifecycle(restarts=1, window=60.0))
        return self.members[planned.name]

    def make(self, member: Member) -> None:
        member.handle = member.name

    def end(self, member: Member) -> None: ...

    async def start_maker(self, member: Member) -> None:
        if member.name in self._fails:
            await asyncio.sleep(0.01)  # the others are through by then
            raise RunFailed(f"{member.name}: died")
        member.life.loaded()

    async def attach(self, member: Member) -> None:
        self.attached.add(member.name)
        member.attached_to = self.buffer.handle
        member.life.joined()

    async def close(self, members: list[Member]) -> None: ...

    async def ask(self, member: Member, method: str, *args: Any, within: float | None = None) -> Any:
        if method == "status":
            return {"makers": {n: {"state": "draining" if n in self.draining else "open"} for n in self.attached}}
        if method in ("maker_died", "detach"):
            self.attached.discard(args[0])
        return None


class NotedRun:
    def __init__(self, tmp_path: Any, fails: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        self.crew = NotedCrew(fails)
        self.config, self.state, self.events = self.crew.config, "running", []
        self.folder = SimpleNamespace(config=tmp_path / "config.yaml")
        self.tasks: list[Any] = []
        self.shifts = Shifts(self)  # type: ignore[arg-type]
        self.shifts.planned = lambda name: PlannedActor(name, "maker", None, 0.0)  # type: ignore[method-assign,arg-type]
        self.recovery = Recovery(self)  # type: ignore[arg-type]

    def event(self, kind: str, **values: Any) -> None:
        self.events.append(kind)

    def write_status(self) -> None: ...

    def spawn(self, work: Any, name: str) -> None:
        self.tasks.append(asyncio.ensure_future(work))


def test_if_one_of_several_newcomers_fails_none_of_them_stays_with_the_buffer(tmp_path: Any) -> None:
    run = NotedRun(tmp_path, fails={"maker/reward/2"})
    with pytest.raises(RunFailed, match="maker/reward/2: died"):
        asyncio.run(run.shifts.attach("reward", None, 2))
    assert run.crew.attached == {"maker/reward/0"}
    assert {member.name for member in run.crew.kind("maker")} == {"maker/reward/0"}
    assert run.crew.config.makers["reward"].replicas == 1


def test_a_maker_that_was_given_up_can_be_detached(tmp_path: Any) -> None:
    run = NotedRun(tmp_path)
    asyncio.run(run.shifts.attach("reward", None, 1))
    life = run.crew.members["maker/reward/1"].life
    life.died("killed")
    life.restart()
    assert life.died("killed again") is None  # the budget is spent
    asyncio.run(run.shifts.detach("maker/reward/1", now=False))
    assert "maker/reward/1" not in run.crew.members
    assert run.crew.config.makers["reward"].replicas == 1


def test_a_detachment_that_a_dead_supervisor_had_begun_is_brought_to_its_end(tmp_path: Any) -> None:
    run = NotedRun(tmp_path)
    run.crew.draining.add("maker/reward/0")

    async def adopt() -> None:
        await run.recovery._adopt_maker(run.crew.members["maker/reward/0"])
        await asyncio.gather(*run.tasks)

    asyncio.run(adopt())
    assert run.events == ["draining", "detach"]
    assert "maker/reward/0" not in run.crew.members
    assert run.crew.attached == set()
