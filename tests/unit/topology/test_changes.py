"""A live run's config with makers more or fewer."""

from __future__ import annotations

import pytest

from tests.command_line import TINY
from topology.changes import grown, newcomers, shrunk
from topology.config import ConfigError, RunConfig, load_config


def config(*overrides: str) -> RunConfig:
    return load_config(TINY, overrides)


def test_a_group_that_grows_takes_the_lowest_numbers_that_are_free() -> None:
    before = config("makers.rollout.replicas=2")
    after = grown(before, "rollout", None, 2)
    assert after.makers["rollout"].replicas == 4
    assert newcomers(before, after, "rollout", ["maker/rollout/1", "maker/rollout/3", "maker/reward/0"]) == [
        "maker/rollout/0",
        "maker/rollout/2",
    ]


def test_a_new_group_has_the_settings_of_its_section_and_changes_nothing_else() -> None:
    before = config()
    section = {"kind": "rollout", "replicas": 2, "sampling": {"n": 4, "max_tokens": 3}}
    after = grown(before, "short", section, 1)
    assert newcomers(before, after, "short", ["maker/rollout/0"]) == ["maker/short/0", "maker/short/1"]
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
        grown(config(*overrides), group, section, replicas)


def test_a_maker_that_leaves_is_missing_from_its_group_and_a_last_one_takes_the_group_along() -> None:
    before = grown(config("makers.rollout.replicas=2"), "short", {"kind": "rollout", "sampling": {"n": 4}}, 1)
    assert shrunk(before, "maker/rollout/0").makers["rollout"].replicas == 1
    assert list(shrunk(before, "maker/short/0").makers) == ["rollout", "reward"]


def test_the_last_maker_of_a_stage_stays_in_the_config_so_that_a_resumed_run_has_the_stage() -> None:
    before = config()
    assert shrunk(before, "maker/rollout/0") == before
