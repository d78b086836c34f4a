"""`supervisor`: starts every other actor of a run, watches them, tells the world, and ends the run.

Consumes the plan; produces the actors, `status.json` once a second and events. Waits for the trainer to finish, for any
actor to die or hang, for the buffer's verdict that the run cannot go on, and for a stop request, whichever comes first.
Guarantees: the run ends in one of `done`, `failed` (with the cause and the actor named) and `stopped`; no actor of the
run is alive afterwards; nothing it waits for is without a deadline.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from buffer.config import Resources
from topology.actors import BufferActor, CriticActor, Identity, MakerActor, RankActor, Shell, TrainerActor, WeightsActor
from topology.bundles import makers_in_turns, shared_devices, sharers, trainers_in_turns
from topology.capacity import PlannedActor
from topology.handles import ActorLost, call
from topology.members import Member, snapshot, threads_of
from topology.names import log_file
from topology.placement import CannotPlace, Placement, release
from topology.plan import Plan
from topology.roles import CRITIC, POLICY, role_of
from topology.runs import RunFolder, read_json, write_json
from trainers.checkpoints import CRITIC_FOLDER, RANKS_FOLDER, CheckpointError
from trainers.memory import KEEP_FREED_MEMORY
from trainers.recorder import append_event

T = TypeVar("T")
CLOSE = 3.0  # seconds a maker has to close
CLASSES: dict[str, type[Shell]] = {
    "buffer": BufferActor,
    "weights": WeightsActor,
    "trainer": TrainerActor,
    "critic": CriticActor,
    "rank": RankActor,
    "maker": MakerActor,
}
log = logging.getLogger("supervisor")


class RunFailed(Exception):
    """The run cannot go on; the message names the actor and the cause."""


class StopRequested(Exception):
    pass


class Supervisor(Shell):
    def __init__(self, identity: Identity, plan: Plan, resume: dict[str, Any] | None) -> None:
        super().__init__(identity)
        self.plan = plan
        self.resume = resume  # {"folder", "step", "version"} of a checkpoint
        self.folder = RunFolder(Path(identity.folder))
        self.placement = Placement(plan.groups, identity.namespace)
        self.sharers = sharers(self.config)
        self.in_turns = makers_in_turns(self.config)
        self.members: dict[str, Member] = {}
        self.state, self.cause = "starting", None
        self.problems: asyncio.Queue[RunFailed] = asyncio.Queue()
        self.background: set[asyncio.Task[None]] = set()
        self.stopping = asyncio.Event()
        self.hurry = asyncio.Event()  # do not drain, or no longer
        self.training: Any = None  # the trainer's call, once it runs

    async def hold(self) -> None:
        await asyncio.Event().wait()

    async def start(self) -> None:
        """Begin, and return at once: the run does not depend on whoever started it."""
        self._spawn_task(self._run(), "run")

    async def stop(self, now: bool) -> None:
        """Let the trainer finish its step and write its checkpoint (or not, with `now`), then end everything."""
        if now:
            self.hurry.set()
        self.stopping.set()

    async def checkpoint(self) -> str:
        """One of the present step, when that is done; its folder. Raises CheckpointError with the reason."""
        if self.training is None:
            raise CheckpointError(f"no checkpoint can be taken: the run is {self.state}")
        return await self.members[f"trainer/{POLICY}"].handle.checkpoint.remote()  # waits in there have deadlines

    # --- the life of a run --------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        reporter = asyncio.create_task(self._report())
        try:
            await self._until_problem(self._bring_up())
            final, cause = "done", await self._until_problem(self._train())
        except StopRequested:
            final, cause = await self._drain()
        except RunFailed as error:
            final, cause = "failed", str(error)
        except Exception as error:
            log.exception("supervisor")
            final, cause = "failed", f"supervisor: {type(error).__name__}: {error}"
        reporter.cancel()
        await self._refresh()
        await self._close_makers()
        self._end(final, cause)

    async def _close_makers(self) -> None:
        """Let makers give back what they hold outside their process (a remote session, a file); not for long."""
        ready = [member for member in self._kind("maker") if member.state == "ready"]
        closing = [asyncio.wait_for(member.handle.close.remote(), CLOSE) for member in ready]
        for member, ended in zip(ready, await asyncio.gather(*closing, return_exceptions=True), strict=True):
            if isinstance(ended, Exception):
                log.info("%s did not close in %g s: %s", member.name, CLOSE, type(ended).__name__)

    async def _bring_up(self) -> None:
        try:
            await asyncio.wait_for(self._start_all(), self.config.limits.start)
        except CannotPlace as error:
            raise RunFailed(str(error)) from None
        except TimeoutError:
            late = [f"{group} (no free resources for {needs})" for group, needs in self.placement.waiting.items()]
            late += [name for name, member in self.members.items() if member.state == "starting"]
            raise RunFailed(
                f"not ready within limits.start = {self.config.limits.start:g} s: {', '.join(late)}"
            ) from None
        self.state = "running"
        self._event("running", actors=len(self.members))

    async def _start_all(self) -> None:
        await self.placement.reserve(
            lambda group, needs, free: self._event("waiting_for_resources", group=group, needs=needs, free=free)
        )
        for planned in self.plan.actors:
            if planned.kind != "supervisor":
                self.members[planned.name] = Member(planned, self._create(planned))
        for member in self.members.values():
            self._spawn_task(self._hold(member), f"hold {member.name}")
            self._spawn_task(self._locate(member), f"locate {member.name}")
        step, folder = (0, None) if self.resume is None else (self.resume["step"], self.resume["folder"])
        buffer = asyncio.ensure_future(self._ready(self.members["buffer"], "start", step, folder))
        trainer = asyncio.ensure_future(self._start_trainer(step, buffer))
        makers = (self._start_maker(member, buffer, trainer) for member in self._kind("maker"))
        await asyncio.gather(buffer, trainer, *makers)

    async def _start_trainer(self, step: int, buffer: Awaitable[None]) -> None:
        """All ranks, then who calls them; the policy's first act is to publish the start weights."""
        await asyncio.gather(*(self._start_ranks(role) for role in self.config.trainers))
        ranks = self._ranks(POLICY)
        buckets, *_ = await asyncio.gather(*(self._ask(rank, "invoke", "num_buckets") for rank in ranks))
        names = [rank.name for rank in ranks]
        await self._ready(self.members["weights"], "connect", names, buckets)
        if critic := self.members.get(f"trainer/{CRITIC}"):
            await self._ready(critic, "start", [rank.name for rank in self._ranks(CRITIC)])
        trainer = self.members[f"trainer/{POLICY}"]
        await self._ready(trainer, "start", names, step)
        await buffer
        await self._ask(trainer, "publish_start")
        sharing = [rank for role in trainers_in_turns(self.config) for rank in self._ranks(role)]
        await asyncio.gather(*(self._ask(rank, "invoke", "offload") for rank in sharing))

    async def _start_ranks(self, role: str) -> None:
        """They meet, and load their model or what the checkpoint has of it."""
        ranks, folder = self._ranks(role), RANKS_FOLDER if role == POLICY else CRITIC_FOLDER
        for rank in ranks:
            await self._share_devices(rank)
        restore = None if self.resume is None else str(Path(self.resume["folder"]) / folder)
        address = await self._ask(ranks[0], "free_address")
        await asyncio.gather(
            *(self._ready(rank, "start", index, len(ranks), address, restore) for index, rank in enumerate(ranks))
        )

    async def _start_maker(self, member: Member, buffer: Awaitable[None], trainer: Awaitable[None]) -> None:
        if member.name in self.in_turns:
            await trainer  # the ranks have the devices first, to publish what the run starts from
        await self._share_devices(member)
        info = await self._ready(member, "start")
        await buffer
        await self._ask(self.members["buffer"], "attach", info)
        self._event("attach", maker=info.name, stage=info.stage)

    async def _share_devices(self, member: Member) -> None:
        """An actor that uses what others of its bundle asked for is told which devices these got."""
        if member.name not in self.sharers:
            return
        bundle = self.plan.bundle_of(member.name)
        owners = [self.members[actor] for actor in bundle.actors if actor not in self.sharers]
        devices = {owner.name: (await self._ask(owner, "ping"))["devices"] for owner in owners}
        await self._ask(member, "use_devices", shared_devices(bundle, member.name, devices))

    async def _train(self) -> str | None:
        """Until the trainer has ended; the reason if it has done fewer steps than asked."""
        trainer, buffer = self.members[f"trainer/{POLICY}"], self.members["buffer"]
        self._spawn_task(self._fatal(buffer), "fatal")
        self._spawn_task(self._ping(), "ping")
        self.training = trainer.handle.run.remote()  # every wait inside has its own deadline
        try:
            ended = await self.training
        except Exception as error:
            raise RunFailed(f"{trainer.name}: {_one_line(error)}") from None
        return "the prompts ended before the last step" if ended == "end_of_data" else None

    async def _until_problem(self, work: Coroutine[Any, Any, T]) -> T:
        """Do `work` unless a problem or a stop request comes first. Of several problems the death of a process counts."""
        task = asyncio.create_task(work)
        problem = asyncio.create_task(self.problems.get())
        stop = asyncio.create_task(self.stopping.wait())
        await asyncio.wait({task, problem, stop}, return_when=asyncio.FIRST_COMPLETED)
        if task.done() and task.exception() is not None and not problem.done():
            await asyncio.wait({problem}, timeout=1.0)  # a failed call is often only the echo of a death
        finished, told = task.done(), problem.done()
        for other in (task, problem, stop):
            other.cancel()
        await asyncio.gather(task, problem, stop, return_exceptions=True)
        if told:
            raise problem.result()
        if not finished:
            raise StopRequested
        return task.result()

    async def _drain(self) -> tuple[str, str | None]:
        """How the run ends after a request to stop. A second request, with `now`, cuts the draining short."""
        self.state = "draining"
        self._event("stop", now=self.hurry.is_set())
        if self.hurry.is_set() or self.training is None:
            return "stopped", None
        drained, hurried = asyncio.create_task(self._trainer_ends()), asyncio.create_task(self.hurry.wait())
        await asyncio.wait({drained, hurried}, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if drained.done():
            return drained.result()
        drained.cancel()
        return "stopped", "not drained: `tandem stop --now` came meanwhile"

    async def _trainer_ends(self) -> tuple[str, str | None]:
        trainer, limit = self.members[f"trainer/{POLICY}"], self.config.limits.stop
        try:
            await call(trainer.handle.stop.remote(), limit, f"{trainer.name}: stop")
            await call(self.training, limit, f"{trainer.name}: run")
        except TimeoutError as error:
            return "stopped", f"not drained: {error} (limits.stop): no checkpoint of the last step was written"
        except Exception as error:  # the step that was being trained, or the last checkpoint
            return "failed", f"{trainer.name}: {_one_line(error)}"
        return "stopped", None

    def _end(self, state: str, cause: str | None) -> None:
        for task in self.background:
            if task.get_name() != "run":
                task.cancel()
        for member in self.members.values():
            ray.kill(member.handle, no_restart=True)
            member.state = "dead" if member.state == "dead" else "ended"
        release(self.identity.namespace)
        log.info("run ended: %s %s", state, cause or "")
        cause = cause and cause.partition("\nTraceback (most recent call last)")[0]  # the whole of it is in the log
        self._event(state, cause=cause)
        self.state, self.cause = state, cause
        self._write_status()
        if read_json(self.folder.cluster_file)["keeper"] is None:  # else it ends our cluster
            ray.kill(ray.get_runtime_context().current_actor)

    # --- actors -------------------------------------------------------------------------------------------------------

    def _create(self, planned: PlannedActor) -> Any:
        resources = Resources(cpus=0) if planned.name in self.sharers else planned.resources
        options: dict[str, Any] = {
            "name": planned.name,
            "namespace": self.identity.namespace,
            "lifetime": "detached",
            "num_cpus": resources.cpus,
            "num_gpus": resources.gpus,
            "resources": resources.custom or None,
            "max_concurrency": 1000,
            "scheduling_strategy": self.placement.strategy(planned.name) or "DEFAULT",
        }
        if planned.kind in ("buffer", "weights", "trainer"):  # they write to the run folder, which is on this node
            here = ray.get_runtime_context().get_node_id()
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(here, soft=True)
        if planned.kind == "rank":
            options["runtime_env"] = {"env_vars": KEEP_FREED_MEMORY}
        threads = threads_of(self.config, planned)
        identity = replace(self.identity, name=planned.name, threads=threads, gpus=options["num_gpus"])
        return ray.remote(CLASSES[planned.kind]).options(**options).remote(identity)

    def _ranks(self, role: str) -> list[Member]:
        return [member for member in self._kind("rank") if role_of(member.name) == role]

    def _kind(self, kind: str) -> list[Member]:
        return [member for member in self.members.values() if member.planned.kind == kind]

    async def _ready(self, member: Member, method: str, *args: Any) -> Any:
        answer = await self._ask(member, method, *args)
        member.state = "ready"
        return answer

    async def _ask(self, member: Member, method: str, *args: Any) -> Any:
        name = member.name
        try:
            return await call(
                getattr(member.handle, method).remote(*args), self.config.limits.start, f"{name}: {method}"
            )
        except (TimeoutError, ActorLost) as error:
            raise RunFailed(str(error)) from None
        except Exception as error:
            raise RunFailed(f"{name}: {_one_line(error)}") from None

    async def _locate(self, member: Member) -> None:
        try:
            member.place = await member.handle.ping.remote()
        except ray.exceptions.RayActorError:
            return  # its death is reported by `_hold`

    async def _hold(self, member: Member) -> None:
        """Fails as soon as the process is gone."""
        try:
            await call(member.handle.hold.remote(), float("inf"), member.name)
        except Exception as error:
            member.state = "dead"
            self._event("death", actor=member.name, cause=str(error))
            self.problems.put_nowait(RunFailed(f"{error}; see {self._log_of(member)}"))

    async def _fatal(self, buffer: Member) -> None:
        try:
            cause = await buffer.handle.fatal.remote()
        except ray.exceptions.RayActorError:
            return  # its death is reported by `_hold`
        self.problems.put_nowait(RunFailed(f"buffer: {cause}"))

    async def _ping(self) -> None:
        """A process that is stopped, not dead, is only seen by its silence."""
        limit = self.config.limits.ping

        async def one(member: Member) -> None:
            try:
                await asyncio.wait_for(member.handle.ping.remote(), limit)
            except TimeoutError:
                name = member.name
                self.problems.put_nowait(RunFailed(f"{name}: hung, no answer for limits.ping = {limit:g} s"))
            except ray.exceptions.RayActorError:
                return  # its death is reported by `_hold`
            except ray.exceptions.RayError as error:
                self.problems.put_nowait(RunFailed(f"{member.name}: cannot be asked: {_one_line(error)}"))

        while True:
            await asyncio.gather(*(one(member) for member in self.members.values()))
            await asyncio.sleep(limit / 4)

    # --- telling ------------------------------------------------------------------------------------------------------

    async def _report(self) -> None:
        while True:
            await self._refresh()
            try:
                self._write_status()
            except OSError as error:  # a full disk; the next one may fit
                log.warning("status.json was not written: %s", error)
            await asyncio.sleep(1.0)

    async def _refresh(self) -> None:
        async def one(member: Member) -> None:
            if member.state != "ready" or member.planned.kind == "rank":
                return
            try:
                member.status = await asyncio.wait_for(member.handle.status.remote(), 2.0)
            except Exception as error:  # a busy or dying actor keeps its last status; others report its death
                log.info("no status from %s: %s", member.name, type(error).__name__)

        await asyncio.gather(*(one(member) for member in self.members.values()))

    async def status(self) -> dict[str, Any]:
        return self._snapshot()

    def _snapshot(self) -> dict[str, Any]:
        folder = self.identity.folder
        first_step = 0 if self.resume is None else self.resume["step"]
        return snapshot(
            self.config, self.members, state=self.state, cause=self.cause, folder=folder, first_step=first_step
        )

    def _write_status(self) -> None:
        write_json(self.folder.status_file, self._snapshot())

    def _event(self, kind: str, **values: Any) -> None:
        try:
            append_event(self.folder.events, kind, **values)
        except OSError as error:  # a full disk must not keep a run from ending
            log.warning("event %s %s was not written: %s", kind, values, error)

    def _log_of(self, member: Member) -> str:
        return str(log_file(".", member.name))

    def _spawn_task(self, work: Awaitable[None], name: str) -> None:
        task = asyncio.ensure_future(work)
        task.set_name(name)
        self.background.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Future[None]) -> None:
        """A watcher that fails must not fail silently: nobody would watch."""
        self.background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the supervisor failed", exc_info=error)
            self.problems.put_nowait(RunFailed(f"supervisor: {type(error).__name__}: {error}"))


def _one_line(error: BaseException) -> str:
    """The type and message of a remote error without its traceback (which is in the actor's log)."""
    cause = getattr(error, "cause", None) or error
    text = str(cause).strip()
    return f"{type(cause).__name__}: {text}" if text else type(cause).__name__
