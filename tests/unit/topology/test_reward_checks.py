"""Reward models in a plan: what they are in it, and everything it refuses of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.topology.test_plan import ROOMY, SMOL, demo
from topology.config import ConfigError
from topology.plan import make_plan
from topology.roles import stages_of

JUDGE = "makers.judge={kind: reward_model, model: {path: judge}}"
STEPS = "makers.steps={kind: reward_model, model: {path: judge}, granularity: token}"
HEADS = {  # by granularity
    "sequence": replace(SMOL, architectures=("LlamaForSequenceClassification",), labels=1),
    "token": replace(SMOL, architectures=("LlamaForTokenClassification",), labels=2),
}


def read(*terms: str) -> str:
    return f"makers.reward.models=[{', '.join(f'{{{term}}}' for term in terms)}]"


def test_a_reward_model_fills_a_stage_of_its_own_between_the_rollout_and_the_reward() -> None:
    config = demo(JUDGE, STEPS, read("group: judge", "group: steps, reduce: min"))
    plan = make_plan(config, SMOL, ROOMY, {"judge": HEADS["sequence"], "steps": HEADS["token"]})
    assert stages_of(config) == ("rollout", "reward", "reward/judge", "reward/steps")
    assert ("maker/judge", "buffer", "reward/judge columns, by reference") in plan.edges
    judge = next(actor for actor in plan.actors if actor.name == "maker/judge/0")
    assert judge.memory_gib == pytest.approx(0.7 + 0.25 + 0.08, abs=0.01)


@pytest.mark.parametrize(
    ("overrides", "own", "message"),
    [
        (
            (read("group: jduge"), JUDGE),
            {},
            r"models.0.group: `jduge` is no group of `kind: reward_model` or `judge`; there are: judge",
        ),
        ((read("group: rollout"),), {}, "`rollout` is no group of `kind: reward_model` or `judge`; there are: none"),
        (
            (JUDGE,),
            {},
            r"makers.judge: no reward maker reads its scores: name it in one \(`models: \[{group: judge}\]`\)",
        ),
        (
            (STEPS, read("group: steps")),
            {},
            "models.0.reduce: makers.steps scores each token: say how these become one",
        ),
        ((JUDGE, read("group: judge, reduce: sum")), {}, "makers.judge gives one score a sample, so `sum` is not read"),
        (
            (JUDGE, read("group: judge"), "makers.judge.route={column: task, values: [a]}"),
            {},
            "makers.judge.route: only this group scores for `reward/judge`, so rows beyond .* would never be complete",
        ),
        (
            (
                JUDGE,
                read("group: judge"),
                "makers.reward.route={column: task, values: [a]}",
                "makers.more={kind: reward, functions: [{name: exact_match}], route: {column: task, values: [b]}}",
            ),
            {},
            r"makers.more.models: reads \[\], makers.reward reads \['judge'\]: all reward groups need the same ones",
        ),
        (
            (JUDGE.replace("judge=", "reasoning_gym="), read("group: reasoning_gym")),
            {},
            "models.0.group: a function has the same name, so both would fill `reward/reasoning_gym`: rename the group",
        ),
        (
            (JUDGE, read("group: judge")),
            {"judge": replace(SMOL, architectures=("LlamaForCausalLM",))},
            r"makers.judge.model.path: has no head .* \['LlamaForCausalLM'\], a class ...ForSequenceClassification is needed",
        ),
        (
            (STEPS, read("group: steps, reduce: min")),
            {"steps": HEADS["sequence"]},
            "has no head for granularity `token`: .* granularity: sequence for one of the other kind",
        ),
        (
            (JUDGE, read("group: judge")),
            {"judge": replace(HEADS["sequence"], labels=2)},
            r"makers.judge.model.path: its head has 2 labels \(config.json, id2label\), 1 needed",
        ),
        (
            (JUDGE, read("group: judge")),
            {"judge": replace(HEADS["sequence"], max_positions=128)},
            "makers.judge.model.path: has 128 positions, but rows of makers.rollout may have 256",
        ),
    ],
)
def test_a_reward_model_that_cannot_work_is_refused(overrides: tuple[str, ...], own: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(demo(*overrides), SMOL, ROOMY, own)
