"""Waiting that ends: at a deadline, or for an event that is more urgent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

T = TypeVar("T")


async def within(seconds: float, late: str, waiting: Awaitable[T]) -> T:
    """Raises TimeoutError with the text `late` after so many seconds; somebody else's deadline, named already, as it is."""
    timeout = asyncio.timeout(seconds)
    try:
        async with timeout:
            return await waiting
    except TimeoutError as error:
        if not timeout.expired():
            raise
        raise TimeoutError(late) from error


async def unless(interrupts: Sequence[asyncio.Event], seconds: float, late: str, task: asyncio.Future[T]) -> T | None:
    """The result of the task; None when one of the events came first. Raises TimeoutError as `within`."""
    events = [asyncio.ensure_future(event.wait()) for event in interrupts]
    try:
        await within(seconds, late, asyncio.wait({task, *events}, return_when=asyncio.FIRST_COMPLETED))
        return task.result() if task.done() else None
    finally:
        for event in events:
            event.cancel()
