"""A maker that is started, asked and closed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any


def with_started(maker: Any, scenario: Callable[[Any], Awaitable[Any]]) -> Any:
    """What `scenario(maker)` returns."""

    async def main() -> Any:
        await maker.start()
        try:
            return await scenario(maker)
        finally:
            await maker.close()

    return asyncio.run(main())
