"""What an actor is taken for: every way from its start to its end, in virtual time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from topology.lifecycle import FIRST_PAUSE, LONGEST_PAUSE, Lifecycle, NotAllowed


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def healthy(clock: Callable[[], float], restarts: int = 3, window: float = 60.0) -> Lifecycle:
    actor = Lifecycle(restarts, window, clock)
    actor.loaded()
    actor.joined()
    return actor


def revive(actor: Lifecycle) -> None:
    actor.restart()
    actor.created()
    actor.joined()


def test_a_maker_is_stale_until_it_has_joined_and_nobody_relies_on_it_before() -> None:
    actor = Lifecycle(1, 60.0)
    assert (actor.state, actor.useful) == ("starting", False)
    actor.loaded()
    assert (actor.state, actor.useful, actor.alive) == ("stale", False, True)
    actor.joined()
    assert (actor.state, actor.useful) == ("healthy", True)


def test_silence_makes_a_suspect_and_an_answer_clears_it() -> None:
    actor = healthy(Clock())
    actor.silent()
    assert (actor.state, actor.useful) == ("suspect", True)
    actor.answered()
    assert actor.state == "healthy"


def test_each_death_within_the_window_doubles_the_pause_until_the_budget_is_spent() -> None:
    actor = healthy(Clock(), restarts=3)
    pauses = []
    while (pause := actor.died("killed")) is not None:
        pauses.append(pause)
        revive(actor)
    assert pauses == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert (actor.state, actor.cause) == ("retired", "killed")


def test_deaths_older_than_the_window_are_forgiven() -> None:
    clock = Clock()
    actor = healthy(clock, restarts=1, window=60.0)
    for _ in range(5):
        assert actor.died("killed") == FIRST_PAUSE
        revive(actor)
        clock.now += 60.0


def test_the_pause_never_grows_beyond_its_bound() -> None:
    actor = healthy(Clock(), restarts=20)
    for _ in range(20):
        pause = actor.died("killed")
        revive(actor)
    assert pause == LONGEST_PAUSE


def test_without_restarts_the_first_death_is_the_last() -> None:
    assert healthy(Clock(), restarts=0).died("killed") is None


def test_the_death_of_an_actor_that_is_drained_is_its_end_and_no_failure() -> None:
    actor = healthy(Clock())
    actor.drain()
    assert actor.died("killed") is None
    assert (actor.state, actor.cause, list(actor.deaths)) == ("retired", None, [])


def test_an_actor_whose_restart_failed_may_be_made_anew_once_more() -> None:
    life = Lifecycle(restarts=3, window=60.0)
    life.died("killed")
    life.restart()
    life.restart()
    assert life.state == "restarting"


def test_one_death_told_twice_is_an_error_of_the_watcher() -> None:
    actor = healthy(Clock())
    actor.died("killed")
    with pytest.raises(NotAllowed, match="an actor that is dead cannot become dead"):
        actor.died("killed")


class AnyLife(RuleBasedStateMachine):
    """Whatever is told in whatever order: no state but the known ones, and no more restarts than the budget."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.actor = Lifecycle(2, 30.0, self.clock)
        self.granted: list[float] = []

    @rule(seconds=st.floats(0.0, 20.0))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(what=st.sampled_from(["loaded", "joined", "silent", "answered", "drain", "restart", "created", "end"]))
    def something_is_told(self, what: str) -> None:
        before = self.actor.state
        try:
            getattr(self.actor, what)()
        except NotAllowed:
            assert self.actor.state == before

    @precondition(lambda self: self.actor.alive or self.actor.state == "restarting")
    @rule()
    def it_dies(self) -> None:
        if self.actor.died("killed") is not None:
            self.granted.append(self.clock.now)
            assert self.actor.state == "dead"
        else:
            assert self.actor.state == "retired"

    @invariant()
    def restarts_keep_to_the_budget(self) -> None:
        assert sum(time > self.clock.now - 30.0 for time in self.granted) <= 2

    @invariant()
    def who_is_useful_is_alive(self) -> None:
        assert self.actor.alive or not self.actor.useful


TestAnyLife = AnyLife.TestCase
TestAnyLife.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
