"""One process of a trainer: builds the learner that its config names and answers the calls of the rank group.

Methods are plain, synchronous and collective; those that the controller calls say how. Importing this module imports
neither torch nor Megatron; the starter of the process sets `TORCHDYNAMO_DISABLE=1` in its environment, which saves memory
and compiler runs on CPU.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers.batch import Columns, StepPlan
from trainers.config import CriticConfig, MegatronBackend, TrainerConfig
from trainers.dispatch import first_result, function
from trainers.learner import Learner, RankValues, Rendezvous, StepResult, ValueLearner

if TYPE_CHECKING:
    import numpy as np

    from weights.manifest import Manifest


class TrainerRank:
    """A rank of a policy or of its critic. `steps` of the run has to be given for a critic, which has none of its own.

    `past_versions` is how many versions' weights are remembered for measuring the mismatch with the makers.

    `failures_folder` receives the batch of a step in which an optimizer step was skipped, when given.
    """

    def __init__(
        self,
        config: TrainerConfig | CriticConfig,
        *,
        model_path: str,
        rendezvous: Rendezvous,
        bucket_bytes: int,
        seed: int,
        steps: int | None = None,
        past_versions: int = 1,
        failures_folder: str | None = None,
    ) -> None:
        if isinstance(config, TrainerConfig):
            steps = config.steps
        assert steps is not None, "a critic needs the steps of its run"
        self._config = config
        self._bucket_bytes = bucket_bytes
        self._num_buckets: int | None = None
        self._first = rendezvous.rank == 0
        self._seconds_exporting = 0.0
        self._staged: Callable[[Path], None] | None = None
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self.learner = build_learner(
            config,
            Path(model_path),
            rendezvous,
            steps=steps,
            seed=seed,
            past_versions=past_versions,
            failures_folder=Path(failures_folder) if failures_folder else None,
        )

    def start(self) -> None:
        import torch

        torch.set_num_threads(self._config.threads)
        self.learner.start()

    @function(dispatch="all", execute="all", collect=first_result)
    def train_step(self, plan: StepPlan, *columns: Columns) -> StepResult:
        """`columns` are those of stage `rollout`, one argument for each row of the plan, in its order; and where a teacher
        made some, those of stage `teacher` behind them, in the same order.

        The result's `seconds` also have `export`: those spent on the publication since the last step.
        """
        rollouts, teachers = columns[: plan.rows], columns[plan.rows :]
        if teachers:
            rollouts = tuple({**rollout, **teacher} for rollout, teacher in zip(rollouts, teachers, strict=True))
        result = self.learner.train_step(plan, rollouts)
        export, self._seconds_exporting = self._seconds_exporting, 0.0
        return replace(result, seconds={**result.seconds, "export": export})

    @function(dispatch="all", execute="all")
    def log_probs(self, plan: StepPlan, *rollouts: Columns) -> RankValues:
        """Of the response tokens under the present weights, without a gradient: `rollouts` as for `train_step`."""
        return self.learner.log_probs(plan, rollouts)

    @function(dispatch="all", execute="all")
    def values(self, plan: StepPlan, *rollouts: Columns) -> RankValues:
        """Of a critic: `rollouts` as for `train_step`."""
        learner: ValueLearner = self.learner  # type: ignore[assignment]
        return learner.values(plan, rollouts)

    @function(dispatch="all", execute="all", collect=first_result)
    def export(self, version: int) -> tuple[Manifest | np.ndarray, ...]:
        """The current policy as (manifest, bucket, ..., bucket), the buckets uint8. Raises NonFiniteWeights.

        Ranks but the first walk the weights with it, for the collectives, and return nothing: one copy is enough.
        """
        from weights.packing import pack

        started = time.perf_counter()
        weights = self.learner.weights()
        if self._first:
            manifest, buckets = pack(version, weights, self._bucket_bytes)
            answer: tuple[Any, ...] = (manifest, *buckets)
        else:
            deque(weights, maxlen=0)
            answer = ()
        self._num_buckets = max(0, len(answer) - 1)
        self._seconds_exporting += time.perf_counter() - started
        return answer

    def num_buckets(self) -> int:
        """Buckets that `export` returns here beside the manifest; the same for every version."""
        if self._num_buckets is None:
            self.export(0)
        assert self._num_buckets is not None
        return self._num_buckets

    @function(dispatch="all", execute="all")
    def stage(self) -> None:
        """Copy the state to CPU memory, for `write`."""
        self._staged = self.learner.stage()

    @function(dispatch="all", execute="all")
    def write(self, folder: str) -> Future[None]:
        """Write what `stage` copied, and let go of it, in a thread of its own: training may go on meanwhile."""
        staged, self._staged = self._staged, None
        assert staged is not None, "write before stage"
        return self._writer.submit(staged, Path(folder))

    def restore(self, folder: str) -> None:
        self.learner.restore(Path(folder))

    def export_huggingface(self, folder: str) -> None:
        self.learner.export_huggingface(Path(folder))

    def offload(self) -> None:
        self.learner.offload()

    def onload(self) -> None:
        self.learner.onload()

    def close(self) -> None:
        self._writer.shutdown()
        self.learner.close()


def build_learner(
    config: TrainerConfig | CriticConfig, model_path: Path, rendezvous: Rendezvous, **settings: Any
) -> Learner:
    """A ValueLearner for a critic. `settings`: steps, seed, past_versions, failures_folder.

    Raises ValueError when the model or the number of ranks does not fit the backend.
    """
    critic = isinstance(config, CriticConfig)
    if isinstance(config.backend, MegatronBackend):
        from trainers.megatron.critic import MegatronCritic
        from trainers.megatron.learner import MegatronLearner

        return (MegatronCritic if critic else MegatronLearner)(config, model_path, rendezvous, **settings)
    from trainers.torch_critic import TorchCritic
    from trainers.torch_learner import TorchLearner

    if rendezvous.world_size != 1:
        raise ValueError(f"the torch backend runs in one process, not in {rendezvous.world_size}: use megatron")
    return (TorchCritic if critic else TorchLearner)(config, model_path, **settings)
