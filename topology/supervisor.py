"""`supervisor`: has every other actor of a run started, watches them, makes anew what dies, tells the world, ends the run.

Consumes the plan; produces the actors, `status.json` once a second and events. Waits for the trainer to finish, for what
cannot be mended, for the buffer's verdict that the run cannot go on, and for a stop request, whichever comes first.
Guarantees: the run ends in one of `done`, `failed` (with the cause and the actor named) and `stopped`; no actor of the
run is alive afterwards; nothing it waits for is without a deadline. Its own death is survived: Ray starts it again, and it
goes on with the actors that it finds by their names.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import ray

from topology.actors import Identity, Shell
from topology.crew import Crew, Origin, RunFailed, one_line
from topology.handles import FOREVER, answer_of, call
from topology.members import Member, snapshot
from topology.placement import CannotPlace, Placement, release
from topology.plan import Plan
from topology.recovery import Recovery
from topology.runs import ENDED, RunError, RunFolder, read_json, this_process, write_json
from topology.shifts import Shifts
from topology.watch import Watch
from trainers.checkpoints import CheckpointError
from trainers.recorder import append_event

T = TypeVar("T")
ECHO = 2.0  # seconds in which the death behind a failed call of the trainer becomes known
log = logging.getLogger("supervisor")


class StopRequested(Exception):
    pass


class Supervisor(Shell):
    def __init__(self, identity: Identity, plan: Plan, resume: dict[str, Any] | None) -> None:
        super().__init__(identity)
        self.folder = RunFolder(Path(identity.folder))
        self.origin = Origin() if resume is None else Origin(resume["step"], resume["version"], resume["folder"])
        self.placement = Placement(plan.groups, identity.namespace)
        self.watch = Watch(self.config.limits.ping, self.ended)
        self.crew = Crew(identity, plan, self.placement, self.watch.over)
        self.recovery = Recovery(self)
        self.shifts = Shifts(self)
        self.plan = plan
        self.state, self.cause = "starting", None
        self.problems: asyncio.Queue[RunFailed] = asyncio.Queue()
        self.background: set[asyncio.Future[None]] = set()
        self.stopping = asyncio.Event()
        self.hurry = asyncio.Event()  # do not drain, or no longer
        self.training: asyncio.Future[str] | None = None  # the trainer's call, once it runs
        self.begun = False
        if ray.get_runtime_context().was_current_actor_reconstructed:  # perhaps nobody else is left who would call
            asyncio.get_running_loop().call_soon(self._come_back)

    async def start(self) -> None:
        """Begin, and return at once: the run does not depend on whoever started it."""
        if not self.begun:  # else it died before
            self._begin(self._bring_up())

    async def hold(self) -> None:
        """Every actor waits in here."""
        await asyncio.Event().wait()

    async def stop(self, now: bool) -> None:
        """Let the trainer finish its step and write its checkpoint (or not, with `now`), then end everything."""
        if now:
            self.hurry.set()
        self.stopping.set()

    async def checkpoint(self) -> str:
        """Have one written of the present step, when that is done; its folder. Raises CheckpointError with the reason."""
        trainer = self.crew.consumer
        if self.training is None or not trainer.life.useful:
            raise CheckpointError(f"there is nothing to write: {trainer.name} is {trainer.state}")
        return await call(trainer.handle.checkpoint.remote(), FOREVER, trainer.name)  # waits in there have deadlines

    async def attach(self, group: str, section: dict[str, Any] | None, replicas: int) -> list[str]:
        """Makers more, which work when this returns; their names. Raises ConfigError or RunFailed: the run is as it was."""
        return await self.shifts.attach(group, section, replicas)

    async def detach(self, name: str, now: bool) -> None:
        """One maker fewer; with `now` its rows are made again by others. Raises ConfigError."""
        await self.shifts.detach(name, now)

    # --- the life of a run --------------------------------------------------------------------------------------------

    def _come_back(self) -> None:
        """Go on with the run that this process had in an earlier life."""
        try:
            status = read_json(self.folder.status_file, ("state", "actors")) or {"state": "starting"}
        except RunError as error:
            log.warning("%s", error)
            status = {"state": "unknown"}
        self.state = status["state"]
        if self.state in ENDED:
            self._clear()
            self._leave()
        else:
            self._begin(self.recovery.adopt(status))

    def _begin(self, first: Coroutine[Any, Any, None]) -> None:
        self.begun = True
        self.spawn(self._run(first), "run")

    async def _run(self, first: Coroutine[Any, Any, None]) -> None:
        self.spawn(self._report(), "report")
        try:
            await self._until_problem(first)
            final, cause = "done", await self._until_problem(self._train())
        except StopRequested:
            final, cause = await self._drain()
        except RunFailed as error:
            final, cause = "failed", str(error)
        except Exception as error:
            log.exception("supervisor")
            final, cause = "failed", f"supervisor: {type(error).__name__}: {error}"
        for task in self.background:
            if task.get_name() == "report":  # type: ignore[attr-defined]
                task.cancel()
        await self._refresh()
        for name, error in (await self.crew.close(self.crew.kind("maker"))).items():
            log.info("%s did not close: %s", name, type(error).__name__)
        self._end(final, cause)

    async def _bring_up(self) -> None:
        try:
            await asyncio.wait_for(self._start_all(), self.config.limits.start)
        except CannotPlace as error:
            raise RunFailed(str(error)) from None
        except TimeoutError:
            late = [f"{group} (no free resources for {needs})" for group, needs in self.placement.waiting.items()]
            late += [name for name, member in self.crew.members.items() if member.state == "starting"]
            raise RunFailed(
                f"not ready within limits.start = {self.config.limits.start:g} s: {', '.join(late)}"
            ) from None
        self.state = "running"
        self.event("running", actors=len(self.crew.members))

    async def _start_all(self) -> None:
        await self.placement.reserve(
            lambda group, needs, free: self.event("waiting_for_resources", group=group, needs=needs, free=free)
        )
        for planned in self.plan.actors:
            if planned.kind != "supervisor":
                self.crew.make(self.crew.enlist(planned))
        await self.crew.start_all(self.origin)
        for member in self.crew.kind("maker"):
            self.event("attach", maker=member.name)

    async def _train(self) -> str | None:
        """Until the trainer has ended; the reason if it has done fewer steps than asked."""
        self.watch_buffer()
        if self.recovery.training_is_down:  # since before this supervisor
            await self.recovery.restart_training()
        while True:
            trainer = self.crew.consumer
            self.training = asyncio.ensure_future(
                answer_of(trainer.handle.run.remote())
            )  # waits in there have deadlines
            self.training.add_done_callback(_look_at)
            lost = asyncio.ensure_future(self.recovery.training_lost())
            await asyncio.wait({self.training, lost}, return_when=asyncio.FIRST_COMPLETED)
            lost.cancel()
            error = self.training.exception() if self.training.done() else None
            if self.training.done() and error is None:
                return "the prompts ended before the last step" if self.training.result() == "end_of_data" else None
            if not await self.recovery.training_was_lost(ECHO):
                raise RunFailed(f"{trainer.name}: {one_line(error)}")
            await self.recovery.restart_training()

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
        self.event("stop", now=self.hurry.is_set())
        if self.hurry.is_set() or self.training is None:
            return "stopped", None
        if self.recovery.training_is_down:
            return "stopped", "training was just made anew: no checkpoint after its last one was written"
        drained, hurried = asyncio.create_task(self._trainer_ends()), asyncio.create_task(self.hurry.wait())
        await asyncio.wait({drained, hurried}, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if drained.done():
            return drained.result()
        drained.cancel()
        return "stopped", "not drained: `tandem stop --now` came meanwhile"

    async def _trainer_ends(self) -> tuple[str, str | None]:
        trainer, limit = self.crew.consumer, self.config.limits.stop
        try:
            await call(trainer.handle.stop.remote(), limit, f"{trainer.name}: stop")
            await call(self.training, limit, f"{trainer.name}: run")
        except TimeoutError as error:
            return "stopped", f"not drained: {error} (limits.stop): no checkpoint of the last step was written"
        except Exception as error:  # the step that was being trained, or the last checkpoint
            return "failed", f"{trainer.name}: {one_line(error)}"
        return "stopped", None

    def _end(self, state: str, cause: str | None) -> None:
        for task in self.background:
            if task.get_name() != "run":  # type: ignore[attr-defined]
                task.cancel()
        for member in self.crew.members.values():
            self.crew.end(member)
            member.life.end()
        self._clear()
        log.info("run ended: %s %s", state, cause or "")
        cause = cause and cause.partition("\nTraceback (most recent call last)")[0]  # the whole of it is in the log
        self.event(state, cause=cause)
        self.state, self.cause = state, cause
        self.write_status()
        self._leave()

    def _clear(self) -> None:
        """Nothing of the run is left but this supervisor."""
        self.crew.end_strangers()
        release(self.identity.namespace)

    def _leave(self) -> None:
        if self.folder.cluster()["keeper"] is None:  # else it ends our cluster
            ray.kill(ray.get_runtime_context().current_actor)

    # --- problems -----------------------------------------------------------------------------------------------------

    def ended(self, member: Member, cause: str) -> None:
        """An actor is gone, or hangs."""
        self.event("death", actor=member.name, cause=cause)
        log_file = f"logs/{member.name.replace('/', '-')}.log"
        self.recovery.lost(member, f"{cause}; see {log_file}")

    def fail(self, cause: str) -> None:
        """The run cannot go on."""
        self.problems.put_nowait(RunFailed(cause))

    def watch_buffer(self) -> None:
        if self.crew.buffer.handle is not None:  # else it is made anew
            self.spawn(self._fatal(self.crew.buffer.handle), "fatal")

    async def _fatal(self, buffer: Any) -> None:
        try:
            cause = await buffer.fatal.remote()
        except ray.exceptions.RayActorError:
            return  # its death is told by the watch
        if self.crew.buffer.handle is buffer:
            self.fail(f"buffer: {cause}")

    # --- telling ------------------------------------------------------------------------------------------------------

    async def _report(self) -> None:
        await asyncio.sleep(0)  # adopted actors are enlisted first: the file tells the next supervisor who there was
        while True:
            await self._refresh()
            self.write_status()
            await asyncio.sleep(1.0)

    async def _refresh(self) -> None:
        async def one(member: Member) -> None:
            if not member.life.useful or member.kind == "rank":
                return
            try:
                member.status = await asyncio.wait_for(member.handle.status.remote(), 2.0)
            except Exception as error:  # a busy or dying actor keeps its last status; others report its death
                log.info("no status from %s: %s", member.name, type(error).__name__)

        await asyncio.gather(*(one(member) for member in self.crew.members.values()))

    async def status(self) -> dict[str, Any]:
        return self._snapshot()

    def _snapshot(self) -> dict[str, Any]:
        state, cause = self.state, self.cause
        if state == "running" and (missing := self.recovery.waits_for()) is not None:
            state, cause = "waiting", missing
        found = snapshot(
            self.crew.config,
            self.crew.members,
            state=state,
            cause=cause,
            folder=self.identity.folder,
            first_step=self.origin.step,
        )
        return {**found, "supervisor": this_process()}

    def write_status(self) -> None:
        """For the world, and for the next supervisor: it makes anew what worked by then."""
        try:
            write_json(self.folder.status_file, self._snapshot())
        except OSError as error:  # a full disk; the next one may fit
            log.warning("status.json was not written: %s", error)
            with suppress(OSError):
                self.folder.status_file.touch()  # the keeper is to see that somebody is there

    def event(self, kind: str, **values: Any) -> None:
        try:
            append_event(self.folder.events, kind, **values)
        except OSError as error:  # a full disk must not keep a run from ending
            log.warning("event %s %s was not written: %s", kind, values, error)

    def spawn(self, work: Awaitable[None], name: str) -> None:
        task = asyncio.ensure_future(work)
        task.set_name(name)  # type: ignore[attr-defined]
        self.background.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Future[None]) -> None:
        """A task that fails must not fail silently: nobody would do its work."""
        self.background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the supervisor failed", exc_info=error)
            self.fail(f"supervisor: {type(error).__name__}: {error}")


def _look_at(call: asyncio.Future[Any]) -> None:
    """An error that nobody waits for any more, as the actor was replaced, is not worth a traceback in the log."""
    if not call.cancelled():
        call.exception()
