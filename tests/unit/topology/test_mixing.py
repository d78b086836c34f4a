"""`distill.lmbda`: which group takes which rows, and what cannot be mixed."""

from __future__ import annotations

from pathlib import Path

import pytest

from makers.prompts.mixed import FROM_DATASET
from tests.unit.topology.test_shipped_configs import LAPTOP, MODELS, plan_of
from topology.changes import shrunk
from topology.config import ConfigError, RunConfig, load_config
from topology.plan import make_plan
from topology.roles import route_of, routes_of

CONFIG = Path("configs/distill-lmbda-tiny.yaml")
LMBDA = "trainers.policy.distill.lmbda"
GRPO = "trainers.policy.algorithm={type: reinforce_plus_plus}"


def mixed(*overrides: str) -> RunConfig:
    return load_config(CONFIG, overrides)


def test_drawn_rows_go_to_datasets_others_to_rollouts_and_both_to_the_teacher() -> None:
    config = mixed()
    dataset, rollout, teacher = (route_of(config, config.makers[group]) for group in ("dataset", "rollout", "teacher"))
    assert dataset is not None
    assert rollout is not None
    assert teacher is None
    assert [dataset.takes({FROM_DATASET: drawn}) for drawn in (True, False)] == [True, False]
    assert [rollout.takes({FROM_DATASET: drawn}) for drawn in (True, False)] == [False, True]
    assert rollout.takes({}), "a held-out prompt is not drawn"
    assert routes_of(config) == {"rollout": {dataset, rollout}, "teacher": {None}}
    assert set(shrunk(config, "maker/dataset/0").makers) == set(config.makers), "nobody else takes its rows"
    edges = {target: what for source, target, what in plan_of("distill-lmbda-tiny").edges if source == "buffer"}
    assert edges["maker/dataset"] == "leases of rows with from_dataset in [True]"


def test_without_a_mix_a_groups_own_route_stands() -> None:
    route = "makers.teacher.route={column: domain, values: [sums]}"
    config = load_config("configs/distill.yaml", [route])
    assert route_of(config, config.makers["teacher"]) == config.makers["teacher"].route
    assert route_of(config, config.makers["rollout"]) is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{LMBDA}=1.0"], "lmbda is 1, so that the policy samples every row"),
        ([f"{LMBDA}=1.0"], "makers.dataset: would take rows at random from makers.rollout"),
        (
            ["makers.dataset={kind: rollout, sampling: {n: 1, max_tokens: 8}}"],
            "other 25% of the rows",
        ),
        (["makers.rollout={kind: dataset, completion: answer, max_tokens: 8}"], "no group samples that fraction"),
        ([GRPO], "`reinforce_plus_plus` compares with: use the algorithm `distill`"),
        (["trainers.policy.distill.advantage_alpha=0.5"], "`distill` with advantage_alpha compares with"),
        (["makers.dataset.route={column: x, values: [1]}"], "makers.dataset.route: with .* the draw says"),
        (["makers.rollout.route={column: x, values: [1]}"], "makers.rollout.route: with .* the draw says"),
        (["makers.rollout.sampling.n=2"], "makers.rollout.sampling.n: 2 samples, but .* use n: 1"),
        (["makers.dataset={kind: dataset, chosen: a, rejected: b}"], "makers.dataset: 2 samples, but .* `completion`"),
    ],
)
def test_a_mix_that_cannot_be_made_is_told_with_its_remedy(overrides: list[str], message: str) -> None:
    tiny = MODELS["tiny-llama"]
    with pytest.raises(ConfigError, match=message):
        make_plan(mixed(*overrides), tiny, LAPTOP, {"teacher": tiny})
