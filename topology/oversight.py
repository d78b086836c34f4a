"""Who looks after the supervisor, which looks after everybody else: the buffer does, and the consumer behind it.

A supervisor that died Ray starts again. One that hangs (stopped, not dead) would be noticed by nobody, so the buffer kills
it once it has not answered for `HUNG` seconds, and Ray starts another, which adopts the run. Should both hang at once, each
would be the only watcher of the other: whoever takes the complete rows (trainer or collector) kills the supervisor later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from topology.handles import call
from topology.runs import HUNG

HUNG_WITH_BUFFER = 2 * HUNG  # seconds after which the consumer does it: the buffer had its time
LOOKS = 6  # within the time after which it is taken for hung
log = logging.getLogger("oversight")


async def oversee(
    find: Callable[[], Any],
    end: Callable[[Any, str], None],
    adoptable: Callable[[], bool],
    limit: float = HUNG,
) -> None:
    """For ever. `find` gives the supervisor that there is (ValueError: none), `end` kills it and tells the cause.

    `adoptable`: whether another could go on with the run; while it starts or drains none could.
    """
    while True:
        await asyncio.sleep(limit / LOOKS)
        try:
            supervisor = find()
            await call(supervisor.ping.remote(), limit, "supervisor: ping")
        except TimeoutError:
            if adoptable():
                end(supervisor, f"supervisor: hung, no answer for {limit:g} s")
        except Exception as error:  # it is gone, and Ray starts another; or it failed at once: it does not hang
            log.info("supervisor: %s: %s", type(error).__name__, error)
