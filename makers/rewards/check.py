"""Are the reward functions of a config usable? Asked before anything starts, in a process of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict

from makers.config import RewardFunction
from makers.rewards.pool import function_specs
from makers.rewards.wire import decode_answer, encode_request, receive, start_worker


def check_functions(
    functions: Sequence[RewardFunction], columns: Collection[str] | None = None, timeout: float = 60.0
) -> None:
    """Import each function, build it with its options, look at its signature.

    `columns`: what the prompts provide, when it is known; a function that needs another one is refused. The caller's
    interpreter imports nothing. Raises ValueError that names the function and the remedy, within `timeout` seconds.
    """
    names = [f"reward function {function.name or function.path}" for function in functions]
    process, channel = start_worker()
    try:
        channel.settimeout(timeout)
        channel.sendall(encode_request([asdict(spec) for spec in function_specs(functions)]))
        payload = receive(channel)
    except TimeoutError:
        raise ValueError(f"{', '.join(names)}: importing took longer than {timeout:g} s") from None
    finally:
        channel.close()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(5.0)
    if payload is None:
        raise ValueError(f"{', '.join(names)}: importing ended the interpreter (see its output above)")
    answer = decode_answer(payload)
    if "error" in answer:
        raise ValueError(f"{names[answer['function']]}: {answer['error']}")
    if columns is not None:
        for name, needed in zip(names, answer["columns"], strict=True):
            _check_columns(name, needed, columns)


def check_function(function: RewardFunction, columns: Collection[str] | None = None, timeout: float = 60.0) -> None:
    """`check_functions` for one."""
    check_functions([function], columns, timeout)


def _check_columns(name: str, needed: Sequence[str], columns: Collection[str]) -> None:
    missing = [column for column in needed if column not in columns]
    if missing:
        raise ValueError(
            f"{name}: needs the column {', '.join(missing)}; the prompts have: {', '.join(columns) or 'no other column'}. "
            "Rename the column, give the argument a default, or set it in `options`"
        )
