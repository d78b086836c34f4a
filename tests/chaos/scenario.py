"""What is done to a run, drawn from a seed. Pure: the same seed is the same scenario."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Deed = Literal["kill", "stop", "attach", "detach", "detach --now"]
VICTIMS = (
    "maker/rollout",
    "maker/reward",
    "buffer",
    "weights",
    "trainer/policy",
    "trainer/policy/rank",
    "supervisor",
)
PHASES = ("wait_for_batch", "train", "publish", "checkpoint")
KINDS: tuple[tuple[Deed, str], ...] = (
    *(("kill", victim) for victim in VICTIMS),
    *(("stop", victim) for victim in VICTIMS),
    ("attach", "maker/rollout"),
    ("attach", "maker/reward"),
    ("detach", "maker/rollout"),
    ("detach", "maker/reward"),
    ("detach --now", "maker/rollout"),
    ("detach --now", "maker/reward"),
)


@dataclass(frozen=True)
class Fault:
    """`victim`: an actor, or what the names of several begin with; `which` of them (modulo their number).

    It comes `steps` trained steps after the one before (with `calm`: after the run has got over that), when the trainer is
    in `phase`, and `delay` seconds later.
    """

    deed: Deed
    victim: str
    which: int
    calm: bool
    steps: int
    phase: str
    delay: float

    @property
    def kind(self) -> str:
        return f"{self.deed} {self.victim}"


@dataclass(frozen=True)
class Scenario:
    """`ranks`: data-parallel ranks of the trainer. `joined`: the run is on a cluster that others started."""

    seed: int
    ranks: int
    joined: bool
    faults: tuple[Fault, ...]

    @property
    def name(self) -> str:
        return f"chaos-{self.seed}"


def scenario(seed: int, faults: int) -> Scenario:
    """Of so many faults no kind comes again before each has come once."""
    draw = random.Random(seed)
    ranks, joined = draw.choice((1, 2)), draw.random() < 0.4
    deck: list[tuple[Deed, str]] = []
    while len(deck) < faults:
        deck += draw.sample(KINDS, len(KINDS))
    drawn = (_fault(draw, deed, victim) for deed, victim in deck[:faults])
    return Scenario(seed, ranks, joined, tuple(drawn))


def _fault(draw: random.Random, deed: Deed, victim: str) -> Fault:
    calm = deed == "attach" or draw.random() < 0.5
    which, steps = draw.randrange(4), draw.randint(1, 4)
    if deed == "attach":
        steps += 4  # to compare with
    return Fault(deed, victim, which, calm, steps, draw.choice(PHASES), round(draw.random(), 2))
