"""The worker processes of one reward maker.

Guarantees: a row is scored by one process, and waits for an idle one; a process that was lost is started again before
its next row; whatever a function does, `score` ends within the sum of the functions' timeouts (plus a start).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from buffer.records import DataFailure, InfraFailure, Messages
from makers.config import RewardFunction
from makers.rewards.calling import FunctionSpec
from makers.rewards.process import FunctionFailed, WorkerProcess
from makers.rewards.wire import encode_request


@dataclass(frozen=True, slots=True)
class Scores:
    values: list[list[float]]  # [functions][samples], unweighted
    seconds: list[float]  # [functions], inside the functions


@dataclass(slots=True)
class PoolCounts:
    """Since the start of the maker."""

    timeouts: int = 0
    crashes: int = 0  # processes that a function ended
    errors: int = 0  # functions that raised, or returned what is no list of rewards
    restarts: int = 0


class WorkerPool:
    def __init__(self, functions: Sequence[RewardFunction], *, workers: int, start_timeout: float) -> None:
        self.labels = labels(functions)
        self.counts = PoolCounts()
        self._timeouts = [function.timeout for function in functions]
        specs = function_specs(functions)
        self._workers = [WorkerProcess(specs, self._timeouts, start_timeout) for _ in range(workers)]
        self._idle: asyncio.Queue[WorkerProcess] = asyncio.Queue()
        self._closed = False

    async def start(self) -> None:
        """All processes, at once. Raises InfraFailure, with none left running."""
        started = await asyncio.gather(*(worker.start() for worker in self._workers), return_exceptions=True)
        errors = [result for result in started if isinstance(result, BaseException)]
        if errors:
            await self.close()
            raise errors[0]
        for worker in self._workers:
            self._idle.put_nowait(worker)

    async def score(
        self, where: str, completions: Sequence[str], prompt: str | Messages, fields: Mapping[str, Any]
    ) -> Scores:
        """The rewards of one row; `where` names it in errors. Raises DataFailure, InfraFailure (no process)."""
        try:
            request = encode_request((list(completions), prompt, dict(fields)))
        except Exception as error:
            raise DataFailure(f"{where}: its columns cannot be sent to the reward functions: {error}") from error
        worker = await self._idle.get()
        try:
            self._check_open(where)
            if not worker.alive:
                self.counts.restarts += 1
                await worker.start()
            return Scores(*await worker.score(request))
        except FunctionFailed as failure:
            self._check_open(where)  # a process that `close` ended is not the function's fault
            raise self._data_failure(failure, where) from failure
        except asyncio.CancelledError:
            worker.kill()  # it may be in the middle of an answer
            raise
        finally:
            self._idle.put_nowait(worker)

    def status(self) -> dict[str, int]:
        return {
            "workers": len(self._workers),
            "workers_alive": sum(worker.alive for worker in self._workers),
            "workers_idle": self._idle.qsize(),
            "timeouts": self.counts.timeouts,
            "crashes": self.counts.crashes,
            "errors": self.counts.errors,
            "restarts": self.counts.restarts,
        }

    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers if worker.pid is not None]

    async def close(self) -> None:
        """End all processes, also in the middle of a call. No process is left."""
        self._closed = True
        await asyncio.gather(*(worker.stop() for worker in self._workers))

    def _check_open(self, where: str) -> None:
        if self._closed:
            raise InfraFailure(f"{where}: not scored, the reward maker was closed")

    def _data_failure(self, failure: FunctionFailed, where: str) -> DataFailure:
        self.counts.timeouts += failure.timed_out
        self.counts.crashes += failure.crashed
        self.counts.errors += not (failure.timed_out or failure.crashed)
        return DataFailure(f"reward function {self.labels[failure.index]} on {where}: {failure}")


def labels(functions: Sequence[RewardFunction]) -> list[str]:
    """One name a function, unique: the built-in name or the part after the colon, with _2, _3 ... when repeated."""
    seen: Counter[str] = Counter()
    result: list[str] = []
    for function in functions:
        base = function.name or (function.path or "").rpartition(":")[2]
        seen[base] += 1
        while (label := base if seen[base] == 1 else f"{base}_{seen[base]}") in result:
            seen[base] += 1
        result.append(label)
    return result


def function_specs(functions: Sequence[RewardFunction]) -> list[FunctionSpec]:
    return [
        FunctionSpec(label, function.name, function.path, function.options, function.convention)
        for label, function in zip(labels(functions), functions, strict=True)
    ]
