"""Makers that join a live run, and makers that leave it: the supervisor's part behind `attach` and `detach`.

Guarantees: a newcomer gets no row before it holds and has checked a full version of the weights and agrees with the makers
of its kind; whatever is wrong with it is refused with the reason, and the run is what it was. Who leaves gives back or
finishes what it has, and leaves nothing behind. The run folder's config tells what there is now.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from buffer.config import Resources
from makers.config import RolloutMaker
from makers.parity import BOUND, Probe, difference
from topology.bundles import Bundle, BundleGroup, asked
from topology.capacity import PlannedActor
from topology.changes import group_of, grown, newcomers, shrunk
from topology.config import ConfigError, RunConfig, dump_config
from topology.crew import RunFailed
from topology.members import Member
from topology.placement import CannotPlace
from topology.runs import write_text

if TYPE_CHECKING:
    from topology.supervisor import Supervisor

MEETINGS = 20  # probes of each side until both were made with the same version
log = logging.getLogger("supervisor")


class Shifts:
    def __init__(self, run: Supervisor) -> None:
        self._run = run
        self._crew = run.crew
        self._one_at_a_time = asyncio.Lock()

    # --- joining ------------------------------------------------------------------------------------------------------

    async def attach(self, group: str, section: dict[str, Any] | None, replicas: int) -> list[str]:
        async with self._one_at_a_time:
            self._require_running("attach")
            crew, before = self._crew, self._crew.config
            after = grown(before, group, section, replicas, crew.members)
            names = newcomers(after, group, crew.members)
            crew.config = after  # what the newcomers are told
            members: list[Member] = []
            try:
                for name in names:
                    members.append(await self._enlist(self.planned(name)))
                await self._join_all(members)
            except BaseException as error:
                crew.config = before
                for member in members:
                    await self._refuse(member, str(error))
                raise
            self._write_config(after)
            self._run.write_status()
            for member in members:
                self._run.event("attach", maker=member.name)
            await self._tell_trainer()
            return names

    async def _join_all(self, members: list[Member]) -> None:
        """All of them, or none goes on."""
        joining = [asyncio.ensure_future(self._join(member)) for member in members]
        try:
            await asyncio.gather(*joining)
        finally:
            for task in joining:
                task.cancel()
            await asyncio.gather(*joining, return_exceptions=True)

    async def _refuse(self, member: Member, cause: str) -> None:
        """Another newcomer failed, perhaps after the buffer was told of this one."""
        self._forget(member)
        with suppress(RunFailed):  # a buffer that dies forgets it too
            await self._crew.ask(self._crew.buffer, "maker_died", member.name, f"not attached: {cause}")

    async def _tell_trainer(self) -> None:
        """Whose figures its metrics have. Training that is made anew reads it from the config."""
        if self._crew.config.collect is not None:
            return  # a collector has no such metrics
        makers = [member.name for member in self._crew.kind("maker") if member.state != "retired"]
        with suppress(RunFailed):
            await self._crew.ask(self._crew.consumer, "makers_are", makers, within=10.0)

    async def _enlist(self, planned: PlannedActor) -> Member:
        crew = self._crew
        if crew.placement.strategy(planned.name) is None and asked(planned.resources):
            try:
                await crew.placement.add(own_bundle(planned))
            except CannotPlace as error:
                raise ConfigError(str(error)) from None
        member = crew.enlist(planned)
        member.joining = True
        crew.make(member)
        return member

    def planned(self, name: str) -> PlannedActor:
        """A maker that the plan did not have. A cluster of the run's own counts no CPUs for it, unless it was told how many
        there are: it offers as many as the run asks for."""
        config = self._crew.config
        resources: Resources = config.makers[group_of(name)].resources
        own = self._run.folder.cluster()["keeper"] is not None
        if own and config.cluster.cpus is None:
            resources = resources.model_copy(update={"cpus": 0.0})
        return PlannedActor(name, "maker", resources, 0.0)

    async def _join(self, member: Member) -> None:
        crew = self._crew
        await crew.start_maker(member)
        if isinstance(crew.config.makers[group_of(member.name)], RolloutMaker):
            await self._check_parity(member)
        await self._run.recovery.there(crew.buffer)
        member.joining = False
        await crew.attach(member)

    async def _check_parity(self, member: Member) -> None:
        """Raises RunFailed for a maker that computes something else than those that work already."""
        peers = [
            other
            for other in self._crew.kind("maker")
            if other.life.useful and isinstance(self._crew.config.makers[group_of(other.name)], RolloutMaker)
        ]
        mine: dict[int, Probe] = {}
        theirs: dict[int, Probe] = {}
        for _ in range(MEETINGS if peers else 0):
            try:
                one, other = await asyncio.gather(
                    self._crew.ask(member, "probe"), self._crew.ask(peers[0], "probe"), return_exceptions=False
                )
            except RunFailed:
                if not member.life.alive:
                    raise
                break  # the other one died: there is nobody to compare with
            mine[one.version], theirs[other.version] = one, other
            if met := mine.keys() & theirs.keys():
                version = max(met)
                apart = difference(mine[version], theirs[version])
                self._run.event(
                    "parity", maker=member.name, against=peers[0].name, version=version, nats=round(apart, 5)
                )
                if not apart <= BOUND:
                    raise RunFailed(
                        f"{member.name}: its log-probs of version {version} differ by {apart:.3g} nats a token from those of "
                        f"{peers[0].name} (at most {BOUND:g}): it computes another model"
                    )
                return
        self._run.event("parity", maker=member.name, against=None, version=None, nats=None)

    # --- leaving ------------------------------------------------------------------------------------------------------

    async def detach(self, name: str, now: bool) -> None:
        async with self._one_at_a_time:
            self._require_running("detach")
            member = self._named(name)
            if member.state != "retired":  # one that was given up is only taken off the list
                member.life.drain()
            self._run.event("draining", maker=name, now=now)
            if member.attached_to is self._crew.buffer.handle:
                limits, lease = self._crew.config.limits, self._crew.config.buffer.lease_timeout
                with suppress(RunFailed):  # it dies: what it has given out is made again
                    await self._crew.ask(
                        self._crew.buffer, "detach", name, not now, within=max(limits.start, 2 * lease)
                    )
            if member.handle is not None and member.life.alive:
                await self._crew.close([member])
            self._crew.config = shrunk(self._crew.config, name)
            self._forget(member)
            self._write_config(self._crew.config)
            self._run.write_status()
            self._run.event("detach", maker=name)
            await self._tell_trainer()

    def _named(self, name: str) -> Member:
        member = self._crew.members.get(name)
        makers = ", ".join(maker.name for maker in self._crew.kind("maker"))
        if member is None or member.kind != "maker":
            raise ConfigError(f"{name}: run {self._run.config.name} has no such maker (there are: {makers})")
        if self._crew.in_training(member):
            raise ConfigError(
                f"{name}: shares its devices in turns with training (placement.colocate), so it must stay"
            )
        if member.state == "draining":
            raise ConfigError(f"{name}: is being detached already")
        return member

    def _forget(self, member: Member) -> None:
        self._crew.end(member)
        member.life.end()
        self._crew.members.pop(member.name, None)
        self._crew.placement.free(member.name)

    def _require_running(self, what: str) -> None:
        if self._run.state != "running":
            raise ConfigError(f"run {self._run.config.name} is {self._run.state}: {what} works while it runs")

    def _write_config(self, config: RunConfig) -> None:
        try:
            write_text(self._run.folder.config, dump_config(config))
        except OSError as error:  # a full disk; a resumed run would not have the change
            log.warning("config.yaml was not written: %s", error)


def own_bundle(actor: PlannedActor) -> BundleGroup:
    """What is reserved for one maker that comes later."""
    return BundleGroup(actor.name, "pack", (Bundle(actor.resources, (actor.name,)),))
