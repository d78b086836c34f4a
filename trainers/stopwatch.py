"""How long the phases of a step took."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

STEP = "step"  # the name of the whole


class Stopwatch:
    """Adds up seconds by phase between two laps. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._begun = clock()

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        begun = self._clock()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + self._clock() - begun

    def lap(self) -> Mapping[str, float]:
        """Seconds by phase since the last lap, the whole as `step`; begins the next."""
        now = self._clock()
        seconds = {**self._seconds, STEP: now - self._begun}
        self._seconds, self._begun = {}, now
        return seconds
