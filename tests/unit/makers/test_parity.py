"""Whether two engines compute the same, by the tokens they prefer and how much."""

from __future__ import annotations

import math

import pytest

from makers.parity import BOUND, Probe, difference

ONE = Probe(3, (5, 6, 7, 8), (-0.1, -0.2, -0.3, -0.4))


def test_a_maker_agrees_with_itself() -> None:
    assert difference(ONE, ONE) == 0.0


def test_the_difference_is_the_mean_over_the_tokens_they_share() -> None:
    other = Probe(3, ONE.token_ids, (-0.1, -0.25, -0.3, -0.55))
    assert difference(ONE, other) == pytest.approx(0.2 / 4)


def test_nothing_is_compared_behind_the_first_token_in_which_they_differ() -> None:
    """From there on they answer different questions; at it, both tell how much they prefer what they prefer."""
    other = Probe(3, (5, 6, 9, 1), (-0.1, -0.2, -0.36, -9.0))
    assert difference(ONE, other) == pytest.approx(0.06 / 3)


def test_another_model_is_far_beyond_the_bound() -> None:
    assert difference(ONE, Probe(3, (1, 2, 3, 4), (-2.0, -2.0, -2.0, -2.0))) > BOUND


@pytest.mark.parametrize("broken", [Probe(3, (), ()), Probe(3, (5,), (math.nan,))])
def test_a_maker_that_answers_nothing_or_not_a_number_does_not_agree(broken: Probe) -> None:
    assert not difference(ONE, broken) <= BOUND
