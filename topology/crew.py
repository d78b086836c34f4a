"""The actors of a run: makes them, brings each to the point where others may rely on it, and makes them anew.

Guarantees: an actor is asked to do something only when what it relies on is there, and every such request has a deadline; of
each name there is one actor at a time, and whoever it replaces is killed first, hung or not. What a restart is for, and
when it is due, is not decided here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from buffer.config import Resources
from topology.actors import (
    BufferActor,
    CollectorActor,
    CriticActor,
    Identity,
    MakerActor,
    RankActor,
    Shell,
    TrainerActor,
    WeightsActor,
)
from topology.bundles import makers_in_turns, shared_devices, sharers, trainers_in_turns
from topology.capacity import PlannedActor
from topology.consumer import COLLECTOR, consumer_of
from topology.handles import ActorLost, call
from topology.lifecycle import Lifecycle
from topology.members import Member, threads_of
from topology.placement import Placement
from topology.plan import Plan
from topology.roles import CRITIC, POLICY, role_of
from trainers.checkpoints import CRITIC_FOLDER, RANKS_FOLDER

CLOSE = 3.0  # seconds a maker has to close
NAME_FREE = 60.0  # seconds until the name of an actor that was killed can be given again
CLASSES: dict[str, type[Shell]] = {
    "buffer": BufferActor,
    "weights": WeightsActor,
    "trainer": TrainerActor,
    "critic": CriticActor,
    COLLECTOR: CollectorActor,
    "rank": RankActor,
    "maker": MakerActor,
}
SERVICES = (
    "buffer",
    "weights",
    "trainer",
    COLLECTOR,
)  # they write to the run folder, which is on the supervisor's node


class RunFailed(Exception):
    """The run cannot go on; the message names the actor and the cause."""


@dataclass(frozen=True)
class Origin:
    """What training starts from. `folder`: of a checkpoint. `version`: the number that its weights are published under."""

    step: int = 0
    version: int = 0
    folder: str | None = None


class Crew:
    """`watch(member)` is called for each new actor."""

    def __init__(self, identity: Identity, plan: Plan, placement: Placement, watch: Callable[[Member], None]) -> None:
        self.identity = identity
        self.config = identity.config
        self.plan = plan
        self.placement = placement
        self.members: dict[str, Member] = {}
        self._watch = watch
        self._sharers = sharers(self.config)
        self._in_turns = makers_in_turns(self.config)
        self._buckets: int | None = None  # of one version of the weights
        self._attaching = asyncio.Lock()

    # --- who there is -------------------------------------------------------------------------------------------------

    @property
    def buffer(self) -> Member:
        return self.members["buffer"]

    @property
    def weights(self) -> Member:
        return self.members["weights"]

    @property
    def consumer(self) -> Member:
        """Of complete rows."""
        return self.members[consumer_of(self.config)]

    def kind(self, kind: str) -> list[Member]:
        return [member for member in self.members.values() if member.kind == kind]

    def ranks(self, role: str) -> list[Member]:
        return [member for member in self.kind("rank") if role_of(member.name) == role]

    def in_training(self, member: Member) -> bool:
        """Whether its death costs the state of training, so that all of these are made anew together."""
        return member.kind in ("trainer", "critic", "rank", COLLECTOR) or member.name in self._in_turns

    def training(self) -> list[Member]:
        return [member for member in self.members.values() if self.in_training(member)]

    def names_there(self) -> list[str]:
        """Of all actors of the run in the cluster, without the supervisor."""
        everywhere = ray.util.list_named_actors(all_namespaces=True)
        mine = [row["name"] for row in everywhere if row["namespace"] == self.identity.namespace]
        return [name for name in mine if name != self.identity.name]

    def end_strangers(self) -> None:
        """Actors of the run that are no members, left by an earlier life of the supervisor."""
        for name in set(self.names_there()) - self.members.keys():
            with suppress(ValueError):  # gone meanwhile
                ray.kill(ray.get_actor(name, namespace=self.identity.namespace), no_restart=True)

    # --- making actors ------------------------------------------------------------------------------------------------

    def enlist(self, planned: PlannedActor) -> Member:
        """A member that has no actor yet."""
        limits = self.config.limits
        member = self.members[planned.name] = Member(planned, Lifecycle(limits.restarts, limits.restart_window))
        return member

    def make(self, member: Member) -> None:
        member.place, member.status, member.attached_to = {}, {}, None
        member.handle = self._create(member.planned)
        self._watch(member)

    async def make_anew(self, members: Iterable[Member]) -> None:
        """Kills what is left of their actors, and makes others of the same names."""
        again = list(members)
        for member in again:
            self.end(member)
            member.life.restart()
        for member in again:
            await self._replace(member)
            member.life.created()

    def end(self, member: Member) -> None:
        """Nobody watches it any more, and it is gone (or will be, within seconds, if it was stopped)."""
        for watcher in member.watchers:
            watcher.cancel()
        member.watchers.clear()
        if member.handle is not None:
            ray.kill(member.handle, no_restart=True)

    async def _replace(self, member: Member) -> None:
        deadline = asyncio.get_running_loop().time() + NAME_FREE
        while True:
            try:
                self.make(member)
                return
            except ValueError as error:  # the name is still taken
                if asyncio.get_running_loop().time() > deadline:
                    raise RunFailed(
                        f"{member.name}: the one before is not gone after {NAME_FREE:g} s: {error}"
                    ) from None
                await asyncio.sleep(0.1)

    def _create(self, planned: PlannedActor) -> Any:
        resources = Resources(cpus=0) if planned.name in self._sharers else planned.resources
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
        if planned.kind in SERVICES:
            here = ray.get_runtime_context().get_node_id()
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(here, soft=False)
        threads = threads_of(self.config, planned)
        identity = replace(
            self.identity, name=planned.name, threads=threads, gpus=options["num_gpus"], config=self.config
        )
        return ray.remote(CLASSES[planned.kind]).options(**options).remote(identity)

    # --- bringing them up ---------------------------------------------------------------------------------------------

    async def start_all(self, origin: Origin) -> None:
        """Everything at once, as far as one does not need the other."""
        buffer = asyncio.ensure_future(self.start_buffer(origin))
        trainer = asyncio.ensure_future(self._start_all_training(origin, buffer))
        makers = (self._start_first(member, buffer, trainer) for member in self.kind("maker"))
        await asyncio.gather(buffer, trainer, *makers)

    async def start_buffer(self, origin: Origin, recover: bool = False) -> None:
        """With `recover` as it was, from the file that an earlier one has left."""
        await self.ask(self.buffer, "start", origin.step, origin.folder, recover)
        self.buffer.life.joined()

    async def start_training(self, origin: Origin) -> None:
        """All ranks, then who calls them; or the collector. Nothing is published yet."""
        if self.config.collect is not None:
            await self.ask(self.consumer, "start")
            self.consumer.life.joined()
            return
        await asyncio.gather(*(self._start_ranks(role, origin) for role in self.config.trainers))
        await self.connect_weights()
        if critic := self.members.get(f"trainer/{CRITIC}"):
            await self.ask(critic, "start", [rank.name for rank in self.ranks(CRITIC)])
            critic.life.joined()
        names = [rank.name for rank in self.ranks(POLICY)]
        await self.ask(self.consumer, "start", names, origin.step, origin.version)
        self.consumer.life.joined()

    async def connect_weights(self) -> None:
        """The store is told whom to call."""
        ranks = self.ranks(POLICY)
        if self._buckets is None:  # a rank that trains answers nothing but a ping
            self._buckets = next((rank.place["buckets"] for rank in ranks if rank.place.get("buckets")), None)
        if self._buckets is None:
            self._buckets, *_ = await asyncio.gather(*(self.ask(rank, "invoke", "num_buckets") for rank in ranks))
        await self.ask(self.weights, "connect", [rank.name for rank in ranks], self._buckets)
        if not self.weights.life.useful:
            self.weights.life.joined()

    async def publish_start(self) -> None:
        """The policy's first act. Then ranks that share their devices make room for the makers."""
        await self.ask(self.consumer, "publish_start")
        sharing = [rank for role in trainers_in_turns(self.config) for rank in self.ranks(role)]
        await asyncio.gather(*(self.ask(rank, "invoke", "offload") for rank in sharing))

    async def start_maker(self, member: Member) -> None:
        """Its engine is up; the buffer does not know it yet."""
        await self._share_devices(member)
        member.info = await self.ask(member, "start")
        member.life.loaded()

    async def attach(self, member: Member) -> None:
        """The buffer calls it from now on. Attached already to the buffer that there is now, it stays so."""
        async with self._attaching:
            if member.attached_to is not self.buffer.handle:
                await self.ask(self.buffer, "attach", member.info)
                member.attached_to = self.buffer.handle
        if member.state == "stale":
            member.life.joined()

    async def close(self, members: Iterable[Member]) -> dict[str, Exception]:
        """Lets makers give back what they hold outside their process (a remote session, a file); who did not, and why."""
        useful = [member for member in members if member.life.alive and member.state != "starting"]
        closing = [asyncio.wait_for(member.handle.close.remote(), CLOSE) for member in useful]
        ended = await asyncio.gather(*closing, return_exceptions=True)
        return {m.name: error for m, error in zip(useful, ended, strict=True) if isinstance(error, Exception)}

    async def ask(self, member: Member, method: str, *args: Any, within: float | None = None) -> Any:
        """Raises RunFailed with the actor and the cause. `within`: seconds; limits.start by default."""
        name, limit = member.name, self.config.limits.start if within is None else within
        try:
            return await call(getattr(member.handle, method).remote(*args), limit, f"{name}: {method}")
        except (TimeoutError, ActorLost) as error:
            raise RunFailed(str(error)) from None
        except Exception as error:
            raise RunFailed(f"{name}: {one_line(error)}") from None

    async def _start_all_training(self, origin: Origin, buffer: Awaitable[None]) -> None:
        await self.start_training(origin)
        await buffer
        await self.publish_start()

    async def _start_first(self, member: Member, buffer: Awaitable[None], trainer: Awaitable[None]) -> None:
        if member.name in self._in_turns:
            await trainer  # the ranks have the devices first, to publish what the run starts from
        await self.start_maker(member)
        await buffer
        await self.attach(member)

    async def _start_ranks(self, role: str, origin: Origin) -> None:
        """They meet, and load their model or what the checkpoint has of it."""
        ranks, folder = self.ranks(role), RANKS_FOLDER if role == POLICY else CRITIC_FOLDER
        for rank in ranks:
            await self._share_devices(rank)
        restore = None if origin.folder is None else str(Path(origin.folder) / folder)
        address = await self.ask(ranks[0], "free_address")

        async def one(index: int, rank: Member) -> None:
            await self.ask(rank, "start", index, len(ranks), address, restore)
            rank.life.joined()

        await asyncio.gather(*(one(index, rank) for index, rank in enumerate(ranks)))

    async def _share_devices(self, member: Member) -> None:
        """An actor that uses what others of its bundle asked for is told which devices these got."""
        if member.name not in self._sharers:
            return
        bundle = self.plan.bundle_of(member.name)
        owners = [self.members[actor] for actor in bundle.actors if actor not in self._sharers]
        devices = {owner.name: (await self.ask(owner, "ping"))["devices"] for owner in owners}
        await self.ask(member, "use_devices", shared_devices(bundle, member.name, devices))


def one_line(error: BaseException) -> str:
    """The type and message of a remote error without its traceback (which is in the actor's log)."""
    cause = getattr(error, "cause", None) or error
    text = str(cause).strip()
    return f"{type(cause).__name__}: {text}" if text else type(cause).__name__
