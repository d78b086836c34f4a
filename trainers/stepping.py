"""What the learners of all backends have in common: a policy (or value model) and the stepper that trains it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainers.algorithms.factory import build_loss
from trainers.batch import Columns, StepPlan
from trainers.config import ClippedPolicy, CriticConfig, TrainerConfig
from trainers.learner import RankValues, StepResult
from trainers.step import Stepper
from trainers.values import values_of


class SteppingLearner:
    """A learner whose `_load` gives its model. See `trainers.step.Stepper` for the settings."""

    _proximal = True
    policy: Any

    def __init__(
        self,
        config: TrainerConfig | CriticConfig,
        model_path: Path,
        *,
        steps: int,
        seed: int,
        past_versions: int = 1,
        failures_folder: Path | None = None,
    ) -> None:
        self._config = config
        self._model_path = model_path
        self._steps = steps
        self._seed = seed
        self._past_versions = past_versions
        self._failures_folder = failures_folder
        self._algorithm = build_loss(config)

    def _load(self) -> Any:
        """The model with its optimizer, a `trainers.step.Policy`."""
        raise NotImplementedError

    def _begin(self) -> None:
        self.policy = self._load()
        self._stepper = Stepper(
            self.policy,
            self._algorithm,
            self._config.optimizer,
            steps=self._steps,
            past_versions=self._past_versions,
            proximal=self._proximal and not _interpolates(self._config),
            failures_folder=self._failures_folder,
        )

    def train_step(self, plan: StepPlan, rollouts: Sequence[Columns]) -> StepResult:
        return self._stepper.run(plan, rollouts)

    def log_probs(self, plan: StepPlan, rollouts: Sequence[Columns]) -> RankValues:
        return values_of(self.policy, plan, rollouts)


def _interpolates(config: TrainerConfig | CriticConfig) -> bool:
    algorithm = config.algorithm
    return isinstance(algorithm, ClippedPolicy) and algorithm.corrections.proximal == "interpolated"


class Valuing:
    """Mixed into a learner whose model has values: implements `trainers.learner.ValueLearner`."""

    _proximal = False  # the plan has the values of the start of the step
    policy: Any

    def values(self, plan: StepPlan, rollouts: Sequence[Columns]) -> RankValues:
        return values_of(self.policy, plan, rollouts)
