"""The short form of `make chaos`: one seed, a few faults of different kinds, one real run of the tiny model."""

from __future__ import annotations

import pytest

from tests.chaos.play import play
from tests.chaos.scenario import KINDS, scenario

SEED, FAULTS = 6220, 5


@pytest.mark.timeout(600)  # mostly the start of processes, on a busy machine
def test_a_run_that_is_killed_stopped_and_detached_at_random_ends_as_it_should() -> None:
    played = play(scenario(SEED, FAULTS))
    assert not played.wrong, "\n".join(played.wrong)
    assert len(played.done) == FAULTS


def test_a_seed_is_a_scenario_and_no_kind_of_fault_comes_again_before_each_has_come() -> None:
    drawn = [scenario(seed, len(KINDS)) for seed in range(20)]
    assert drawn == [scenario(seed, len(KINDS)) for seed in range(20)]
    own = [one for one in drawn if not one.joined]
    assert own
    assert all({(fault.deed, fault.victim) for fault in one.faults} == set(KINDS) for one in own)
    assert len({one.faults for one in drawn}) == 20
