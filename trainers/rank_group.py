"""Calling the ranks of one trainer together.

Guarantees: every call has a deadline; a call that fails names the method and the rank that failed, as soon as it
fails (the others may be waiting for it in a collective); results come back in rank order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any, Literal, Protocol

Dispatch = Literal["all", "slice"] | Callable[[int, int, tuple[Any, ...]], Sequence[Any]]
Execute = Literal["all", "first"]
Collect = Literal["none", "flatten"] | Callable[[list[Any]], Any]


class Worker(Protocol):
    """One rank, wherever it runs."""

    name: str

    async def invoke(self, method: str, *args: Any) -> Any: ...


class RankError(RuntimeError):
    """A rank failed, or did not answer in time. `rank` is its name; the cause is chained."""

    def __init__(self, rank: str, method: str, text: str) -> None:
        super().__init__(f"trainer rank {rank} {text} in {method}()")
        self.rank = rank
        self.method = method
        self.text = text

    def __reduce__(self) -> tuple[Any, ...]:
        """It crosses from the trainer's process to the supervisor's."""
        return RankError, (self.rank, self.method, self.text)


class LocalWorker:
    """A plain object as a worker. Its methods run one after another in one thread of their own."""

    def __init__(self, target: Any, name: str = "0") -> None:
        self.name = name
        self._target = target
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"rank-{name}")

    async def invoke(self, method: str, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, getattr(self._target, method), *args)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class RankGroup:
    """The ranks of one trainer as one callee.

    dispatch: which arguments a rank gets. `all`: the same for each. `slice`: every argument is a sequence, cut into
        equal parts in rank order. A callable gets (number of ranks, rank, arguments) and returns the rank's arguments.
    execute: `all` ranks, or only the `first`.
    collect: `none`: the list of results in rank order (with `first`: the one result). `flatten`: the results are
        sequences and are joined. A callable gets the list of results.
    """

    def __init__(self, workers: Sequence[Worker], timeout: float) -> None:
        if not workers:
            raise ValueError("a rank group needs at least one worker, got 0")
        self.workers = tuple(workers)
        self.timeout = timeout

    def __len__(self) -> int:
        return len(self.workers)

    async def call(
        self,
        method: str,
        *args: Any,
        dispatch: Dispatch = "all",
        execute: Execute = "all",
        collect: Collect = "none",
        timeout: float | None = None,
    ) -> Any:
        """Call `method` on the ranks. `timeout` in seconds replaces the group's own.

        Raises RankError on the first failure, or when the deadline passes, naming the ranks that have not answered.
        """
        workers = self.workers if execute == "all" else self.workers[:1]
        parts = [_arguments(dispatch, len(workers), i, args) for i in range(len(workers))]
        calls = [
            asyncio.create_task(worker.invoke(method, *part), name=worker.name)
            for worker, part in zip(workers, parts, strict=True)
        ]
        try:
            results = await self._results(method, calls, self.timeout if timeout is None else timeout)
        finally:
            for call in calls:
                call.cancel()
        if collect == "none":
            return results[0] if execute == "first" else results
        return list(chain.from_iterable(results)) if collect == "flatten" else collect(results)

    async def _results(self, method: str, calls: list[asyncio.Task[Any]], timeout: float) -> list[Any]:
        done, waiting = await asyncio.wait(calls, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
        for call in calls:
            if call in done and (error := call.exception()) is not None:
                raise RankError(call.get_name(), method, f"failed ({type(error).__name__}: {error})") from error
        if waiting:
            names = ", ".join(call.get_name() for call in calls if call in waiting)
            raise RankError(names, method, f"did not answer within {timeout:g} s")
        return [call.result() for call in calls]


def _arguments(dispatch: Dispatch, ranks: int, rank: int, args: tuple[Any, ...]) -> Sequence[Any]:
    if dispatch == "all":
        return args
    if dispatch == "slice":
        return [_part(arg, ranks, rank) for arg in args]
    return dispatch(ranks, rank, args)


def _part(arg: Sequence[Any], ranks: int, rank: int) -> Sequence[Any]:
    if len(arg) % ranks:
        raise ValueError(f"cannot slice {len(arg)} items over {ranks} ranks: make the number divisible")
    size = len(arg) // ranks
    return arg[rank * size : (rank + 1) * size]
