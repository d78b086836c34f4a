"""One process of a trainer: builds the learner that its config names and answers the calls of the rank group.

Methods are plain and synchronous; every one but `num_buckets` is collective. Nothing here imports torch before `start`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers.batch import Columns, StepPlan
from trainers.config import MegatronBackend, TrainerConfig
from trainers.learner import Learner, StepResult

if TYPE_CHECKING:
    import numpy as np

    from weights.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks of one trainer meet. `address` is `host:port` of the store that rank 0 opens."""

    rank: int
    world_size: int
    address: str
    timeout: float  # seconds, for the meeting and for every collective after it


class TrainerRank:
    """See the module. `failures_folder` receives the batch of a step that was skipped, when given."""

    def __init__(
        self,
        config: TrainerConfig,
        *,
        model_path: str,
        rendezvous: Rendezvous,
        bucket_bytes: int,
        seed: int,
        failures_folder: str | None = None,
    ) -> None:
        self.learner = build_learner(config, Path(model_path), rendezvous, seed, failures_folder)
        self._bucket_bytes = bucket_bytes

    def start(self) -> None:
        self.learner.start()

    def num_buckets(self) -> int:
        """Buckets that `export` returns beside the manifest; the same for every version."""
        raise NotImplementedError

    def train_step(self, plan: StepPlan, *rollouts: Columns) -> StepResult:
        """`rollouts` are the columns of stage `rollout`, one argument for each row of the plan, in its order."""
        if len(rollouts) != plan.rows:
            raise ValueError(f"step {plan.step} has {plan.rows} rows in its plan and {len(rollouts)} rollout columns")
        return self.learner.train_step(plan, rollouts)

    def export(self, version: int) -> tuple[Manifest | np.ndarray, ...]:
        """The current policy as (manifest, bucket, ..., bucket). Raises NonFinite when a weight is not finite."""
        raise NotImplementedError

    def save(self, folder: str) -> None:
        self.learner.save(Path(folder))

    def restore(self, folder: str) -> None:
        self.learner.restore(Path(folder))

    def export_huggingface(self, folder: str) -> None:
        self.learner.export_huggingface(Path(folder))

    def close(self) -> None:
        self.learner.close()


def build_learner(
    config: TrainerConfig, model_path: Path, rendezvous: Rendezvous, seed: int, failures_folder: str | None
) -> Learner:
    raise NotImplementedError


__all__ = ["Any", "MegatronBackend", "Rendezvous", "TrainerRank", "build_learner"]
