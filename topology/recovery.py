"""What is done when an actor dies: the supervisor's part that makes the run go on.

    a maker                  its rows are made by others at once; it is made anew and attached again
    the buffer               made anew from its own file; the makers are attached to it again
    the weight store         made anew; the trainer fills it again
    anything of training     all of it is made anew from the last checkpoint; makers and buffer go on meanwhile
    this supervisor          Ray starts it again, and it adopts the actors that it finds

Guarantees: whatever dies meanwhile is handled as well; each restart is an event with the seconds it took; what has died more
often than its limits allow ends the run, except a maker whose stage others fill.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ray

from buffer.config import Route
from topology.changes import group_of, were_joining, were_lost
from topology.config import load_config
from topology.crew import Origin, RunFailed
from topology.handles import ActorLost, call
from topology.lifecycle import NotAllowed
from topology.members import Member
from topology.roles import route_of, routes_of, stage_of
from topology.shifts import own_bundle
from trainers.checkpoints import CheckpointError, last_whole

if TYPE_CHECKING:
    from topology.supervisor import Supervisor

LOOK = 0.1  # seconds between two looks at whether somebody is back


class Recovery:
    def __init__(self, run: Supervisor) -> None:
        self._run = run
        self._crew = run.crew
        self._lost_training = asyncio.Event()
        self._lost_cause, self._pause = "", 0.0
        self._restarting_training = False

    # --- deaths -------------------------------------------------------------------------------------------------------

    def lost(self, member: Member, cause: str) -> None:
        """An actor died, hangs, or could not be started again."""
        self._crew.end(member)
        draining = member.state == "draining"
        pause = member.life.died(cause)
        if draining or member.joining:
            return  # who detaches or attaches it goes on from here
        if self._run.state != "running":
            self._run.fail(cause)
        elif self._crew.in_training(member):
            self._note_lost_training(member, cause, pause)
        elif member.kind == "maker":
            self._run.spawn(self._without_maker(member, cause, pause), f"without {member.name}")
        elif pause is None:
            self._run.fail(self._given_up(member, cause))
        else:
            again = self._buffer_again if member.kind == "buffer" else self._weights_again
            self._run.spawn(self._again(member, pause, again), f"{member.name} again")

    def _given_up(self, member: Member, cause: str) -> str:
        limits = self._run.config.limits
        if limits.restarts == 0:
            return cause
        return (
            f"{cause} (death {len(member.life.deaths)} within limits.restart_window = {limits.restart_window:g} s, "
            f"limits.restarts is {limits.restarts})"
        )

    async def _without_maker(self, member: Member, cause: str, pause: float | None) -> None:
        with suppress(RunFailed):  # the buffer dies too; or it is told when the maker comes back
            await self._crew.ask(self._crew.buffer, "maker_died", member.name, cause)
        if pause is None:
            told = self._given_up(member, cause)
            if self._run.config.limits.restarts == 0 or not self._others_fill(member):
                self._run.fail(told)
            else:
                self._run.event("gave_up", actor=member.name, cause=told)
            return
        await self._again(member, pause, self._maker_again)

    async def _again(self, member: Member, pause: float, start: Callable[[Member], object]) -> None:
        began = time.monotonic()
        await asyncio.sleep(pause)
        if member.state != "dead" or self._crew.members.get(member.name) is not member:
            return  # it was detached meanwhile
        try:
            await self._crew.make_anew([member])
            await start(member)  # type: ignore[misc]
        except NotAllowed:
            if self._crew.members.get(member.name) is member and member.state != "draining":
                raise
            self._crew.end(member)  # it was detached meanwhile
            return
        except RunFailed as error:
            if (member.life.alive or member.state == "restarting") and member.state != "draining":  # else it is handled
                self._run.event("death", actor=member.name, cause=str(error))
                self.lost(member, str(error))
            return
        self._run.event("restart", actor=member.name, seconds=round(time.monotonic() - began, 3))

    async def _maker_again(self, member: Member) -> None:
        await self._crew.start_maker(member)
        await self.there(self._crew.buffer)
        await self._crew.ask(
            self._crew.buffer, "maker_died", member.name, str(member.life.cause)
        )  # if it knows that one
        await self._crew.attach(member)

    async def _buffer_again(self, buffer: Member) -> None:
        await self._crew.start_buffer(self._run.origin, recover=True)
        self._run.watch_buffer()
        for maker in self._crew.kind("maker"):
            if maker.life.useful:
                with suppress(RunFailed):  # dead as well: attached when it comes back
                    await self._crew.attach(maker)

    async def _weights_again(self, weights: Member) -> None:
        """Where training is lost too, its restart connects the store and publishes into it."""
        if not self.training_is_down:
            await self._crew.connect_weights()
            with suppress(RunFailed):  # the trainer dies too: what comes in its place publishes
                await self._crew.ask(self._crew.consumer, "refill")

    async def there(self, member: Member) -> None:
        """Until others may rely on it. Raises RunFailed after limits.start seconds."""
        await self._until(member, lambda: member.life.useful)

    async def _made(self, member: Member) -> None:
        """Until it has a process. Raises RunFailed after limits.start seconds."""
        await self._until(member, lambda: member.life.alive)

    async def _until(self, member: Member, back: Callable[[], bool]) -> None:
        limit = self._run.config.limits.start
        try:
            async with asyncio.timeout(limit):
                while not back():  # noqa: ASYNC110  (it has many ways to come back)
                    await asyncio.sleep(LOOK)
        except TimeoutError:
            raise RunFailed(f"{member.name}: not back within limits.start = {limit:g} s") from None

    # --- training -----------------------------------------------------------------------------------------------------

    @property
    def training_is_down(self) -> bool:
        return self._restarting_training or self._lost_training.is_set()

    def _note_lost_training(self, member: Member, cause: str, pause: float | None) -> None:
        if pause is None:
            self._run.fail(self._given_up(member, cause))
            return
        if not self._lost_training.is_set():
            self._lost_cause, self._pause = cause, 0.0
        self._pause = max(self._pause, pause)
        self._lost_training.set()

    async def training_lost(self) -> None:
        """Returns when an actor of training has died."""
        await self._lost_training.wait()

    async def training_was_lost(self, within: float) -> bool:
        """Whether one has died, or does within so many seconds."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._lost_training.wait(), within)
        return self._lost_training.is_set()

    async def restart_training(self) -> None:
        """Until all of training is back, at the last checkpoint. Raises RunFailed when that is tried too often."""
        began = time.monotonic()
        self._restarting_training = True
        try:
            while self._lost_training.is_set():
                await self._try_training()
        finally:
            self._restarting_training = False
        origin = self._run.origin
        seconds = round(time.monotonic() - began, 3)
        self._run.event("restart", actor="training", step=origin.step, version=origin.version, seconds=seconds)

    async def _try_training(self) -> None:
        cause = self._lost_cause
        self._lost_training.clear()
        await asyncio.sleep(self._pause)
        crew = self._crew
        try:
            for maker in (member for member in crew.training() if member.kind == "maker"):
                await crew.ask(crew.buffer, "maker_died", maker.name, cause)
            await crew.make_anew(crew.training())
            if crew.config.collect is not None:
                await crew.start_training(self._run.origin)
                await self.there(crew.buffer)
                await crew.publish_start()
                return
            await self._made(crew.weights)
            await self.there(crew.buffer)
            self._run.origin = await self._origin()
            await crew.start_training(self._run.origin)
            await self.there(crew.buffer)
            await crew.ask(crew.buffer, "rewind", self._run.origin.step)
            await self._made(crew.weights)
            await crew.connect_weights()  # once more: the store may be another by now
            await crew.publish_start()
            for maker in (member for member in crew.training() if member.kind == "maker"):
                await self._maker_again(maker)
        except RunFailed as error:
            if await self.training_was_lost(LOOK):
                return  # somebody else of it died: once more
            self._run.event("death", actor=crew.consumer.name, cause=str(error))
            self.lost(crew.consumer, str(error))

    async def _origin(self) -> Origin:
        """The last checkpoint, and the number after that of the newest version that anybody has seen."""
        crew = self._crew
        seen = [member.status.get("version") for member in crew.members.values()]
        if crew.weights.life.useful:
            seen.append((await crew.ask(crew.weights, "status"))["version"])
        seen.append((await crew.ask(crew.buffer, "status"))["published"])
        newest = max((version for version in seen if version is not None), default=-1)
        try:
            checkpoint, broken = last_whole(self._run.folder.checkpoints)
        except CheckpointError as error:
            raise RunFailed(f"training cannot be made anew: {error}") from None
        if checkpoint is None:
            return Origin(version=newest + 1)  # none was written yet
        if broken is not None:
            self._run.event("broken_checkpoint", cause=broken, instead=checkpoint.path.name)
        return Origin(checkpoint.step, newest + 1, folder=str(checkpoint.path))

    # --- what is missing ----------------------------------------------------------------------------------------------

    def waits_for(self) -> str | None:
        """What the run cannot go on without and is not there now."""
        if self.training_is_down:
            return f"training is made anew: {self._lost_cause}"
        for name in ("buffer", "weights") if self._crew.config.collect is None else ("buffer",):
            service = self._crew.members.get(name)
            if service is None or (service.state == "starting" and service.life.cause is None):
                return "the supervisor looks for the actors of the run"
            if not service.life.useful:
                return f"{name} is made anew: {service.life.cause}"
        wanted = [(stage, route) for stage, routes in routes_of(self._crew.config).items() for route in routes]
        for stage, route in sorted(wanted, key=str):
            fills = [maker for maker in self._crew.kind("maker") if self._fills(maker, stage, route)]
            if not any(member.life.useful for member in fills):
                comes = [member.name for member in fills if member.state in ("dead", "restarting", "starting", "stale")]
                which = stage if route is None else f"{stage} of rows with {route}"
                return f"no maker for {which}: " + (f"{', '.join(comes)} is made anew" if comes else "attach one")
        return None

    def _others_fill(self, gone: Member) -> bool:
        group = group_of(gone.name)
        maker = self._crew.config.makers[group]
        stage, route = stage_of(maker, group), route_of(self._crew.config, maker)
        fills = [other for other in self._crew.kind("maker") if self._fills(other, stage, route)]
        return any(member.state not in ("retired", "draining") for member in fills)

    def _fills(self, member: Member, stage: str, route: Route | None) -> bool:
        """Whether the maker takes all rows of this route."""
        group = group_of(member.name)
        maker = self._crew.config.makers[group]
        return stage_of(maker, group) == stage and route_of(self._crew.config, maker) in (None, route)

    # --- after a death of the supervisor itself -----------------------------------------------------------------------

    async def adopt(self, status: dict[str, Any]) -> None:
        """Find the actors of the run by their names, and go on from its last `status`. Raises RunFailed if it did not run."""
        run, crew = self._run, self._crew
        if status["state"] not in ("running", "waiting"):
            raise RunFailed(f"supervisor: died while the run was {status['state']}")
        run.state = "running"
        crew.config = load_config(run.folder.config)
        names = set(crew.names_there())
        joining = set(were_joining(crew.config, names, status["actors"]))
        lost = were_lost(crew.config, names, status["actors"])
        makers = {
            name for name in names - joining if name.startswith("maker/") and group_of(name) in crew.config.makers
        }
        planned = {actor.name: actor for actor in run.plan.actors if actor.kind != "supervisor"}
        actors = [actor for actor in planned.values() if actor.kind != "maker"]
        actors += [planned.get(name) or run.shifts.planned(name) for name in sorted({*makers, *lost})]
        run.placement.adopt([*run.plan.groups, *(own_bundle(actor) for actor in actors if actor.kind == "maker")])
        for actor in actors:
            crew.enlist(actor)
        # At once: a hung one costs its limit, and several of them no more than that.
        await asyncio.gather(*(self._adopt(member, member.name in names) for member in crew.members.values()))
        crew.end_strangers()
        run.event("adopted", actors=len(crew.members))
        for maker in crew.kind("maker"):
            if maker.life.useful:
                await self._adopt_maker(maker)
        for name in names - crew.members.keys():
            with suppress(RunFailed):  # the buffer may have been told of it a moment ago
                await crew.ask(crew.buffer, "maker_died", name, "the supervisor died while it was being attached")

    async def _adopt(self, member: Member, there: bool) -> None:
        if there:
            with suppress(ValueError):  # died a moment ago
                member.handle = ray.get_actor(member.name, namespace=self._run.identity.namespace)
        if member.handle is None:
            self._run.ended(member, f"{member.name}: gone when the supervisor came back")
            return
        self._run.watch.over(member)
        limit = self._run.config.limits.ping
        try:
            place = await call(member.handle.ping.remote(), limit, member.name)
        except ActorLost:
            return  # its death is told by the watch
        except TimeoutError:
            self._run.ended(member, f"{member.name}: hung, no answer for limits.ping = {limit:g} s")
            return
        member.place = place
        if place["started"]:
            member.life.joined()
        else:
            self._run.ended(member, f"{member.name}: was being started when the supervisor died")

    async def _adopt_maker(self, maker: Member) -> None:
        with suppress(RunFailed):
            maker.info = await self._crew.ask(maker, "info")
            known = (await self._crew.ask(self._crew.buffer, "status"))["makers"].get(maker.name)
            if known is None:
                await self._crew.attach(maker)
                return
            maker.attached_to = self._crew.buffer.handle
            if known["state"] == "draining":  # `tandem detach` was under way
                self._run.spawn(self._run.shifts.detach(maker.name, now=False), f"detach {maker.name}")
