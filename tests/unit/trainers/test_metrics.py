from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fakes_trainer import buffer_status, make_row, step_result
from trainers.batch import StepPlan
from trainers.estimates import Estimates
from trainers.flops import ModelShape, Utilisation
from trainers.metrics import MetricsBuilder, Shares, StepRecord, bound_by
from trainers.planner import Batch
from trainers.training import Trained

MAKER = {
    "version": 3,
    "tokens_generated": 100,
    "seconds_generating": 4.0,
    "seconds_sync_pause": 0.5,
    "seconds_syncing": 1.0,
}


def batch() -> Batch:
    rows = [
        make_row(0, rewards=(0.0, 1.0), lengths=(3, 2), finish=(1, 0)),
        make_row(1, rewards=(1.0, 1.0), lengths=(4, 1)),
    ]
    return Batch(rows, [dict(row.columns) for row in rows], ages=[0, 1])


def record(**changes: Any) -> StepRecord:
    parts: dict[str, Any] = {
        "trained": Trained(StepPlan(7, None, (), ()), step_result(7, seconds={"pack": 0.5, "train": 4.0})),
        "batch": batch(),
        "version": 7,
        "seconds": {"step": 10.0, "wait_for_batch": 4.0, "train": 5.0, "publish": 0.5},
        "buffer": buffer_status(infra=1, died=2, data=3, timeout=4),
        "makers": {"maker/rollout/0": MAKER, "maker/reward/0": {"seconds_scoring": 6.0, "workers": 2}},
    }
    return StepRecord(**(parts | changes))


def test_figures_of_a_step_have_their_values() -> None:
    found = MetricsBuilder(wall_clock=lambda: 1234.5).build(record())
    expected = {
        "step": 7,
        "time": 1234.5,
        "version/trainer": 7,
        "version/maker_min": 3,
        "version/maker_max": 3,
        "staleness/mean": 0.5,
        "staleness/max": 1,
        "staleness/dropped": 2,
        "reward/mean": 0.75,
        "reward/std": pytest.approx(np.std([0, 1, 1, 1])),
        "reward/frac_zero_std": 0.5,
        "response_length/mean": 2.5,
        "response_length/max": 4,
        "truncated_ratio": 0.25,
        "loss": 0.5,
        "kl": None,
        "entropy": 1.5,
        "mismatch/kl": 0.001,
        "is/ess": None,
        "time/wait_for_batch": 4.0,
        "time/train": 5.0,
        "time/compute": 4.5,
        "time/publish": 0.5,
        "time/evaluate": 0.0,
        "time/step": 10.0,
        "time/generate": 4.0,
        "time/score": 3.0,
        "time/sync": 1.0,
        "time/sync_pause": 0.5,
        "idle/trainer": 0.4,
        "idle/maker": 0.6,
        "buffer/rows": 3,
        "buffer/bytes": 1000,
        "buffer/age": 0.5,
        "tokens_per_s/generated": 10.0,
        "tokens_per_s/trained": 1.0,
        "failures/infra": 3,
        "failures/data": 3,
        "failures/timeout": 4,
        "bound_by": "trainer",
    }
    assert {key: found[key] for key in expected} == expected


def ppo_record() -> StepRecord:
    estimates = Estimates([], {}, mean_return=0.4, explained_variance=0.3)
    critic = step_result(7, loss=0.25, grad_norm=3.0, metrics={"value/clip_frac": 0.125})
    trained = Trained(
        StepPlan(7, None, (), ()),
        step_result(7),
        estimates,
        critic,
        {"kl": 0.02, "kl/k1": 0.02, "reward/kl_penalty": 0.01},
    )
    return record(trained=trained, seconds={"step": 10.0, "train": 5.0, "values": 1.5})


def test_figures_of_a_critic_have_their_values_and_are_there_only_with_one() -> None:
    found, without = MetricsBuilder().build(ppo_record()), MetricsBuilder().build(record())
    expected = {
        "reward/kl_penalty": 0.01,
        "kl/k1": 0.02,
        "value/loss": 0.25,
        "value/clip_frac": 0.125,
        "value/explained_variance": 0.3,
        "value/returns": 0.4,
        "value/grad_norm": 3.0,
        "time/values": 1.5,
    }
    assert {key: found[key] for key in set(found) - set(without)} == expected
    assert (found["kl"], found["loss"]) == (0.02, 0.5)


def test_object_is_flat_has_fewer_than_60_keys_and_each_is_documented() -> None:
    found = MetricsBuilder().build(ppo_record())
    assert len(found) < 60
    plain = record()
    found |= MetricsBuilder().build(replace(plain, batch=replace(plain.batch, replaced=2)))
    assert found["reward/replaced"] == 2
    utilisation = Utilisation(ModelShape(1, 1, 1), peak_tflops=1.0, share_prompt=True)
    found |= MetricsBuilder(utilisation=utilisation).build(record())
    assert all(isinstance(value, int | float | str | None) for value in found.values())
    text = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    table = text[: text.index("## bound_by")]
    documented = {
        key
        for line in table.splitlines()
        if line.startswith("| `")
        for key in re.findall(r"`([^`]+)`", line.split("|")[1])
    }
    assert documented == set(found) | {"kl/k2", "kl/k3"}


def test_work_of_makers_is_what_they_did_since_the_object_before() -> None:
    builder = MetricsBuilder()
    builder.begin({"maker/rollout/0": MAKER})
    more = MAKER | {"tokens_generated": 150, "seconds_generating": 6.0}
    newcomer = {"version": 4, "tokens_generated": 30, "seconds_generating": 1.0}
    found = builder.build(record(makers={"maker/rollout/0": more, "maker/rollout/1": newcomer}))
    assert found["tokens_per_s/generated"] == 8.0  # 50 and 30 tokens in 10 s
    assert found["time/generate"] == 1.5  # mean of 2 and 1
    assert (found["version/maker_min"], found["version/maker_max"]) == (3, 4)
    assert found["time/score"] is None


def test_counter_of_a_restarted_maker_does_not_go_backwards() -> None:
    builder = MetricsBuilder()
    builder.begin({"maker/rollout/0": MAKER})
    found = builder.build(record(makers={"maker/rollout/0": {"tokens_generated": 20, "seconds_generating": 1.0}}))
    assert found["tokens_per_s/generated"] == 2.0
    assert found["version/maker_min"] is None


def test_figures_of_makers_are_unknown_without_makers() -> None:
    found = MetricsBuilder().build(record(makers={}))
    assert (found["time/generate"], found["idle/maker"], found["tokens_per_s/generated"]) == (None, None, None)


def test_bound_is_that_of_the_last_steps_and_leaves_out_steps_with_an_evaluation() -> None:
    builder = MetricsBuilder()
    total = 0.0

    def step(wait: float, train: float, generate: float, **more: float) -> Any:
        nonlocal total
        total += generate
        seconds = {"step": 10.0, "wait_for_batch": wait, "train": train, **more}
        return builder.build(record(seconds=seconds, makers={"m": MAKER | {"seconds_generating": total}}))["bound_by"]

    assert [step(6.0, 4.0, 9.5) for _ in range(2)] == ["maker", "maker"]
    assert step(0.0, 1.0, 10.0, evaluate=9.0) == "maker"
    assert [step(0.2, 9.8, 5.0) for _ in range(8)][-1] == "trainer"


@pytest.mark.parametrize(
    ("shares", "bound", "knob"),
    [
        # train, wait, publish, generate, score, sync
        (Shares(0.95, 0.03, 0.02, 0.0, 0.5, 0.1, 0.0), "trainer", "give the trainer more"),
        (Shares(0.9, 0.05, 0.05, 0.0, 1.0, 0.1, 0.0), "trainer", "give the trainer more"),
        (Shares(0.2, 0.02, 0.08, 0.66, 0.3, 0.1, 0.0), "trainer", "raise checkpoint.every"),
        (Shares(0.4, 0.58, 0.02, 0.0, 0.97, 0.1, 0.0), "maker", "add rollout replicas"),
        (Shares(0.3, 0.68, 0.02, 0.0, 0.5, 0.95, 0.0), "reward", "add reward replicas"),
        (Shares(0.3, 0.05, 0.65, 0.0, 0.5, 0.1, 0.1), "sync", "raise weights.every"),
        (Shares(0.3, 0.68, 0.02, 0.0, 0.35, 0.1, 0.6), "sync", "raise weights.every"),
        (Shares(0.4, 0.58, 0.02, 0.0, 0.55, 0.1, 0.0), "maker", "raise buffer.max_staleness"),
        (Shares(0.6, 0.38, 0.02, 0.0, 0.4, 0.1, 0.0), "trainer", "raise buffer.max_staleness"),
    ],
)
def test_bound_names_the_part_and_the_knob(shares: Shares, bound: str, knob: str) -> None:
    found, text = bound_by(shares)
    assert found == bound
    assert knob in text


def test_saturated_part_is_not_blamed_on_staleness() -> None:
    assert "max_staleness" not in bound_by(Shares(0.4, 0.58, 0.02, 0.0, 0.97, 0.1, 0.0))[1]
