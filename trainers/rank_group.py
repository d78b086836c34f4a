"""Calling the workers of one group together: the ranks of a trainer, or objects of a class of one's own.

Guarantees: every call has a deadline; a call that fails names the method and the rank that failed, as soon as it
fails (the others may be waiting for it in a collective); results come back in rank order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol

from buffer.records import ColumnsLost
from trainers.dispatch import Call, call_of

LOST_TOO = 10.0  # seconds in which all workers find out that an argument is lost


class Worker(Protocol):
    """One rank, wherever it runs."""

    name: str

    async def invoke(self, method: str, *args: Any) -> Any: ...


class RankError(RuntimeError):
    """A rank failed, or did not answer in time. `rank` is its name; the cause is chained."""

    def __init__(self, rank: str, method: str, text: str) -> None:
        super().__init__(f"rank {rank} {text} in {method}()")
        self.rank = rank
        self.method = method
        self.text = text

    def __reduce__(self) -> tuple[Any, ...]:
        """It crosses from the trainer's process to the supervisor's."""
        return RankError, (self.rank, self.method, self.text)


async def call_in(thread: Executor, method: Callable[..., Any], *args: Any) -> Any:
    """Call a method in a thread. One that answers with a Future goes on elsewhere: its call lasts until that is done, and the
    thread is free meanwhile."""
    answer = await asyncio.get_running_loop().run_in_executor(thread, method, *args)
    return await asyncio.wrap_future(answer) if isinstance(answer, Future) else answer


class LocalWorker:
    """A plain object as a worker. Its methods run one after another in one thread of their own."""

    def __init__(self, target: Any, name: str = "0") -> None:
        self.name = name
        self._target = target
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"rank-{name}")

    async def invoke(self, method: str, *args: Any) -> Any:
        return await call_in(self._thread, getattr(self._target, method), *args)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class RankGroup:
    """Several workers as one callee; `timeout` in seconds is the deadline of a call."""

    def __init__(self, workers: Sequence[Worker], timeout: float) -> None:
        if not workers:
            raise ValueError("a rank group needs at least one worker, got 0")
        self.workers = tuple(workers)
        self.timeout = timeout

    def __len__(self) -> int:
        return len(self.workers)

    async def call(self, method: Callable[..., Any] | str, *args: Any, timeout: float | None = None, **how: Any) -> Any:
        """Call a method of the workers' class, as its `@function` says; one without, or a name: the same to all.

        `how` (dispatch, execute, collect: see `trainers.dispatch.Call`) replaces what the mark says, `timeout` the
        group's own. Raises RankError on the first failure, or when the deadline passes, naming the ranks that have not
        answered; ColumnsLost when no rank could begin, since none was brought its arguments.
        """
        name, call = (method, None) if isinstance(method, str) else (method.__name__, call_of(method))
        call = replace(call or Call(), **how)
        workers = self.workers if call.execute == "all" else self.workers[:1]
        parts = [call.arguments(len(workers), i, args) for i in range(len(workers))]
        calls = [
            asyncio.create_task(worker.invoke(name, *part), name=worker.name)
            for worker, part in zip(workers, parts, strict=True)
        ]
        try:
            results = await self._results(name, calls, self.timeout if timeout is None else timeout)
        finally:
            for task in calls:
                task.cancel()
        return call.collected(results)

    async def _results(self, method: str, calls: list[asyncio.Task[Any]], timeout: float) -> list[Any]:
        done, waiting = await asyncio.wait(calls, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
        if any(isinstance(call.exception(), ColumnsLost) for call in done):
            done, waiting = await asyncio.wait(calls, timeout=LOST_TOO)
            if not waiting and all(isinstance(call.exception(), ColumnsLost) for call in calls):
                raise ColumnsLost(str(calls[0].exception()))
        for call in calls:
            if call in done and (error := call.exception()) is not None:
                raise RankError(call.get_name(), method, f"failed ({type(error).__name__}: {error})") from error
        if waiting:
            names = ", ".join(call.get_name() for call in calls if call in waiting)
            raise RankError(names, method, f"did not answer within {timeout:g} s")
        return [call.result() for call in calls]
