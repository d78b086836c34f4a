"""Judges in a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.topology.test_plan import ROOMY, SMOL, demo
from topology.config import ConfigError
from topology.plan import make_plan
from topology.roles import stages_of

JUDGE = "makers.judge={kind: judge, model: {path: big}, template: '{completion}', engine: {max_model_len: 1024, kv_cache_gib: 1}}"
READ = "makers.reward.models=[{group: judge}]"


def test_a_judge_fills_a_stage_like_a_reward_model_and_its_memory_is_that_of_an_engine() -> None:
    config = demo(JUDGE, READ)
    plan = make_plan(config, SMOL, ROOMY, {"judge": SMOL})
    assert stages_of(config) == ("rollout", "reward", "reward/judge")
    assert ("maker/judge", "buffer", "reward/judge columns, by reference") in plan.edges
    memory = {actor.name: actor.memory_gib for actor in plan.actors}
    cache = config.makers["rollout"].engine.kv_cache_gib
    assert memory["maker/judge/0"] == pytest.approx(memory["maker/rollout/0"] + 1 - cache, abs=0.01)


@pytest.mark.parametrize(
    ("overrides", "own", "message"),
    [
        ((JUDGE,), {}, "makers.judge: no reward maker reads its scores"),
        (
            (JUDGE, "makers.reward.models=[{group: judge, reduce: min}]"),
            {},
            "gives one score a sample, so `min` is not",
        ),
        (
            (JUDGE, READ, "makers.judge.max_tokens=1000"),
            {"judge": SMOL},
            r"engine.max_model_len: 1024 has no room for a completion of up to 24 tokens and a verdict of 1000",
        ),
        ((JUDGE, READ), {"judge": replace(SMOL, max_positions=512)}, "1024 is more than the model's 512 positions"),
    ],
)
def test_a_judge_that_cannot_work_is_refused(overrides, own, message) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(demo(*overrides), SMOL, ROOMY, own)
