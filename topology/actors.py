"""The named actors: empty shells around the plain classes of the other folders.

Every shell keeps its output in `logs/NAME.log` of the run folder, answers `ping`, and offers `hold`, a call that never
returns: its failure is how the supervisor learns within a fraction of a second that the process is gone.
Heavy imports happen inside methods, so that an actor exists (and answers) before its libraries are loaded.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from buffer.records import InfraFailure, MakerInfo, Prompt, SampledRow
from topology.config import RunConfig
from topology.handles import NotReady, Peer, RayExporter, RayMaker, RayWeightClient
from topology.names import log_file, namespace_of
from topology.oversight import HUNG_WITH_BUFFER, oversee
from topology.placement import release
from topology.runs import HUNG, RunError, RunFolder, read_json, write_json
from topology.wire import pack_produced, unpack_lease
from trainers.recorder import append_event

if TYPE_CHECKING:
    from buffer.buffer import Buffer, Cut, PromptSource
    from makers.parity import Probe
    from trainers.learner import Rendezvous


VISIBLE = "CUDA_VISIBLE_DEVICES"
SUPERVISOR_RETURNS = 60.0  # seconds until a supervisor that died must be back
AT_ONCE = 5.0  # seconds within which a call fails that reached nobody


@dataclass(frozen=True)
class Identity:
    """What every actor is told about itself; small, since a restart gets the same arguments again."""

    run: str
    name: str
    folder: str
    python_path: tuple[str, ...]  # where user code named in the config is found
    threads: int
    config: RunConfig
    model_path: str
    gpus: float = 0.0

    @property
    def namespace(self) -> str:
        return namespace_of(self.run)


class Shell:
    """What all actors have in common."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.config = identity.config
        self.started = False  # whether it can do what it is for
        self._holds = 0
        _redirect_output(log_file(identity.folder, identity.name))
        # Before torch is imported: it reads these once.
        os.environ["OMP_NUM_THREADS"] = str(identity.threads)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        if not identity.gpus:
            _show_devices("")  # Ray leaves all of them to whoever asked for none
        # Last, as in the reward processes: a file of the user must not hide a module of the same name.
        sys.path += [path for path in identity.python_path if path not in sys.path]

    async def ping(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "node": ray.get_runtime_context().get_node_id(),
            "devices": os.environ.get(VISIBLE, ""),
            "started": self.started,
        }

    async def use_devices(self, devices: str) -> None:
        """Share the GPUs with these ids, which somebody else asked Ray for. Before any library is loaded."""
        _show_devices(devices)

    async def hold(self) -> None:
        """Called by the supervisor, and again by the one that Ray starts after its death.

        If none comes this process ends: in a cluster that is not the run's own nobody else would end it.
        """
        self._holds += 1
        mine, gone_since = self._holds, time.monotonic()
        while mine == self._holds:
            asked = time.monotonic()
            try:
                await self.actor("supervisor").hold.remote()
            except (ray.exceptions.RayActorError, ValueError):  # the latter: nobody has its name
                now = time.monotonic()
                if now - asked > AT_ONCE:  # it held us until now
                    gone_since = now
                if now - gone_since > SUPERVISOR_RETURNS:
                    logging.getLogger(self.identity.name).error("the supervisor is gone: ending")
                    release(self.identity.namespace)
                    os._exit(1)
                await asyncio.sleep(0.5)

    def oversee_supervisor(self, limit: float) -> None:
        """Kill it when it has not answered for so many seconds. See `topology.oversight`."""
        self._oversight = asyncio.ensure_future(
            oversee(lambda: self.actor("supervisor"), self._end_supervisor, self._adoptable, limit)
        )

    def _adoptable(self) -> bool:
        status = read_json(RunFolder(Path(self.identity.folder)).status_file)
        return status is not None and status["state"] in ("running", "waiting")

    def _end_supervisor(self, supervisor: Any, cause: str) -> None:
        """Ray starts another, which adopts the run."""
        ray.kill(supervisor, no_restart=False)
        append_event(RunFolder(Path(self.identity.folder)).events, "death", actor="supervisor", cause=cause)

    def actor(self, name: str) -> Any:
        """The actor of this name that is there now."""
        return ray.get_actor(name, namespace=self.identity.namespace)

    def peer(self, name: str) -> Peer:
        """Whatever actor has this name when it is called."""
        return Peer(name, self.identity.namespace)


def _show_devices(devices: str) -> None:
    """Without one, nothing is compiled: Dynamo would do so with a C++ compiler in the middle of a run."""
    os.environ[VISIBLE] = devices
    if devices:
        os.environ.pop("TORCHDYNAMO_DISABLE", None)
    else:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"


def _redirect_output(file: Path) -> None:
    """Everything the process prints, C++ included, goes to its own log file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr, force=True
    )


class WeightsActor(Shell):
    """`weights`: the store, which calls the trainer's ranks for an export and so owns what they return."""

    def __init__(self, identity: Identity) -> None:
        super().__init__(identity)
        from weights.store import WeightStore

        self._store = WeightStore(self.config.weights, time.monotonic)
        self._exporter: RayExporter | None = None

    async def connect(self, ranks: Sequence[str], buckets: int) -> None:
        self._exporter = RayExporter([self.actor(rank) for rank in ranks], buckets, self.config.weights.timeout)
        self.started = True

    async def publish(self, version: int) -> None:
        if self._exporter is None:
            raise NotReady("weights: nobody to ask for an export yet")
        if version == self._store.newest():
            return  # asked once more because the answer was lost
        await self._store.publish(version, self._exporter)

    async def wait_newer(self, than: int, timeout: float) -> int:
        return await self._store.wait_newer(than, timeout)

    async def get(self, version: int | None = None) -> Any:
        return self._store.get(version)

    async def status(self) -> dict[str, Any]:
        return self._store.status()


class BufferActor(Shell):
    """`buffer`: the experience table and its dispatcher, which calls the makers and so owns what they return."""

    async def start(self, step: int, checkpoint: str | None, recover: bool = False) -> None:
        """Go on from the rows of a checkpoint's folder, which is of `step`; or, with `recover`, from the state that a buffer of
        this run, which had started, saved last: its rows are made again. A job, which has no checkpoints, does so whenever
        there is such a state."""
        from buffer.buffer import Buffer
        from buffer.files import read_cut
        from makers.prompts import open_prompts
        from makers.prompts.mixed import MixedPrompts
        from topology.consumer import pace_of
        from topology.roles import on_policy_of, routes_of, samples_of, stages_of
        from trainers.checkpoints import BUFFER_FOLDER

        pace = pace_of(self.config)
        source = await asyncio.to_thread(open_prompts, pace.prompts)
        prompts: PromptSource = source
        if on_policy_of(self.config) < 1:
            prompts = MixedPrompts(source, on_policy=on_policy_of(self.config), seed=self.config.seed)
        buffer = Buffer(
            pace.buffer,
            prompts,
            stages=stages_of(self.config),
            groups_per_step=pace.rows,
            every=pace.every,
            samples=samples_of(self.config),
            total_rows=pace.total_rows,
            seed=self.config.seed,
            first_step=step,
            routes=routes_of(self.config),
            save=self._save,
        )
        if recover or (self.config.collect is not None and self._state_file.exists()):
            buffer.restore(self._saved())
        elif checkpoint is not None:
            state, columns = await asyncio.to_thread(read_cut, Path(checkpoint) / BUFFER_FOLDER)
            buffer.restore(state, [ray.put(values) for values in columns])
        else:
            buffer.save()
        self._started_buffer, self.started = buffer, True
        self.oversee_supervisor(HUNG)

    @property
    def _buffer(self) -> Buffer:
        if not self.started:
            raise NotReady("buffer: is being started")
        return self._started_buffer

    @property
    def _state_file(self) -> Path:
        file: Path = RunFolder(Path(self.identity.folder)).buffer_state
        return file

    def _save(self, state: dict[str, Any]) -> None:
        """A disk that is full costs the way back, not the run: an old state would train rows twice."""
        file = self._state_file
        try:
            write_json(file, state, indent=None)
        except OSError as error:
            logging.getLogger("buffer").error("the state is not saved, a crash could not be recovered from: %s", error)
            file.unlink(missing_ok=True)

    def _saved(self) -> Any:
        file = self._state_file
        state = read_json(file)
        if state is None:
            raise RunError(
                f"buffer: there is no {file} to go on from: it could not be written, see {self.identity.name}.log"
            )
        return state

    async def cut(self) -> Cut:
        """For a checkpoint: the columns come as references, since they are in a list."""
        return self._buffer.cut()

    async def rewind(self, step: int) -> None:
        self._buffer.rewind(step)

    async def lost(self, row_id: int, stages: Sequence[str], cause: str) -> None:
        self._buffer.lost(row_id, stages, cause)

    async def attach(self, info: MakerInfo) -> None:
        self._buffer.attach(RayMaker(info, self.actor(info.name)))

    async def detach(self, name: str, drain: bool) -> None:
        await self._buffer.detach(name, drain)

    async def maker_died(self, name: str, cause: str) -> None:
        self._buffer.maker_died(name, cause)

    async def unroute(self, makers: Sequence[str]) -> None:
        await self._buffer.unroute(makers)

    async def route(self, makers: Sequence[str]) -> None:
        self._buffer.route(makers)

    async def published(self, version: int, step: int) -> None:
        self._buffer.published(version, step)

    async def sample(self, groups: int, timeout: float) -> list[SampledRow]:
        return await self._buffer.sample(groups, timeout)

    async def trained(self, row_ids: Sequence[int], step: int) -> None:
        self._buffer.trained(row_ids, step)

    async def dropped(self, row_ids: Sequence[int], reason: str) -> None:
        self._buffer.dropped(row_ids, reason)

    async def evaluate(self, prompts: Sequence[Prompt], settings: Mapping[str, int], timeout: float) -> Any:
        return await self._buffer.evaluate(prompts, **settings, timeout=timeout)

    async def status(self) -> dict[str, Any]:
        return self._buffer.status()

    async def fatal(self) -> str:
        """Returns when it is impossible for the run to go on: the cause."""
        return await self._buffer.fatal.wait()


class MakerActor(Shell):
    """`maker/GROUP/I`: one maker of any kind."""

    async def start(self) -> MakerInfo:
        from makers.factory import build_maker
        from topology.bundles import makers_in_turns
        from topology.models import resolve_model
        from topology.roles import model_of, reads_tokens, route_of, stage_of
        from topology.vocabulary import difference

        _, group, index = self.identity.name.split("/")
        config = self.config.makers[group]
        own = model_of(config)
        folder = self.identity.model_path if own is None else str(resolve_model(own.path))
        # One that is attached is checked here only.
        if reads_tokens(config) and (other := difference(Path(self.identity.model_path), Path(folder))):
            raise ValueError(f"makers.{group}.model.path: {other}: it would score other tokens")
        self._maker = build_maker(
            config,
            name=self.identity.name,
            model_path=folder,
            policy_path=self.identity.model_path,
            weights=RayWeightClient(self.peer("weights"), self.config.weights.timeout)
            if self.config.collect is None
            else None,
            seed=self.config.seed + int(index),
            sleeps=self.identity.name in makers_in_turns(self.config),
        )
        await self._maker.start()
        self._needs = tuple(self._maker.needs)
        stage = stage_of(config, group)
        if self._maker.stage != stage:
            raise ValueError(f"{config.kind} fills the stage `{self._maker.stage}`, so its group must have that name")
        route = route_of(self.config, config)
        self._info = MakerInfo(self.identity.name, config.kind, stage, self._needs, self._maker.slots, route)
        self.started = True
        return self._info

    async def info(self) -> MakerInfo:
        return self._info

    async def probe(self) -> Probe:
        """Of a rollout maker, as soon as it holds a version."""
        return await self._maker.probe()  # type: ignore[attr-defined]

    async def make(self, values: list[Any], *inputs: Any) -> tuple[list[Any], Any]:
        """One lease and one answer, as `topology.wire` packs them."""
        from buffer.columns import validate_answer

        lease, given = unpack_lease(values), dict(zip(self._needs, inputs, strict=True))
        produced, columns = await self._maker.make(lease, given)
        try:
            validate_answer(lease, produced, columns, given)
        except ValueError as error:  # the maker is to blame, not the row
            raise InfraFailure(f"{self.identity.name}: {error}") from None
        return pack_produced(produced), columns

    async def sleep(self, level: int) -> None:
        await self._maker.sleep(level)

    async def wake(self) -> None:
        await self._maker.wake()

    async def status(self) -> dict[str, Any]:
        return self._maker.status()

    async def close(self) -> None:
        await self._maker.close()


class TrainerActor(Shell):
    """`trainer/ROLE`: the controller of one model."""

    async def start(self, ranks: Sequence[str], step: int, version: int) -> None:
        """`step` and `version`: where it begins, and under which number it publishes its first weights."""
        from topology.wiring import build_trainer

        self._trainer = await asyncio.to_thread(build_trainer, self, ranks, step, version)
        self._running: asyncio.Future[str] | None = None
        self.started = True
        self.oversee_supervisor(HUNG_WITH_BUFFER)

    async def publish_start(self) -> None:
        await self._trainer.publish_start()

    async def makers_are(self, names: Sequence[str]) -> None:
        """Makers were attached or detached."""
        self.statuses.of([self.peer(name) for name in names])

    async def run(self) -> str:
        """Asked once more, by a supervisor that came back, it is the same run."""
        if self._running is None:
            self._running = asyncio.ensure_future(self._trainer.run())
        return await asyncio.shield(self._running)

    async def refill(self) -> None:
        await self._trainer.refill()

    async def checkpoint(self) -> str:
        """The folder of a checkpoint of the present step."""
        return str((await self._trainer.checkpoint()).path)

    async def stop(self) -> None:
        await self._trainer.stop()

    async def status(self) -> dict[str, Any]:
        return self._trainer.status()


class CollectorActor(Shell):
    """`collector`: in a run without trainers, whom the complete rows go to."""

    async def start(self) -> None:
        from topology.wiring import build_collector

        self._collector = await asyncio.to_thread(build_collector, self)
        self._running: asyncio.Future[str] | None = None
        self.started = True
        self.oversee_supervisor(HUNG_WITH_BUFFER)

    async def publish_start(self) -> None:
        await self._collector.publish_start()

    async def run(self) -> str:
        """Asked once more, by a supervisor that came back, it is the same run."""
        if self._running is None:
            self._running = asyncio.ensure_future(self._collector.run())
        return await asyncio.shield(self._running)

    async def checkpoint(self) -> str:
        from trainers.checkpoints import CheckpointError

        raise CheckpointError("a job has no checkpoints: what it has collected is in its files already")

    async def stop(self) -> None:
        await self._collector.stop()

    async def status(self) -> dict[str, Any]:
        return self._collector.status()


class CriticActor(Shell):
    """`trainer/critic`: the controller of the value model. The references it is given it only passes on."""

    async def start(self, ranks: Sequence[str]) -> None:
        from topology.wiring import build_critic

        self._critic = await asyncio.to_thread(build_critic, self, ranks)
        self.started = True

    async def values(self, rows: Any, references: Sequence[Any]) -> Any:
        return await self._critic.values(rows, references)

    async def train(self, rows: Any, labels: Any, references: Sequence[Any]) -> Any:
        return await self._critic.train(rows, labels, references)

    async def stage(self) -> None:
        await self._critic.stage()

    async def write(self, folder: str) -> None:
        await self._critic.write(folder)

    async def status(self) -> dict[str, Any]:
        return self._critic.status()


class RankActor(Shell):
    """`trainer/ROLE/rank/I`: one process of a trainer. Its work runs in one thread, so that it answers meanwhile."""

    def __init__(self, identity: Identity) -> None:
        super().__init__(identity)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rank")
        self._buckets: int | None = None
        self._listener: socket.socket | None = None

    async def ping(self) -> dict[str, Any]:
        """While it trains this is all that it answers: a supervisor that came back needs the number of buckets."""
        return {**await super().ping(), "buckets": self._buckets}

    async def free_address(self) -> str:
        """host:port on this rank's node, where the ranks can meet. The port is held until they do."""
        self._listener = socket.socket()
        self._listener.bind(("", 0))
        return f"{ray.util.get_node_ip_address()}:{self._listener.getsockname()[1]}"

    async def start(self, index: int, world: int, address: str, restore: str | None) -> None:
        """Load the model (and the checkpoint)."""
        from trainers.learner import Rendezvous

        rendezvous = Rendezvous(index, world, address, self.config.limits.step, self._listener)
        await asyncio.get_running_loop().run_in_executor(self._thread, self._start, rendezvous, restore)
        self.started = True

    def _start(self, rendezvous: Rendezvous, restore: str | None) -> None:
        from topology.models import resolve_model
        from topology.plan import past_versions
        from topology.roles import POLICY, role_of
        from trainers.config import TrainerConfig
        from trainers.rank import TrainerRank

        RunFolder(Path(self.identity.folder)).require_here()
        role = role_of(self.identity.name)
        failures = Path(self.identity.folder) / "failures"
        config = self.config.trainers[role]
        if isinstance(config, TrainerConfig) and config.teacher is not None:
            config = config.with_teacher_from(str(resolve_model(config.teacher.model)))
        self._rank = TrainerRank(
            config,
            model_path=self.identity.model_path,
            rendezvous=rendezvous,
            bucket_bytes=self.config.weights.bucket_bytes,
            seed=self.config.seed,
            steps=self.config.trainers[POLICY].steps,
            past_versions=past_versions(self.config),
            failures_folder=str(failures if role == POLICY else failures / role),
        )
        self._rank.start()
        if restore is not None:
            self._rank.restore(restore)

    async def invoke(self, method: str, *args: Any) -> Any:
        from trainers.rank_group import call_in

        answer = await call_in(self._thread, getattr(self._rank, method), *args)
        if method == "num_buckets":
            self._buckets = answer
        return answer

    async def export(self, version: int) -> Any:
        return await self.invoke("export", version)
