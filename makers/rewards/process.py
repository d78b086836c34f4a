"""One worker process as its maker sees it: started, asked, killed.

Invariants: at most one request is on the channel at a time; a process that was left in the middle of an answer
(deadline, cancellation, broken channel) is killed with its children and never asked again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from buffer.records import InfraFailure
from makers.rewards.calling import FunctionSpec
from makers.rewards.wire import HEADER, decode_answer, encode_request, start_worker

EXIT_SECONDS = 0.05
REAP_SECONDS = 5.0  # a killed process that is not gone by then hangs in the kernel; its slot is not waited for


class FunctionFailed(Exception):
    """A function gave no rewards: `index` among the functions, `reason`, and whether its process was lost."""

    def __init__(self, index: int, reason: str, *, timed_out: bool = False, crashed: bool = False) -> None:
        super().__init__(reason)
        self.index = index
        self.timed_out = timed_out
        self.crashed = crashed


class WorkerProcess:
    def __init__(self, specs: Sequence[FunctionSpec], timeouts: Sequence[float], start_timeout: float) -> None:
        self._specs = specs
        self._timeouts = timeouts  # seconds, one a function
        self._start_timeout = start_timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._broken = False

    @property
    def alive(self) -> bool:
        return self._process is not None and not self._broken and not self._reader.at_eof()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start, or start again, and wait until the functions are imported. Raises InfraFailure."""
        await self.stop()
        process, channel = start_worker()
        self._reader, self._writer = await asyncio.open_connection(sock=channel)
        self._process, self._broken = process, True  # until it has answered
        try:
            async with asyncio.timeout(self._start_timeout):
                answer = await self._exchange(encode_request([asdict(spec) for spec in self._specs]))
        except TimeoutError:
            await self.stop()
            raise InfraFailure(
                f"the process of the reward functions was not ready within {self._start_timeout:g} s: "
                "raise start_timeout of this maker, or let the functions import less"
            ) from None
        except (asyncio.IncompleteReadError, OSError) as error:
            raise InfraFailure(
                f"the process of the reward functions ended at its start ({await self.stop()})"
            ) from error
        if "error" in answer:
            await self.stop()
            raise InfraFailure(f"reward function {self._specs[answer['function']].label}: {answer['error']}")
        self._broken = False

    async def score(self, request: bytes) -> tuple[list[list[float]], list[float]]:
        """(values, seconds) of each function for one row. Raises FunctionFailed."""
        values: list[list[float]] = []
        seconds: list[float] = []
        start = time.monotonic()
        self._broken = True  # until the last answer is in
        for index, limit in enumerate(self._timeouts):
            try:
                async with asyncio.timeout(limit):
                    answer = await self._exchange(request if index == 0 else b"")
            except TimeoutError:
                await self.stop()
                reason = f"did not return within {limit:g} s; its process was killed"
                raise FunctionFailed(index, reason, timed_out=True) from None
            except (asyncio.IncompleteReadError, OSError) as error:
                ended = f"ended its process ({await self.stop()}) after {time.monotonic() - start:.1f} s"
                raise FunctionFailed(index, ended, crashed=True) from error
            if "error" in answer:
                self._broken = False
                raise FunctionFailed(index, answer["error"])
            values.append(answer["values"])
            seconds.append(answer["seconds"])
        self._broken = False
        return values, seconds

    def kill(self) -> None:
        """SIGKILL to the process and the children that stayed in its group; returns at once, the next start reaps it."""
        self._broken = True
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):  # ended by itself a moment ago
                os.killpg(self._process.pid, signal.SIGKILL)

    async def stop(self) -> str:
        """End the process, whatever it does, and say how it ended. Safe to call at any time."""
        process, self._process = self._process, None
        if process is None:
            return "not started"
        if self._reader.at_eof():  # it is ending by itself: let it tell its own exit code
            await asyncio.sleep(EXIT_SECONDS)
        self._writer.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # before it is reaped: until then the id is its own
        deadline = time.monotonic() + REAP_SECONDS
        while process.poll() is None and time.monotonic() < deadline:  # noqa: ASYNC110  a process sets no event
            await asyncio.sleep(0.002)
        return describe_exit(process.returncode)

    async def _exchange(self, request: bytes) -> dict[str, Any]:
        if request:
            self._writer.write(request)
            await self._writer.drain()
        header = await self._reader.readexactly(HEADER.size)
        return decode_answer(await self._reader.readexactly(HEADER.unpack(header)[0]))


def describe_exit(code: int | None) -> str:
    if code is None:
        return "still ending"
    return f"exit code {code}" if code >= 0 else f"signal {-code}, {signal.Signals(-code).name}"
