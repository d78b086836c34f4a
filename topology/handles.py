"""How the plain classes of the other folders see each other through Ray: one small class for each edge of the picture.

Guarantees: every call has a deadline and a name; a dead actor shows as `ActorLost` with its name; whoever calls owns what
comes back, so rows live in the buffer's ownership and weights in the store's, whatever happens to who made them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError

from buffer.evaluation import EvaluationResult
from buffer.records import ColumnsLost, DataFailure, InfraFailure, Lease, MakerInfo, Produced, Prompt, SampledRow
from topology.wire import pack_lease, unpack_produced
from weights.manifest import Manifest

T = TypeVar("T")
FOREVER = float("inf")
AGAIN = 0.2  # seconds between two looks for an actor that was lost
MARGIN = 10.0  # seconds a call may take beyond the deadline that the callee itself keeps


class ActorLost(RuntimeError):
    """An actor died or cannot be reached."""


class NotReady(RuntimeError):
    """An actor that was made anew cannot do yet what it is for."""


async def call(answer: Awaitable[T], timeout: float, what: str) -> T:
    """Await one remote call. Raises TimeoutError and ActorLost that name `what`."""
    try:
        return await asyncio.wait_for(answer, timeout)
    except RayTaskError as error:
        raise without_ray(error) from error
    except TimeoutError as error:
        if str(error):  # the callee's own deadline, already named
            raise
        raise TimeoutError(f"{what} did not answer within {timeout:.0f} s") from None
    except RayActorError as error:
        raise ActorLost(f"{what}: {death_cause(error)}") from None


def without_ray(error: RayTaskError) -> Exception:
    """What the callee raised. Ray's own error has the whole remote traceback as its text."""
    return error.cause if isinstance(error.cause, Exception) else RuntimeError(str(error.cause).splitlines()[-1])


def death_cause(error: RayError) -> str:
    """One line from Ray's long texts."""
    text = str(error)
    if "SIGKILL" in text or "connection error code 2" in text:
        return "its process died without a word (killed, or out of memory)"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if "error raised in its creation task" in text or "creation task" in lines[0]:
        return lines[-1]
    return lines[0]


async def answer_of(reference: Awaitable[T]) -> T:
    """As a coroutine, which a task can be made of."""
    return await reference


class Peer:
    """A named actor of the run, for calls that bear being made twice.

    A call that meets a dead actor looks the name up again until its deadline: the actor may be made anew meanwhile, and is
    given the time to get ready. What such a call had done before the death it may do once more.
    """

    def __init__(self, name: str, namespace: str) -> None:
        self.name = name
        self._namespace = namespace
        self._actor: ActorHandle | None = None

    async def call(self, method: str, *args: Any, timeout: float, what: str | None = None, **named: Any) -> Any:
        """Raises TimeoutError, and ActorLost if no actor of the name answered until then."""
        asked = what or f"{self.name}: {method}"
        deadline = time.monotonic() + timeout
        while True:
            try:
                answer = getattr(self._found(), method).remote(*args, **named)
                return await call(answer, deadline - time.monotonic(), asked)
            except (ActorLost, NotReady) as error:
                if isinstance(error, ActorLost):
                    self._actor = None
                if time.monotonic() + AGAIN >= deadline:
                    raise
                await asyncio.sleep(AGAIN)

    def _found(self) -> ActorHandle:
        if self._actor is None:
            try:
                self._actor = ray.get_actor(self.name, namespace=self._namespace)
            except ValueError:
                raise ActorLost(f"{self.name}: there is no such actor") from None
        return self._actor


class RayMaker:
    """The buffer's view of a maker: implements `buffer.dispatcher.MakerHandle`."""

    def __init__(self, info: MakerInfo, actor: ActorHandle) -> None:
        self.info = info
        # Two returns: the small answer is fetched, the columns stay where they were made and only the reference comes.
        self._make = actor.make.options(num_returns=2)

    async def make(self, lease: Lease, inputs: Sequence[Any]) -> tuple[Produced, Any]:
        produced, columns = self._make.remote(pack_lease(lease), *inputs)
        try:
            return unpack_produced(await produced), columns
        except asyncio.CancelledError:
            ray.cancel(produced)
            raise
        except RayActorError as error:
            await _look_at(columns)
            raise InfraFailure(f"{self.info.name}: {death_cause(error)}") from None
        except RayTaskError as error:
            await _look_at(columns)
            if lost := self._lost(error.cause, inputs):
                raise ColumnsLost(_kind(error.cause), lost) from None
            # Ray's own error carries the whole remote traceback in its text; that is in the maker's log.
            if isinstance(error.cause, DataFailure | InfraFailure):
                raise error.cause from None
            raise InfraFailure(f"{self.info.name}: {type(error.cause).__name__}: {error.cause}") from None

    def _lost(self, error: Exception, inputs: Sequence[Any]) -> list[str]:
        """The stages whose columns, among the inputs, Ray could not bring to the maker; what the maker lost itself is not one."""
        if not isinstance(error, ObjectLostError):
            return []
        return [
            stage for stage, own in zip(self.info.needs, _hexes(inputs), strict=True) if own == error.object_ref_hex
        ]


def _hexes(arguments: Sequence[Any]) -> list[str | None]:
    """The names of the objects among the arguments of a call, as Ray's errors give them."""
    return [argument.hex() if isinstance(argument, ray.ObjectRef) else None for argument in arguments]


def _kind(error: ObjectLostError) -> str:
    """In a few words; Ray's own text is a page on how to find out more."""
    return f"{type(error).__name__} (who owned them, or the node where they were, is gone)"


async def _look_at(failed: Any) -> None:
    """Ray prints a traceback for an error that nobody fetched; this reference has the one of the answer beside it."""
    with suppress(RayError):
        await failed


class RayWeightClient:
    """A maker's view of the weight store: implements `weights.client.WeightClient`."""

    def __init__(self, store: Peer, timeout: float) -> None:
        self._store = store
        self._timeout = timeout

    async def wait_newer(self, than: int, timeout: float) -> int:
        return await self._store.call(
            "wait_newer", than, timeout, timeout=timeout + MARGIN, what="weights: wait for a newer version"
        )

    async def pull(self, version: int | None = None) -> tuple[Manifest, list[Any]]:
        manifest, references = await self._store.call("get", version, timeout=self._timeout)
        buckets = await call(asyncio.gather(*references), self._timeout, f"weights: pull version {manifest.version}")
        return manifest, list(buckets)


class RayExporter:
    """The weight store's view of a trainer: implements `weights.store.Exporter`. The store, as caller, owns the buckets."""

    def __init__(self, ranks: Sequence[ActorHandle], buckets: int, timeout: float) -> None:
        self._ranks = list(ranks)
        self._buckets = buckets
        self._timeout = timeout

    async def export(self, version: int) -> tuple[Manifest, list[Any]]:
        first, *others = self._ranks
        manifest, *buckets = first.export.options(num_returns=1 + self._buckets).remote(version)
        walked = [rank.export.remote(version) for rank in others]  # for the collectives: they return nothing
        found, *_ = await call(
            asyncio.gather(manifest, *walked), self._timeout, f"trainer: export of version {version}"
        )
        return found, buckets


class RayWorker:
    """An actor as a worker of a group: implements `trainers.rank_group.Worker`."""

    def __init__(self, name: str, actor: ActorHandle) -> None:
        self.name = name
        self._actor = actor

    async def invoke(self, method: str, *args: Any) -> Any:
        try:
            return await self._actor.invoke.remote(method, *args)
        except RayTaskError as error:
            if isinstance(error.cause, ObjectLostError) and error.cause.object_ref_hex in _hexes(args):
                raise ColumnsLost(_kind(error.cause)) from None
            raise without_ray(error) from error
        except RayActorError as error:
            raise ActorLost(death_cause(error)) from None

    def close(self) -> None:
        if ray.is_initialized():  # who has left the cluster has left its actors
            ray.kill(self._actor)


class RayCritic:
    """A policy's view of its critic: implements `trainers.ports.ValueModel`.

    The references go inside a list: so they arrive as references, and Ray brings the columns to the critic's ranks only.
    """

    def __init__(self, critic: ActorHandle, timeout: float) -> None:
        self._critic = critic
        self._timeout = timeout

    async def values(self, rows: Any, references: Sequence[Any]) -> list[Any]:
        return await self._call("values", rows, list(references))

    async def train(self, rows: Any, labels: Any, references: Sequence[Any]) -> Any:
        return await self._call("train", rows, labels, list(references))

    async def stage(self) -> None:
        await self._call("stage")

    async def write(self, folder: str) -> None:
        await self._call("write", folder)

    async def _call(self, method: str, *args: Any) -> Any:
        return await call(getattr(self._critic, method).remote(*args), self._timeout + MARGIN, f"critic: {method}")


class RayRows:
    """A trainer's view of the buffer: implements `trainers.ports.RowSource`."""

    def __init__(self, buffer: Peer, timeout: float) -> None:
        self._buffer = buffer
        self._timeout = timeout

    async def sample(self, groups: int, timeout: float) -> list[SampledRow]:
        return await self._buffer.call("sample", groups, timeout, timeout=timeout + MARGIN)

    async def fetch(self, reference: Any) -> Any:
        try:
            return await call(reference, self._timeout, "buffer: fetch of a column")
        except ObjectLostError as error:
            raise ColumnsLost(_kind(error)) from None

    async def trained(self, row_ids: Sequence[int], step: int) -> None:
        await self._call("trained", list(row_ids), step)

    async def dropped(self, row_ids: Sequence[int], reason: str) -> None:
        await self._call("dropped", list(row_ids), reason)

    async def lost(self, row_id: int, stages: Sequence[str], cause: str) -> None:
        await self._call("lost", row_id, list(stages), cause)

    async def published(self, version: int, step: int) -> None:
        await self._call("published", version, step)

    async def unroute(self, makers: Sequence[str]) -> None:
        await self._buffer.call("unroute", list(makers), timeout=FOREVER)  # each row has its deadline

    async def route(self, makers: Sequence[str]) -> None:
        await self._call("route", list(makers))

    async def status(self) -> dict[str, Any]:
        return await self._call("status")

    async def cut(self) -> Any:
        return await self._call("cut")

    async def evaluate(
        self, prompts: Sequence[Prompt], *, samples: int, min_version: int, seed: int, timeout: float
    ) -> EvaluationResult:
        settings = {"samples": samples, "min_version": min_version, "seed": seed}
        limits = {"timeout": timeout + MARGIN, "what": "buffer: evaluation"}
        return await self._buffer.call("evaluate", list(prompts), settings, timeout, **limits)

    async def _call(self, method: str, *args: Any) -> Any:
        return await self._buffer.call(method, *args, timeout=self._timeout)


class RaySleeper:
    """A maker that shares its devices: implements `trainers.turns.Sleeper`."""

    def __init__(self, maker: Peer, level: int, timeout: float) -> None:
        self.name = maker.name
        self._maker = maker
        self._level = level
        self._timeout = timeout

    async def sleep(self) -> None:
        await self._maker.call("sleep", self._level, timeout=self._timeout)

    async def wake(self) -> None:
        await self._maker.call("wake", timeout=self._timeout)


class RayPublisher:
    """A trainer's view of the weight store."""

    def __init__(self, store: Peer, timeout: float) -> None:
        self._store = store
        self._timeout = timeout

    async def publish(self, version: int) -> None:
        await self._store.call("publish", version, timeout=self._timeout + MARGIN)
