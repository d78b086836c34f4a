"""Calls the makers: the asyncio shell around the experience table.

Guarantees: one call for each row in flight, at most `slots` calls on a maker; rows go round the makers with a free slot; each
lease ends exactly once, whatever the maker does, and a late answer of an ended lease is ignored; a call without an answer
by its deadline ends the lease, with maker, row and stage named. Nothing here polls: every step is taken when something
happens (an answer, a deadline, an attachment, a death, an admission), at a cost that does not depend on the number of makers.

A maker that fails pauses before its next call, twice as long each time, so that a broken maker does not burn
through the attempts of every row while a healthy one is busy.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from buffer.config import Route
from buffer.records import ColumnsLost, DataFailure, InfraFailure, Lease, MakerInfo, Produced
from buffer.table import ExperienceTable, FailureKind

FIRST_PAUSE = 0.5  # seconds after a maker's first failure in a row
LONGEST_PAUSE = 30.0
log = logging.getLogger("buffer")
_Turn = tuple[str, Route | None]  # stage and route: makers that take the same rows


class MakerHandle(Protocol):
    """A maker as the buffer sees it."""

    @property
    def info(self) -> MakerInfo: ...

    async def make(self, lease: Lease, inputs: Sequence[Any]) -> tuple[Produced, Any]:
        """`inputs` are references to the columns of `info.needs`, in that order; so is the answer's second part.

        Raises DataFailure, InfraFailure, or ColumnsLost with the stages whose columns, among `inputs`, are gone; any other
        exception counts as InfraFailure. Cancelled when the lease ends early.
        """
        ...


@dataclass(slots=True, eq=False)
class _Maker:
    handle: MakerHandle
    calls: dict[int, _Call] = field(default_factory=dict)  # by lease id
    in_turn: bool = False  # whether it stands in the queue of makers with a free slot
    draining: bool = False
    routed: bool = True
    pause: asyncio.TimerHandle | None = None
    failures_in_a_row: int = 0
    failures: int = 0
    committed: int = 0
    busy_seconds: float = 0.0
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # set when it gets no more calls and has none left

    @property
    def info(self) -> MakerInfo:
        return self.handle.info

    @property
    def turn(self) -> _Turn:
        return self.info.stage, self.info.route

    @property
    def free(self) -> bool:
        return self.open and self.pause is None and len(self.calls) < self.info.slots

    @property
    def open(self) -> bool:
        """Whether it is to get new calls."""
        return self.routed and not self.draining


@dataclass(slots=True, eq=False)
class _Call:
    """One lease on its way; it is in `_Maker.calls` as long as the lease is open."""

    maker: _Maker
    table: ExperienceTable
    lease: Lease
    task: asyncio.Future[tuple[Produced, Any]]
    deadline: asyncio.TimerHandle


class Dispatcher:
    """Serves several tables with the same makers, the table added last first.

    `on_event` is called after each change. `on_bug` hears of an error in here that no caller would see.
    """

    def __init__(self, on_event: Callable[[], None], on_bug: Callable[[Exception], None]) -> None:
        self._on_event = on_event
        self._on_bug = on_bug
        self._tables: list[ExperienceTable] = []
        self._makers: dict[str, _Maker] = {}
        self.unrouted: set[str] = set()  # names of makers, attached or not
        self._turns: dict[_Turn, deque[_Maker]] = {}  # makers with a free slot, the next one first
        self._busy_seconds: dict[str, float] = {}  # by stage, of all makers there ever were
        self._pump_comes = False
        self._tasks: set[asyncio.Future[tuple[Produced, Any]]] = set()  # asyncio holds its tasks only weakly

    def add_table(self, table: ExperienceTable) -> None:
        for maker in self._makers.values():
            table.attach(maker.info)
        self._tables.insert(0, table)

    def remove_table(self, table: ExperienceTable) -> None:
        """Its open leases are revoked."""
        self._tables.remove(table)
        for maker in self._makers.values():
            self._abandon(maker, table.detach(maker.info.name))
        self._on_event()

    def attach(self, handle: MakerHandle) -> None:
        """Raises ValueError if the maker does not fit."""
        info = handle.info
        for table in self._tables:
            table.attach(info)
        maker = self._makers[info.name] = _Maker(handle, routed=info.name not in self.unrouted)
        self._turns.setdefault(maker.turn, deque())
        self._busy_seconds.setdefault(info.stage, 0.0)
        self._take_turn(maker)
        self._on_event()

    async def detach(self, name: str, drain: bool) -> None:
        """`drain`: waits for the calls on the way (each has its deadline) and gives no new ones; else revokes them."""
        if name not in self._makers:
            raise ValueError(f"no maker {name} is attached; there are: {', '.join(self._makers) or 'none'}")
        maker = self._makers[name]
        maker.draining = True
        if drain and maker.calls:
            await maker.idle.wait()
        if self._makers.get(name) is maker:
            self._remove(maker)

    async def unroute(self, name: str) -> None:
        """No new calls on a maker of this name until `route`; returns when those on the way have ended, by their deadlines."""
        self.unrouted.add(name)
        maker = self._makers.get(name)
        if maker is None:
            return
        maker.routed = False
        maker.idle.clear()
        if maker.calls:
            await maker.idle.wait()

    def route(self, name: str) -> None:
        self.unrouted.discard(name)
        if name in self._makers:
            self._makers[name].routed = True
            self._take_turn(self._makers[name])
            self._on_event()

    def died(self, name: str, cause: str) -> None:
        """Revokes the maker's leases at once. A maker that is not attached is no error: a death may be told twice."""
        if name in self._makers:
            self._remove(self._makers[name], death=cause)

    def lost(self, table: ExperienceTable, row_id: int, stages: Collection[str], cause: str) -> None:
        """Columns of a row are gone: see `ExperienceTable.lost`."""
        log.warning("row %d: the columns of %s are lost: %s", row_id, ", ".join(stages), cause)
        for lease in table.lost(row_id, stages, cause):
            self._abandon(self._makers[lease.maker], [lease])
        self._on_event()

    def pump_soon(self) -> None:
        """Gives out leases once the event loop is through with what it does: who brought the news is answered first."""
        if not self._pump_comes and any(table.ready(*turn) for turn in self._turns for table in self._tables):
            self._pump_comes = True
            asyncio.get_running_loop().call_later(0, self._guarded, self.pump)

    def pump(self) -> None:
        """Gives out every lease that can be given out now."""
        self._pump_comes = False
        for turn, turns in self._turns.items():
            refused = 0  # makers in a row that may take none of the rows that wait
            while refused < len(turns) and any(table.ready(*turn) for table in self._tables):
                maker = turns.popleft()
                maker.in_turn = False
                if maker.free:
                    refused = 0 if self._lease(maker) else refused + 1
                self._take_turn(maker)

    def close(self) -> None:
        """Revokes every lease and cancels every call."""
        for maker in list(self._makers.values()):
            self._remove(maker)

    def status(self) -> dict[str, Any]:
        return {
            "busy_seconds": dict(self._busy_seconds),
            "makers": {
                name: {
                    "kind": maker.info.kind,
                    "stage": maker.info.stage,
                    "slots": maker.info.slots,
                    "in_flight": len(maker.calls),
                    "committed": maker.committed,
                    "failures": maker.failures,
                    "busy_seconds": maker.busy_seconds,
                    "state": _state(maker),
                }
                for name, maker in self._makers.items()
            },
        }

    def _take_turn(self, maker: _Maker) -> None:
        if maker.free and not maker.in_turn and maker.info.name in self._makers:
            maker.in_turn = True
            self._turns[maker.turn].append(maker)

    def _lease(self, maker: _Maker) -> bool:
        for table in self._tables:
            lease = table.lease(maker.info.name) if table.ready(*maker.turn) else None
            if lease is not None:
                self._call(maker, table, lease)
                return True
        return False

    def _call(self, maker: _Maker, table: ExperienceTable, lease: Lease) -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(maker.handle.make(lease, table.inputs(lease)))
        deadline = loop.call_later(lease.timeout, self._guarded, self._missed_deadline, maker, lease.id)
        call = maker.calls[lease.id] = _Call(maker, table, lease, task, deadline)
        self._tasks.add(task)
        task.add_done_callback(partial(self._guarded, self._answered, call))

    def _guarded(self, callback: Callable[..., None], *args: Any) -> None:
        """Runs a callback of the event loop, which would only log its error and let everybody wait for ever."""
        try:
            callback(*args)
        except Exception as error:
            self._on_bug(error)

    def _answered(self, call: _Call, task: asyncio.Future[tuple[Produced, Any]]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if call.lease.id not in call.maker.calls:
            return  # a late answer: its lease has ended, and somebody else may hold the row now
        if task.cancelled():
            self._fail(call, "infra", "the call was cancelled by the maker")
        elif isinstance(error, DataFailure):
            self._fail(call, "data", str(error))
        elif isinstance(error, ColumnsLost) and error.stages:
            self.lost(call.table, call.lease.row_id, error.stages, str(error))
            return
        elif error is not None:
            known = isinstance(error, InfraFailure)
            self._fail(call, "infra", str(error) if known else f"{type(error).__name__}: {error}")
        else:
            self._commit(call, *task.result())
        self._on_event()

    def _commit(self, call: _Call, produced: Produced, columns: Any) -> None:
        try:
            call.table.commit(call.lease.id, produced, columns)
        except ValueError as error:
            self._fail(call, "infra", f"invalid answer: {error}")
            return
        maker = call.maker
        maker.committed += 1
        maker.failures_in_a_row = 0
        maker.busy_seconds += produced.seconds
        self._busy_seconds[call.lease.stage] += produced.seconds
        self._end(call)

    def _fail(self, call: _Call, kind: FailureKind, text: str) -> None:
        maker, lease = call.maker, call.lease
        log.warning(
            "row %d (prompt %s): %s failed (%s) on %s: %s",
            lease.row_id,
            lease.prompt.id,
            lease.stage,
            kind,
            maker.info.name,
            text,
        )
        maker.failures += 1
        if kind != "data":
            self._pause(maker)
        self._end(call)
        for lease in call.table.fail(call.lease.id, kind, text):
            self._abandon(self._makers[lease.maker], [lease])

    def _missed_deadline(self, maker: _Maker, lease_id: int) -> None:
        call = maker.calls[lease_id]
        self._fail(call, "timeout", f"no answer within {call.lease.timeout:g} s")
        call.task.cancel()
        self._on_event()

    def _pause(self, maker: _Maker) -> None:
        if maker.pause is not None:
            return  # calls that fail together are one failure of the maker
        seconds = min(FIRST_PAUSE * 2 ** min(maker.failures_in_a_row, 10), LONGEST_PAUSE)
        maker.failures_in_a_row += 1
        maker.pause = asyncio.get_running_loop().call_later(seconds, self._guarded, self._resume, maker)

    def _resume(self, maker: _Maker) -> None:
        maker.pause = None
        self._take_turn(maker)
        self._on_event()

    def _end(self, call: _Call) -> None:
        """The lease is over: the slot is free, whatever the maker still does."""
        call.deadline.cancel()
        del call.maker.calls[call.lease.id]
        if not call.maker.open and not call.maker.calls:
            call.maker.idle.set()
        self._take_turn(call.maker)

    def _abandon(self, maker: _Maker, leases: Sequence[Lease]) -> None:
        """The table has revoked these leases of the maker."""
        for lease in leases:
            call = maker.calls[lease.id]
            self._end(call)
            call.task.cancel()

    def _remove(self, maker: _Maker, death: str | None = None) -> None:
        name = maker.info.name
        del self._makers[name]
        maker.draining = True
        if maker.pause is not None:
            maker.pause.cancel()
        for table in self._tables:
            self._abandon(maker, table.detach(name, death))
        maker.idle.set()
        self._on_event()


def _state(maker: _Maker) -> str:
    if maker.draining:
        return "draining"
    return "unrouted" if not maker.routed else "paused" if maker.pause else "ready"
