"""Groups of plain objects that are called as one: here without a cluster, in actors with one.

`@worker(group="NAME")` on a class makes its construction build one object in each worker of the group, and gives back a
`Group`; `@function(...)` on its methods says how a call is spread over them. How many workers there are is declared by
`with groups(DeviceGroup("NAME", workers=...))`, and what is built in that block is ended with it. Where this process has
joined a Ray cluster, a worker of a declared group is an actor; else it is an object with a thread of its own.
Without a declaration there is one, here.

Guarantees: a program gives the same answers in both places; every wait has a deadline; an error names method and rank.
docs/groups.md has an example.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from buffer.config import Resources
from trainers.dispatch import call_of, function, positional
from trainers.rank_group import LocalWorker, RankError, RankGroup

__all__ = ["DeviceGroup", "Future", "Group", "RankError", "Resources", "function", "groups", "worker"]

T = TypeVar("T")


@dataclass(frozen=True)
class DeviceGroup:
    """How many workers a group has, and what each asks of the cluster. Deadlines in seconds."""

    name: str
    workers: int = 1
    resources: Resources = field(default_factory=Resources)
    timeout: float = 600.0  # of one call
    start: float = 60.0  # until all objects are built

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"group {self.name} has {self.workers} workers: it needs at least 1")


@contextmanager
def groups(*declared: DeviceGroup) -> Iterator[None]:
    """Declare groups for the block. What is built in the block, by any thread, is ended when it is left."""
    names = [group.name for group in declared]
    if len(set(names)) < len(names):
        raise ValueError(f"groups {', '.join(names)}: a name stands twice")
    scope = _Scope({group.name: group for group in declared})
    _scopes.append(scope)
    try:
        yield
    finally:
        _scopes.remove(scope)
        for group in scope.built:
            group.close()


def worker(group: str | Sequence[str]) -> Callable[[type[T]], type[T]]:
    """Mark a class whose objects work in groups: constructing it builds one in each worker and gives back a `Group`.

    With several groups there are objects in each, and the methods say which group answers: `@function(group=...)`.
    """
    names = (group,) if isinstance(group, str) else tuple(group)

    def mark(kind: type[T]) -> type[T]:
        if kind.__new__ not in (object.__new__, _construct):
            raise TypeError(f"{kind.__name__} has a __new__ of its own: a worker class is a plain class")
        for name, method in vars(kind).items():
            call = call_of(method)
            if call is not None and not (call.group in names or (call.group is None and len(names) == 1)):
                raise ValueError(f"{kind.__name__}.{name} is of group {call.group}, the class of: {', '.join(names)}")
        kind.worker_groups = names  # type: ignore[attr-defined]
        kind.__new__ = _construct  # type: ignore[assignment, method-assign]
        return kind

    return mark


class Future:
    """The answer of one call, to come. It comes, or fails, by the deadline of the group, and can be awaited too."""

    def __init__(self, what: str, answer: concurrent.futures.Future[Any]) -> None:
        self._what = what
        self._answer = answer

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the answer, `timeout` seconds at most; after a TimeoutError it may be asked for again."""
        try:
            return self._answer.result(timeout)
        except TimeoutError:
            if self._answer.done():
                raise
            raise TimeoutError(f"{self._what} has not answered within {timeout:g} s") from None

    def done(self) -> bool:
        return self._answer.done()

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self._answer).__await__()


@dataclass(frozen=True)
class Method:
    """A method of all objects of a group: called, it waits for the answer; `future` does not."""

    group: RankGroup
    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.future(*args, **kwargs).result()

    def future(self, *args: Any, **kwargs: Any) -> Future:
        """Begin the call. Arguments that do not fit the method's signature raise TypeError at once."""
        return _begin(self.group, self.function, positional(self.function, args, kwargs))


class Group:
    """The objects of one worker class in all their workers. Its methods are those marked with `function`."""

    def __init__(self, kind: type, members: dict[str, RankGroup]) -> None:
        self._kind = kind
        self._members = members

    def __getattr__(self, name: str) -> Method:
        call = None if name.startswith("__") else call_of(getattr(self._kind, name, object))
        if call is None:
            marked = ", ".join(known for known in dir(self._kind) if call_of(getattr(self._kind, known)) is not None)
            raise AttributeError(
                f"{self._kind.__name__}.{name} cannot be called on a group: only what is marked with @function ({marked})"
            )
        return Method(self._members[call.group or next(iter(self._members))], getattr(self._kind, name))

    def close(self) -> None:
        """End the workers; calls on the way fail."""
        for group in self._members.values():
            for member in group.workers:
                member.close()  # type: ignore[attr-defined]


@dataclass
class _Scope:
    declared: dict[str, DeviceGroup]
    built: list[Group] = field(default_factory=list)


_scopes: list[_Scope] = []


def _construct(kind: type, *args: Any, **kwargs: Any) -> Group:
    """Stands for `__new__` of a worker class: what is not an object of the class is given back without `__init__`."""
    wanted = [_declared(name) for name in kind.worker_groups]  # type: ignore[attr-defined]
    init = kind.__init__  # type: ignore[misc]
    given = positional(init, args, kwargs)
    group = Group(kind, {device.name: RankGroup(_workers(kind, device), device.timeout) for device in wanted})
    try:
        started = [_begin(group._members[device.name], init, given, timeout=device.start) for device in wanted]
        for future in started:
            future.result()
    except BaseException as error:
        group.close()
        ray = _cluster()
        if isinstance(error, RankError) and error.__cause__ is None and ray is not None:  # late: not even placed?
            asked = ", ".join(f"{device.name}: {device.workers} x {device.resources.model_dump()}" for device in wanted)
            error.add_note(f"asked for: {asked}; free in the cluster: {ray.available_resources()}")
        raise
    if _scopes:
        _scopes[-1].built.append(group)
    return group


def _declared(name: str) -> DeviceGroup:
    for scope in reversed(_scopes):
        if name in scope.declared:
            return scope.declared[name]
    if _scopes:
        known = ", ".join(name for scope in _scopes for name in scope.declared)
        raise ValueError(
            f"group {name} is not declared here, only: {known}; add DeviceGroup({name!r}, ...) to groups()"
        )
    return DeviceGroup(name)


def _workers(kind: type, device: DeviceGroup) -> list[Any]:
    """Each with an object whose `__init__` is still to be called, as any other method is."""
    names = [f"{device.name}/{index}" for index in range(device.workers)]
    ray = _cluster()
    if _scopes and ray is not None:
        from topology.handles import RayWorker

        _check_room(device, ray.cluster_resources())
        needs = device.resources
        actor = ray.remote(_Host).options(num_cpus=needs.cpus, num_gpus=needs.gpus, resources=needs.custom or None)
        return [RayWorker(name, actor.remote(kind)) for name in names]
    return [LocalWorker(object.__new__(kind), name) for name in names]


def _cluster() -> Any | None:
    """Ray, where this process has joined a cluster. Who has not imported it has joined none."""
    ray = sys.modules.get("ray")
    return ray if ray is not None and ray.is_initialized() else None


class _Host:
    """The actor of one worker: holds its object, and does one call after another."""

    def __init__(self, kind: type) -> None:
        self._target: Any = object.__new__(kind)

    def invoke(self, method: str, *args: Any) -> Any:
        return getattr(self._target, method)(*args)


def _check_room(device: DeviceGroup, there_is: dict[str, float]) -> None:
    """An actor that cannot be placed would wait in silence."""
    one = {"CPU": device.resources.cpus, "GPU": device.resources.gpus, **device.resources.custom}
    short = [
        f"{device.workers} x {amount:g} {name}, it has {there_is.get(name, 0):g}"
        for name, amount in one.items()
        if device.workers * amount > there_is.get(name, 0)
    ]
    if short:
        raise ValueError(
            f"group {device.name} asks the cluster for {'; '.join(short)}: lower its workers or resources, or add a node"
        )


def _begin(group: RankGroup, method: Callable[..., Any], args: tuple[Any, ...], timeout: float | None = None) -> Future:
    answer = asyncio.run_coroutine_threadsafe(group.call(method, *args, timeout=timeout), _loop())
    return Future(f"{group.workers[0].name.rpartition('/')[0]}: {method.__name__}()", answer)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Where the calls of this process are waited for."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="groups", daemon=True).start()
    return loop
