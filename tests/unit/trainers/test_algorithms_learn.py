"""Each algorithm, from rewards to optimizer steps, learns a bandit: a table of logits stands for the model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.fakes_trainer import make_row
from trainers.algorithms.base import TokenBatch
from trainers.algorithms.factory import build_algorithm
from trainers.batch import Totals
from trainers.config import TorchBackend, TrainerConfig
from trainers.planner import Batch, StepPlanner

TOKENS, WANTED, GROUPS, SAMPLES, LENGTH = 5, 3, 4, 4, 2
ALGORITHMS = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_plus_plus")


class Bandit:
    """The policy draws every token from one distribution; a sample's reward is its fraction of WANTED tokens."""

    def __init__(self, config: TrainerConfig) -> None:
        self.logits = torch.zeros(TOKENS, requires_grad=True)
        self.optimizer = torch.optim.Adam([self.logits], lr=0.1)
        self.planner = StepPlanner(config, LENGTH)
        self.loss = build_algorithm(config.algorithm)
        self.random = torch.Generator().manual_seed(0)

    def step(self) -> float:
        """Mean reward of the samples of one step."""
        probabilities = self.logits.detach().softmax(0)
        drawn = torch.multinomial(probabilities, GROUPS * SAMPLES * LENGTH, True, generator=self.random)
        rewards = (drawn == WANTED).float().view(GROUPS, SAMPLES, LENGTH).mean(-1)
        rows = [make_row(i, rewards=rewards[i].tolist(), lengths=[LENGTH] * SAMPLES) for i in range(GROUPS)]
        plan = self.planner.plan(Batch(rows, [dict(row.columns) for row in rows], [0] * GROUPS), 1, 0)
        advantages = torch.as_tensor(np.concatenate(plan.advantages)).repeat_interleave(LENGTH)
        current = self.logits.log_softmax(0)[drawn]
        count = drawn.numel()
        batch = TokenBatch(
            current=current,
            proximal=current.detach(),
            behaviour=current.detach(),
            reference=None,
            entropy=torch.zeros(count),
            advantages=advantages,
            samples=torch.arange(count) // LENGTH,
            lengths=torch.full((count,), float(LENGTH)),
            totals=Totals(count, count // LENGTH, LENGTH),
        )
        self.optimizer.zero_grad()
        self.loss(batch).loss.backward()
        self.optimizer.step()
        return float(rewards.mean())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_mean_reward_rises_from_a_fifth_to_more_than_four_fifths(name: str) -> None:
    bandit = Bandit(TrainerConfig(algorithm={"type": name}, backend=TorchBackend(type="torch"), steps=60))

    rewards = [bandit.step() for _ in range(60)]

    assert np.mean(rewards[:3]) < 0.4
    assert np.mean(rewards[-10:]) > 0.8
