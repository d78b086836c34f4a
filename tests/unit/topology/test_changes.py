"""A live run's config with makers more or fewer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.command_line import TINY
from topology.changes import grown, newcomers, shrunk, were_joining, were_lost
from topology.config import ConfigError, RunConfig, load_config


def config(*overrides: str) -> RunConfig:
    return load_config(TINY, overrides)


PRESENT = ("buffer", "maker/rollout/0", "maker/reward/0")


def test_a_group_that_grows_takes_the_lowest_numbers_that_are_free() -> None:
    present = ["maker/rollout/1", "maker/rollout/3", "maker/reward/0"]
    after = grown(config("makers.rollout.replicas=2"), "rollout", None, 2, present)
    assert after.makers["rollout"].replicas == 4
    assert newcomers(after, "rollout", present) == ["maker/rollout/0", "maker/rollout/2"]


def test_a_group_whose_last_maker_left_has_one_when_one_is_attached() -> None:
    present = ["maker/rollout/0"]
    after = grown(shrunk(config(), "maker/reward/0"), "reward", None, 1, present)
    assert after.makers["reward"].replicas == 1
    assert newcomers(after, "reward", present) == ["maker/reward/0"]


def test_only_makers_beyond_those_of_the_config_can_have_been_joining() -> None:
    rows = [{"name": "maker/rollout/0", "joining": False}, {"name": "maker/rollout/1", "joining": True}]
    there = ["buffer", "maker/reward/0", "maker/rollout/0", "maker/rollout/1", "maker/rollout/2"]
    assert were_joining(config(), there, rows) == ["maker/rollout/1", "maker/rollout/2"]
    # The config was written, the status is from before: it has joined.
    assert were_joining(config("makers.rollout.replicas=2"), there[:-1], rows) == []
    # One of the others is dead and will come back: the newcomer does not take its place.
    assert were_joining(config(), ["maker/rollout/1"], rows) == ["maker/rollout/1"]


def test_makers_that_died_with_the_supervisor_are_known_from_the_last_status_and_the_config() -> None:
    rows = [row("maker/rollout/0"), row("maker/rollout/1"), row("maker/rollout/2", joining=True), row("maker/reward/0")]
    two = config("makers.rollout.replicas=2")
    assert were_lost(two, [], rows) == ["maker/rollout/0", "maker/rollout/1", "maker/reward/0"]
    assert were_lost(two, ["maker/rollout/1", "maker/reward/0"], rows) == ["maker/rollout/0"]
    # The config says that one was detached a moment ago: the status is from before.
    assert were_lost(config(), ["maker/rollout/1", "maker/reward/0"], rows) == []
    # One was being detached, and has now come to its end.
    leaving = [row("maker/rollout/0", state="draining"), row("maker/rollout/1")]
    assert were_lost(two, [], leaving) == ["maker/rollout/1"]
    assert were_lost(two, [], [row("buffer")]) == []


def row(name: str, *, state: str = "healthy", joining: bool = False) -> dict[str, Any]:
    return {"name": name, "state": state, "joining": joining}


def test_a_new_group_has_the_settings_of_its_section_and_changes_nothing_else() -> None:
    before = config()
    section = {"kind": "rollout", "replicas": 2, "sampling": {"n": 4, "max_tokens": 3}}
    after = grown(before, "short", section, 1, PRESENT)
    assert newcomers(after, "short", PRESENT) == ["maker/short/0", "maker/short/1"]
    assert {name: maker for name, maker in after.makers.items() if name != "short"} == before.makers
    assert after.model_copy(update={"makers": before.makers}) == before


@pytest.mark.parametrize(
    ("overrides", "group", "section", "replicas", "message"),
    [
        ((), "other", None, 1, r"makers\.other: there is no such group in run tiny \(there are: rollout, reward\)"),
        ((), "rollout", None, 0, "replicas: 0, at least 1"),
        ((), "rollout", {"kind": "rollout"}, 1, "run tiny has that group: attach more of it with --replicas"),
        ((), "judge", {"kind": "mine:Judge"}, 1, "would fill the column `judge`, which nobody in run tiny needs"),
        ((), "other", {"kind": "reward"}, 1, r"makers\.other.*functions"),
        ((), "other", {"kind": "rollout", "colour": 1}, 1, r"makers\.other\.colour: unknown key"),
        (
            ("placement.colocate=[[rollout, policy]]",),
            "rollout",
            None,
            1,
            r"shares its devices in turns with policy \(placement\.colocate\)",
        ),
    ],
)
def test_what_cannot_join_is_refused_with_the_reason(
    overrides: tuple[str, ...], group: str, section: dict[str, object] | None, replicas: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        grown(config(*overrides), group, section, replicas, PRESENT)


def test_a_maker_that_leaves_is_missing_from_its_group_and_a_last_one_takes_the_group_along() -> None:
    before = grown(config("makers.rollout.replicas=2"), "short", {"kind": "rollout", "sampling": {"n": 4}}, 1, PRESENT)
    assert shrunk(before, "maker/rollout/0").makers["rollout"].replicas == 1
    assert list(shrunk(before, "maker/short/0").makers) == ["rollout", "reward"]


def test_the_last_maker_of_a_stage_stays_in_the_config_so_that_a_resumed_run_has_the_stage() -> None:
    before = config()
    assert shrunk(before, "maker/rollout/0") == before
