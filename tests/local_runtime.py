"""A run in one process, without Ray: the edges that topology/ draws between actors, drawn between plain objects.

Everything is the real thing (buffer, weight store, trainer, rank group, and the config's makers) but the recorder, which
keeps what it is told. The trainer's rank is given by the test: an object in this process, or a `RankProcess`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from buffer.buffer import Buffer
from buffer.columns import Columns, validate_answer
from buffer.records import InfraFailure, Lease, MakerInfo, Produced, SampledRow
from makers.factory import build_maker
from makers.maker import Maker
from makers.prompts import open_prompts
from tests.fakes_trainer import FakeRecorder
from topology.config import RunConfig
from topology.models import resolve_model
from topology.plan import worst_case_staleness
from topology.roles import POLICY, max_response_tokens, samples_of, stages_of
from trainers.checkpoints import Checkpointer
from trainers.metrics import MetricsBuilder
from trainers.planner import StepPlanner
from trainers.ports import Deadlines, Schedule
from trainers.rank import Rendezvous, TrainerRank
from trainers.rank_group import LocalWorker, RankGroup
from trainers.trainer import Trainer
from weights.client import LocalWeightClient, WeightClient
from weights.manifest import Manifest
from weights.store import WeightStore

MakersOf = Callable[[WeightClient], Mapping[str, Maker]]  # the weights they pull -> makers by name


class LocalMaker:
    """`MakerHandle` around a maker: what it made is checked before it answers, as in a maker's actor."""

    def __init__(self, name: str, maker: Maker) -> None:
        self.info = MakerInfo(name, maker.stage, maker.stage, tuple(maker.needs), maker.slots)
        self._maker = maker

    async def make(self, lease: Lease, inputs: Sequence[Any]) -> tuple[Produced, Columns]:
        given = dict(zip(self.info.needs, inputs, strict=True))
        produced, columns = await self._maker.make(lease, given)
        try:
            validate_answer(lease, produced, columns, given)
        except ValueError as error:
            raise InfraFailure(f"{self.info.name}: {error}") from None
        return produced, columns


class LocalRows:
    """`RowSource` around a buffer. `batches`: the rows of every `sample`, in order."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self.evaluate = buffer.evaluate
        self.batches: list[list[SampledRow]] = []

    async def sample(self, groups: int, timeout: float) -> list[SampledRow]:
        rows = await self._buffer.sample(groups, timeout)
        self.batches.append(rows)
        return rows

    async def fetch(self, reference: Any) -> Any:
        return reference

    async def trained(self, row_ids: Sequence[int], step: int) -> None:
        self._buffer.trained(row_ids, step)

    async def dropped(self, row_ids: Sequence[int], reason: str) -> None:
        self._buffer.dropped(row_ids, reason)

    async def lost(self, row_id: int, stages: Sequence[str], cause: str) -> None:
        self._buffer.lost(row_id, stages, cause)

    async def published(self, version: int, step: int) -> None:
        self._buffer.published(version, step)

    async def status(self) -> dict[str, Any]:
        return self._buffer.status()

    async def cut(self) -> Any:
        return self._buffer.cut()


class LocalPublisher:
    """`Publisher` and `Exporter`: the store calls the ranks back for the copy."""

    def __init__(self, store: WeightStore, ranks: RankGroup) -> None:
        self._store = store
        self._ranks = ranks

    async def publish(self, version: int) -> None:
        await self._store.publish(version, self)

    async def export(self, version: int) -> tuple[Manifest, list[Any]]:
        manifest, *buckets = await self._ranks.call(TrainerRank.export, version)
        return manifest, buckets


@dataclass
class LocalRun:
    """What a run leaves behind. `status` is the buffer's last, `batches` the rows of each step with their columns."""

    outcome: str
    metrics: list[dict[str, Any]]
    batches: list[list[SampledRow]]
    status: dict[str, Any]
    store: WeightStore


async def run_locally(config: RunConfig, folder: Path, rank: Any, makers_of: MakersOf | None = None) -> LocalRun:
    """Train to the end. `rank` answers `train_step` and `export`; `makers_of` replaces the makers of the config."""
    trainer_config, every = config.trainers[POLICY], config.weights.every
    buffer = Buffer(
        config.buffer,
        open_prompts(config.prompts),
        stages=stages_of(config),
        groups_per_step=trainer_config.groups_per_step,
        every=every,
        samples=samples_of(config),
        total_rows=trainer_config.steps * trainer_config.groups_per_step,
        seed=config.seed,
    )
    store = WeightStore(config.weights, time.monotonic)
    rows, recorder, worker = LocalRows(buffer), FakeRecorder(), LocalWorker(rank)
    ranks = RankGroup([worker], config.limits.step)
    makers = (makers_of or _configured(config))(LocalWeightClient(store))

    async def statuses() -> dict[str, Any]:
        return {name: maker.status() for name, maker in makers.items()}

    trainer = Trainer(
        trainer_config,
        planner=StepPlanner(trainer_config, max_response_tokens(config)),
        ranks=ranks,
        rows=rows,
        weights=LocalPublisher(store, ranks),
        makers=statuses,
        recorder=recorder,
        metrics=MetricsBuilder(),
        checkpointer=Checkpointer(folder, keep=1),
        schedule=Schedule(every, None, checkpoint_at_end=False),
        deadlines=Deadlines(batch=config.limits.batch, step=config.limits.step),
        max_age=worst_case_staleness(config),
    )
    try:
        await asyncio.gather(*(maker.start() for maker in makers.values()))
        for name, maker in makers.items():
            buffer.attach(LocalMaker(name, maker))
        outcome = await trainer.run()
        return LocalRun(outcome, recorder.objects, rows.batches, buffer.status(), store)
    finally:
        await buffer.close()
        await asyncio.gather(*(maker.close() for maker in makers.values()))
        worker.close()


def _configured(config: RunConfig) -> MakersOf:
    def build(weights: WeightClient) -> dict[str, Maker]:
        path = str(resolve_model(config.model.path))
        return {
            f"maker/{group}/{index}": build_maker(
                maker, name=f"maker/{group}/{index}", model_path=path, weights=weights, seed=config.seed + index
            )
            for group, maker in config.makers.items()
            for index in range(maker.replicas)
        }

    return build


class RankProcess:
    """A `TrainerRank` in a process of its own: vLLM and Megatron each want torch.distributed's one default group.

    `load` begins anew from the model folder, in the same process; it returns at once, and later calls wait for it.
    """

    def __init__(self) -> None:
        self._process = ProcessPoolExecutor(1, get_context("spawn"), initializer=_quiet)
        self._loading: Future[None]

    def load(self, config: RunConfig) -> None:
        self._loading = self._process.submit(_load, config)

    def train_step(self, plan: Any, *rollouts: Columns) -> Any:
        return self._call("train_step", plan, *rollouts)

    def export(self, version: int) -> Any:
        return self._call("export", version)

    def close(self) -> None:
        self._process.submit(_unload).result()
        self._process.shutdown()

    def _call(self, method: str, *args: Any) -> Any:
        self._loading.result()
        return self._process.submit(_call, method, *args).result()


# Below: in the process of the rank.

_ranks: list[TrainerRank] = []


def _quiet() -> None:
    os.environ.update(OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1")


def _load(config: RunConfig) -> None:
    _unload()
    rank = TrainerRank(
        config.trainers[POLICY],
        model_path=str(resolve_model(config.model.path)),
        rendezvous=Rendezvous(rank=0, world_size=1, address="", timeout=config.limits.step),
        bucket_bytes=config.weights.bucket_bytes,
        seed=config.seed,
    )
    rank.start()
    _ranks.append(rank)


def _unload() -> None:
    while _ranks:
        _ranks.pop().close()


def _call(method: str, *args: Any) -> Any:
    return getattr(_ranks[0], method)(*args)
