"""What a maker is: an async function from a lease to columns, and a little around it.

A maker has no loop, no queue and no wiring. The owner of the experience channel calls `make`, up to `slots` times at
once, and everything a maker needs (weights, an engine, a clock) arrives through its constructor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from buffer.columns import Columns
from buffer.records import Lease, Produced


class Sleeper(Protocol):
    """What a maker also offers where it shares its device with others in turns.

    Whoever hands the device over gives the maker no new rows, then calls sleep(), and gives it rows again after wake().
    A row that comes in between all the same waits for wake(), within the time of its lease.
    """

    async def sleep(self, level: int) -> None:
        """Finish the rows in progress and give the device's memory back. 1: keep the weights in the host's memory; 2: drop
        them. Nothing happens when it is asleep already. A call that fails or is cancelled leaves the maker awake."""
        ...

    async def wake(self) -> None:
        """Take the device again, and then the newest weights. Nothing happens when it is awake already."""
        ...


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
