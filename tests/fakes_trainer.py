"""Hand-written collaborators of a trainer. All write what is asked of them into one shared `log`, in order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from buffer.buffer import EndOfData
from buffer.evaluation import EvaluationResult
from buffer.records import Produced, Prompt, SampledRow
from buffer.snapshot import Cut
from trainers.batch import StepPlan
from trainers.learner import StepResult

Log = list[tuple[Any, ...]]


class FakeClock:
    """Moves only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_row(
    row_id: int,
    *,
    version: int = 0,
    max_version: int | None = None,
    rewards: Sequence[float] = (0.0, 1.0),
    lengths: Sequence[int] = (3, 2),
    finish: Sequence[int] | None = None,
) -> SampledRow:
    """A row with local columns: prompt ids 1, 2; response ids 10, 11, ..."""
    total = sum(lengths)
    rollout = {
        "prompt_ids": np.array([1, 2], dtype=np.int32),
        "response_ids": np.arange(10, 10 + total, dtype=np.int32),
        "response_offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        "behaviour_logprobs": np.full(total, -0.5, dtype=np.float32),
        "policy_versions": np.full(total, version, dtype=np.int32),
        "finish_reasons": np.array(finish if finish is not None else [0] * len(lengths), dtype=np.int8),
        "temperatures": np.ones(len(lengths), dtype=np.float32),
    }
    values = np.array(rewards, dtype=np.float32)
    newest = version if max_version is None else max_version
    produced = {
        "rollout": Produced(len(lengths), total, 100, min_version=version, max_version=newest),
        "reward": Produced(len(lengths), 0, 8),
    }
    prompt = Prompt(id=f"p{row_id}", content=f"prompt {row_id}")
    columns = {"rollout": rollout, "reward": {"rewards": values, "reward/exact_match": values}}
    makers = {"rollout": "maker/rollout/0", "reward": "maker/reward/0"}
    return SampledRow(row_id, prompt, columns, produced, age=0, makers=makers)


@dataclass
class FakeRows:
    """Gives batches in order; a batch may be a callable of the newest version. Then waits, or says the data ended."""

    log: Log
    batches: list[list[SampledRow] | Callable[[int], list[SampledRow]]]
    ends: bool = False
    version: int = -1
    rewards: list[float] = field(default_factory=lambda: [0.25, 0.75])
    waiting: asyncio.Event = field(default_factory=asyncio.Event)  # set when there is nothing left to give

    async def sample(self, groups: int, timeout: float) -> list[SampledRow]:
        self.log.append(("sample", groups))
        if not self.batches:
            if self.ends:
                raise EndOfData("the prompts are used up")
            self.waiting.set()
            await asyncio.Event().wait()
        batch = self.batches.pop(0)
        return batch(self.version) if callable(batch) else batch

    async def fetch(self, reference: Any) -> Any:
        if isinstance(reference, Exception):
            raise reference
        return reference

    async def trained(self, row_ids: Sequence[int], step: int) -> None:
        self.log.append(("trained", tuple(row_ids), step))

    async def dropped(self, row_ids: Sequence[int], reason: str) -> None:
        self.log.append(("dropped", tuple(row_ids), reason))

    async def lost(self, row_id: int, stages: Sequence[str], cause: str) -> None:
        self.log.append(("lost", row_id, tuple(stages)))

    async def published(self, version: int, step: int) -> None:
        self.version = version
        self.log.append(("published", version, step))

    async def evaluate(
        self, prompts: Sequence[Prompt], *, samples: int, min_version: int, seed: int, timeout: float
    ) -> EvaluationResult:
        self.log.append(("evaluate", len(prompts), min_version))
        return EvaluationResult(
            rows=len(prompts),
            failed=0,
            samples=samples,
            reward_mean=self.rewards.pop(0),
            reward_stderr=0.1,
            pass_rate=None,
            response_length=5.0,
            min_version=min_version,
            max_version=min_version,
            seconds=1.0,
            stats={},
        )

    async def status(self) -> dict[str, Any]:
        return buffer_status()

    async def cut(self) -> Any:
        self.log.append(("cut",))
        state = {"filled": [{"id": 7, "produced": {"reward": {}}}]}
        return Cut(state, [{"rewards": np.array([0.5], np.float32)}])


def buffer_status(**failures: int) -> dict[str, Any]:
    """What a metrics builder reads of `Buffer.status()`."""
    account = {"admitted": 9, "trained": 4, "dropped": {"stale": 2}, "in_flight": 3}
    return {
        "ledger": {"rows": account, "tokens": account},
        "bytes": 1000,
        "age": {"mean": 0.5, "max": 1, "bound": 1},
        "failures": {"infra": 0, "data": 0, "timeout": 0, "died": 0} | failures,
    }


class FakeWeights:
    def __init__(self, log: Log) -> None:
        self.log = log

    async def publish(self, version: int) -> None:
        self.log.append(("publish", version))


def step_result(step: int, **changes: Any) -> StepResult:
    figures: dict[str, Any] = {
        "loss": 0.5,
        "grad_norm": 2.0,
        "lr": 1e-3,
        "metrics": {"entropy": 1.5, "mismatch/kl": 0.001},
        "tokens": 5,
        "packed_tokens": 9,
        "optimizer_steps": 1,
    }
    return StepResult(step=step, **(figures | changes))


@dataclass
class FakeRank:
    """The object inside a rank. `results` maps the number of a call of `train_step`, from 1, to changes of its result."""

    log: Log
    results: dict[int, dict[str, Any]] = field(default_factory=dict)
    calls: int = 0
    write_error: OSError | None = None
    released: threading.Event = field(default_factory=threading.Event)  # writing waits for it

    def train_step(self, plan: StepPlan, *rollouts: Any) -> StepResult:
        self.calls += 1
        self.log.append(("train_step", plan.step, plan.version, len(rollouts)))
        return step_result(plan.step, **self.results.get(self.calls, {}))

    def __post_init__(self) -> None:
        self.released.set()

    def stage(self) -> None:
        self.log.append(("stage",))

    def write(self, folder: str) -> Future[None]:
        """In a thread of its own, as a rank does."""
        return ThreadPoolExecutor(1).submit(self._write, Path(folder))

    def _write(self, folder: Path) -> None:
        assert self.released.wait(10)
        folder.mkdir(parents=True)
        (folder / "model.bin").write_bytes(b"weights")
        self.log.append(("written", folder.parent.name))
        if self.write_error is not None:
            raise self.write_error


class FakeRecorder:
    def __init__(self) -> None:
        self.objects: list[dict[str, Any]] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.charts: list[tuple[int, dict[str, Any]]] = []
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def metrics(self, values: Any) -> None:
        self.objects.append(dict(values))

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields))

    def chart(self, step: int, values: Any) -> None:
        self.charts.append((step, dict(values)))

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.events if name == kind]
