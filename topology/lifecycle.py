"""What one actor is taken for, from its first start to its end: a pure state machine with an injected clock.

    starting -> stale -> healthy <-> suspect        a maker is stale until it holds the newest weights; others never are
    any of these -> dead -> restarting -> starting  after a pause that grows with each death, within a budget
    any of these -> restarting                      made anew because of the death of another
    any of these -> draining -> retired             taken out on purpose: its death is then no failure
    dead -> retired                                 the budget is spent

It starts nothing, asks nothing and waits for nothing: whoever watches the actor tells it what happened, and is told when to
make the actor anew.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, get_args

State = Literal["starting", "stale", "healthy", "suspect", "dead", "restarting", "draining", "retired"]

FIRST_PAUSE = 0.5  # seconds between the first death and the new start; doubles with each death within the window
LONGEST_PAUSE = 30.0


class NotAllowed(ValueError):
    """What was told cannot happen in the present state: an error of whoever tells it."""


@dataclass
class Lifecycle:
    """`restarts`: how often within `window` seconds the actor may be made anew. `state_since`: clock seconds."""

    restarts: int
    window: float
    clock: Callable[[], float] = time.monotonic
    state: State = "starting"
    cause: str | None = None  # of the last death
    deaths: deque[float] = field(default_factory=deque)  # within the window
    state_since: float = field(init=False)

    def __post_init__(self) -> None:
        self.state_since = self.clock()

    @property
    def alive(self) -> bool:
        """Whether there is a process that may answer."""
        return self.state in ("starting", "stale", "healthy", "suspect", "draining")

    @property
    def useful(self) -> bool:
        """Whether others may rely on it."""
        return self.state in ("healthy", "suspect")

    def loaded(self) -> None:
        """A maker has its engine up; what it makes is not wanted before `joined`."""
        self._go("stale", "starting")

    def joined(self) -> None:
        """It takes part from now on."""
        self._go("healthy", "starting", "stale")

    def silent(self) -> None:
        """No answer for half the time after which it is taken for hung."""
        if self.state == "healthy":
            self._go("suspect", "healthy")

    def answered(self) -> None:
        if self.state == "suspect":
            self._go("healthy", "suspect")

    def drain(self) -> None:
        self._go("draining", "starting", "stale", "healthy", "suspect", "dead", "restarting")

    def died(self, cause: str) -> float | None:
        """Its process is gone, or is about to be killed. Seconds until it is to be made anew; None: never again.

        Told twice of one death, it raises NotAllowed: somebody watches an actor that is not there.
        """
        if self.state == "draining":
            self._go("retired", "draining")
            return None
        self._go("dead", "starting", "stale", "healthy", "suspect", "restarting")
        self.cause = cause
        now = self.clock()
        self.deaths.append(now)
        while self.deaths[0] <= now - self.window:
            self.deaths.popleft()
        if len(self.deaths) > self.restarts:
            self._go("retired", "dead")
            return None
        return min(FIRST_PAUSE * 2 ** (len(self.deaths) - 1), LONGEST_PAUSE)

    def restart(self) -> None:
        """It is being made anew: after the pause of its death, or together with one that died; or once more, as that failed."""
        self._go("restarting", "starting", "stale", "healthy", "suspect", "dead", "restarting")

    def created(self) -> None:
        self._go("starting", "restarting")

    def end(self) -> None:
        """The run is over, or done with it. Who is dead stays dead."""
        if self.state != "dead":
            self._go("retired", *get_args(State))

    def _go(self, state: State, *allowed: State) -> None:
        if self.state not in allowed:
            raise NotAllowed(f"an actor that is {self.state} cannot become {state}")
        self.state, self.state_since = state, self.clock()
