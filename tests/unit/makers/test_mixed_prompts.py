"""Which prompts a dataset answers: drawn by seed and place, the same whenever they are asked for again."""

from __future__ import annotations

import pytest

from buffer.records import Prompt
from makers.prompts import PromptsError
from makers.prompts.mixed import FROM_DATASET, MixedPrompts
from makers.prompts.source import StreamedPrompts

ROWS = [Prompt(str(i), f"{i} + 1", {"answer": str(i + 1)}) for i in range(50)]


def mixed(on_policy: float, seed: int = 3, epochs: int = 40) -> MixedPrompts:
    return MixedPrompts(StreamedPrompts(lambda: ROWS, epochs=epochs), on_policy=on_policy, seed=seed)


def drawn(source: MixedPrompts) -> list[bool]:
    return [prompt.fields[FROM_DATASET] for prompt in iter(source.next, None)]


def test_one_minus_lmbda_of_the_prompts_are_the_datasets_and_their_fields_stay() -> None:
    found = drawn(mixed(0.75))
    assert len(found) == 2000
    assert sum(found) / 2000 == pytest.approx(0.25, abs=0.03)  # three standard deviations
    prompt = mixed(0.75).next()
    assert prompt is not None
    assert (prompt.id, prompt.content, prompt.fields["answer"]) == ("0", "0 + 1", "1")


def test_the_draw_goes_by_seed_and_place_so_that_a_pass_and_a_seed_have_draws_of_their_own() -> None:
    found = drawn(mixed(0.5))
    assert found == drawn(mixed(0.5))
    assert found != drawn(mixed(0.5, seed=4))
    assert found[:50] != found[50:100]
    assert drawn(mixed(0.5, seed=-1)) == drawn(mixed(0.5, seed=-1))


def test_a_source_that_goes_on_at_a_cursor_draws_what_the_whole_one_drew() -> None:
    found = drawn(mixed(0.5))
    for place in (0, 1, 77):
        source = mixed(0.5)
        source.seek(place)
        assert source.cursor == place
        assert drawn(source) == found[place:]


def test_a_column_with_the_reserved_name_is_told_and_not_written_over() -> None:
    rows = [Prompt("0", "1 + 1", {FROM_DATASET: 1})]
    with pytest.raises(PromptsError, match="column `from_dataset` is set by `distill.lmbda`"):
        MixedPrompts(StreamedPrompts(lambda: rows, epochs=1), on_policy=0.5, seed=0).next()
