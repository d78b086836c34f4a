"""Watches over actors: who died is told within a fraction of a second, who hangs by a deadline.

A death shows as the failure of a call that never returns. A process that is stopped, not dead, is only seen by its
silence: after half of `limit` seconds without an answer it is a suspect, after all of them it is told as hung.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import ray

from topology.crew import one_line
from topology.handles import answer_of, call
from topology.members import Member

log = logging.getLogger("supervisor")


class Watch:
    """`on_end(member, cause)` is called once for each actor that was watched until then."""

    def __init__(self, limit: float, on_end: Callable[[Member, str], None]) -> None:
        self._limit = limit
        self._on_end = on_end

    def over(self, member: Member) -> None:
        """Watch the actor that has the member's name now, until `crew.end`."""
        handle = member.handle
        for work in (self._hold(member, handle), self._ping(member, handle)):
            member.watchers.append(asyncio.ensure_future(work))

    async def _hold(self, member: Member, handle: Any) -> None:
        try:
            await call(handle.hold.remote(), float("inf"), member.name)
            cause = f"{member.name}: let go of the supervisor"
        except Exception as error:
            cause = str(error)
        self._tell(member, handle, cause)

    async def _ping(self, member: Member, handle: Any) -> None:
        half = self._limit / 2
        try:
            while True:
                answer = asyncio.ensure_future(answer_of(handle.ping.remote()))
                try:
                    if not await self._answered(member, answer, half):
                        cause = f"{member.name}: hung, no answer for limits.ping = {self._limit:g} s"
                        self._tell(member, handle, cause)
                        return
                    member.place = answer.result()
                    member.life.answered()
                finally:
                    answer.cancel()
                await asyncio.sleep(half / 2)
        except ray.exceptions.RayActorError:
            return  # its death is told by `_hold`
        except ray.exceptions.RayError as error:
            self._tell(member, handle, f"{member.name}: cannot be asked: {one_line(error)}")

    async def _answered(self, member: Member, answer: asyncio.Future[Any], half: float) -> bool:
        """Whether it did so in time. Whoever is being started has until limits.start: there may be no room for it yet, a
        busy machine is slow to start its process, and loading libraries keeps it from answering."""
        silent = 0.0
        while silent < 2 * half:
            await asyncio.wait({answer}, timeout=half)
            if answer.done():
                return True
            silent = 0.0 if member.state == "starting" else silent + half
            member.life.silent()
        return False

    def _tell(self, member: Member, handle: Any, cause: str) -> None:
        if member.handle is handle:
            self._on_end(member, cause)
