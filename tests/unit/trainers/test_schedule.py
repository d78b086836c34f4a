from __future__ import annotations

import pytest

from trainers.config import Optimizer
from trainers.schedule import learning_rate


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 0.775, 0.55, 0.325, 0.1]),
        ("cosine", [0.5, 1.0, 0.1 + 0.9 * 0.853553, 0.55, 0.1 + 0.9 * 0.146447, 0.1]),
    ],
)
def test_warm_up_then_schedule_reaches_the_minimum_in_the_last_step(schedule, expected):
    config = Optimizer(lr=1.0, min_lr=0.1, schedule=schedule, warmup_steps=2)

    assert [learning_rate(config, step, 6) for step in range(1, 7)] == pytest.approx(expected, abs=1e-5)
