"""What a maker is: an async function from a lease to columns, and a little around it.

A maker has no loop, no queue and no wiring. The owner of the experience channel calls `make`, up to `slots` times at
once, and everything a maker needs (weights, an engine, a clock) arrives through its constructor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from buffer.columns import Columns
from buffer.records import Lease, Produced


class Maker(Protocol):
    @property
    def stage(self) -> str:
        """The stage of a row that this maker fills."""
        ...

    @property
    def needs(self) -> tuple[str, ...]:
        """The stages whose columns are its inputs."""
        ...

    @property
    def slots(self) -> int:
        """How many calls of make() it takes at once."""
        ...

    async def start(self) -> None:
        """Become able to make rows. Raises when that is impossible."""
        ...

    async def make(self, lease: Lease, inputs: Mapping[str, Columns]) -> tuple[Produced, Columns]:
        """Fill the stage of one row. `inputs` maps each stage of `needs` to its columns (read-only).

        Raises DataFailure when the row is to blame, InfraFailure when this maker is.
        """
        ...

    def status(self) -> dict[str, float | int | str | None]:
        """Counters since the start, and the present state."""
        ...

    async def close(self) -> None:
        """Give everything back. Calls of make() still running fail with InfraFailure."""
        ...
