"""The process in which reward functions run: `python -m makers.rewards.worker FD PARENT_PID`.

Guarantees:
1. It ends with its parent: at the end of file of its channel and, on Linux, by the kernel, even inside C code.
2. What a function prints cannot reach the channel.
3. It imports the standard library and what the functions import; no torch, ray or vllm of its own.

Consumes: the list of functions, once; then one request a row. Produces: for each request one answer a function, in
order, up to the first that fails. Waits for: its channel. Unblocked by: a request, or the parent's death.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

from makers.dotted import short_traceback
from makers.rewards.calling import Call, FunctionSpec, RewardError, build_call
from makers.rewards.wire import encode_answer, receive

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Ask the kernel for SIGKILL when the thread that started us ends; a parent that has already gone ends us now."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)


def serve(channel: socket.socket) -> None:
    """Build the functions, say so, then answer requests until the channel ends."""
    specs = _receive(channel)
    if specs is None:
        return
    calls: list[Call] = []
    for index, spec in enumerate(specs):
        try:
            calls.append(build_call(FunctionSpec(**spec)))
        except Exception as error:
            text = str(error) if isinstance(error, ValueError) else short_traceback(error)
            channel.sendall(encode_answer({"function": index, "error": text}))
            return
    channel.sendall(encode_answer({"columns": [call.columns for call in calls]}))
    wait = _Waiter()
    while (payload := receive(channel)) is not None:
        _answer(channel, payload, calls, wait)


def _answer(channel: socket.socket, payload: bytes, calls: Sequence[Call], wait: _Waiter) -> None:
    try:
        completions, prompt, fields = pickle.loads(payload)
    except Exception as error:  # a column of a class that this process cannot import
        channel.sendall(encode_answer({"error": f"cannot receive the row\n{short_traceback(error)}"}))
        return
    for call in calls:
        start = time.perf_counter()
        try:
            answer: dict[str, Any] = {"values": call(completions, prompt, fields, wait)}
        except RewardError as error:
            answer = {"error": str(error)}
        answer["seconds"] = time.perf_counter() - start
        channel.sendall(encode_answer(answer))
        if "error" in answer:
            return


class _Waiter:
    """Runs what async functions return on one event loop, so that their clients live from row to row."""

    def __init__(self) -> None:
        self._runner: Any = None

    def __call__(self, awaitable: Any) -> Any:
        import asyncio  # 50 ms that functions which are not async need not pay

        if self._runner is None:
            self._runner = asyncio.Runner()

        async def result() -> Any:
            return await awaitable

        return self._runner.run(result())


def _receive(channel: socket.socket) -> Any:
    payload = receive(channel)
    return None if payload is None else pickle.loads(payload)


def main(arguments: Sequence[str]) -> None:
    file, parent = (int(argument) for argument in arguments)
    die_with_parent(parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # what the parent's thread had blocked is not our business
    os.set_inheritable(file, False)
    with socket.socket(fileno=file) as channel:
        try:
            serve(channel)
        except (BrokenPipeError, ConnectionResetError):  # the parent ended while a function ran: nobody to answer
            return


if __name__ == "__main__":
    main(sys.argv[1:])
