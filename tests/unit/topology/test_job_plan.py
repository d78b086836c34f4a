"""The plan of a job: no trainer and no weight store, and what it refuses."""

from __future__ import annotations

import pytest

from tests.unit.topology.test_plan import ROOMY, SMOL
from topology.config import ConfigError, load_config
from topology.consumer import pace_of
from topology.plan import make_plan

BEST = "configs/sample-best-of-n.yaml"


def test_a_job_has_a_collector_in_the_place_of_trainers_and_weights() -> None:
    plan = make_plan(load_config(BEST), SMOL, ROOMY)
    assert [actor.name for actor in plan.actors] == [
        "supervisor",
        "buffer",
        "collector",
        "maker/rollout/0",
        "maker/reward/0",
    ]
    assert plan.arithmetic["rows in flight at most"] == "2 parts x 32 = 64"
    assert plan.worst_case_staleness == 0
    assert ("buffer", "collector", "complete rows, by reference") in plan.edges


def test_a_job_passes_once_over_its_prompts_unless_told() -> None:
    assert pace_of(load_config(BEST)).prompts.epochs == 1
    assert pace_of(load_config(BEST, ("prompts.epochs=3",))).prompts.epochs == 3


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("collect.scores={prm: 1.0}", "makers: no group provides `prm`, which collect needs"),
        ("collect.scores={}", "collect.scores: empty, but collect.select goes by the score"),
        ("collect.select.keep=9", "collect.select.keep: 9 of the 8 samples"),
        ("collect.report={pass_at: [16]}", "collect.report.pass_at: 16 draws from the 8 samples"),
        ("buffer.max_staleness=4", "buffer.max_staleness: read only with `trainers`"),
        ("weights.every=2", "weights: read only with `trainers`"),
        ("checkpoint.every=2", "checkpoint: read only with `trainers`"),
    ],
)
def test_a_job_that_cannot_work_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(load_config(BEST, (override,)), SMOL, ROOMY)
