"""Generated pairs: which answer is the right one."""

from __future__ import annotations

import pytest

from makers.prompts import PromptsError
from makers.prompts.pairs import GymPairs

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def test_a_pair_is_a_right_answer_and_a_wrong_one_and_always_the_same() -> None:
    pairs = [GymPairs("chain_sum", 20, 3, SUMS)[index] for index in range(20)]
    for pair in pairs:
        first, second = (
            (int(word) for word in pair["prompt"].rpartition(":")[2].replace("=", " ").split("+")[:2])
            if ("+" in pair["prompt"])
            else (None, None)
        )
        if first is not None:
            assert int(pair["chosen"]) == first + second
        assert pair["rejected"] != pair["chosen"]
    assert pairs == [GymPairs("chain_sum", 20, 3, SUMS)[index] for index in range(20)]


def test_answers_that_are_all_equal_make_no_pair() -> None:
    with pytest.raises(PromptsError, match="all 1 entries have the answer"):
        GymPairs("chain_sum", 1, 3, SUMS)[0]
