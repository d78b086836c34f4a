"""How one call is spread over the workers of a group, and how their answers come back together. Pure, and free of ray.

`function` only marks a method: on a plain object it is called as ever, and who calls a group of objects (`RankGroup`,
`topology.groups`) reads the mark.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, TypeVar, get_args

Names = Literal["all", "slice"]
Dispatch = Names | Callable[[int, int, tuple[Any, ...]], Sequence[Any]]
Execute = Literal["all", "first"]
Collect = Literal["none", "flatten"] | Callable[[list[Any]], Any]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Call:
    """How a method of a group is called.

    dispatch: which arguments a worker gets. `all`: the same for each. `slice`: every argument that is a list is cut into
        consecutive parts whose lengths differ by at most one, longer ones first, so that a worker may get an empty list;
        other arguments go to each. A callable gets (number of workers, worker, arguments) and returns the worker's
        arguments.
    execute: `all` workers, or only the `first`.
    collect: `none`: the list of results in the order of the workers (with `first`: the one result). `flatten`: results
        that are lists are joined, tuples of lists position by position. A callable gets the list of results.
    group: whose workers answer, where a class has several groups.
    """

    dispatch: Dispatch = "all"
    execute: Execute = "all"
    collect: Collect = "none"
    group: str | None = None

    def __post_init__(self) -> None:
        known = {"dispatch": get_args(Names), "execute": get_args(Execute), "collect": ("none", "flatten")}
        for name, values in known.items():
            value = getattr(self, name)
            if value not in values and (name == "execute" or not callable(value)):
                or_callable = "" if name == "execute" else " or a callable"
                raise ValueError(f"{name}={value!r}: use {', '.join(map(repr, values))}{or_callable}")

    def arguments(self, workers: int, worker: int, args: tuple[Any, ...]) -> Sequence[Any]:
        """What the worker with this number gets. Raises ValueError for lists to slice of different lengths."""
        if self.dispatch == "all":
            return args
        if self.dispatch == "slice":
            lengths = {len(arg) for arg in args if isinstance(arg, list)}
            if len(lengths) > 1:
                raise ValueError(f"cannot slice lists of different lengths together: {sorted(lengths)} items")
            return [_part(arg, workers, worker) if isinstance(arg, list) else arg for arg in args]
        part = self.dispatch(workers, worker, args)
        if not isinstance(part, tuple | list):
            raise TypeError(f"dispatch gave a {type(part).__name__} for worker {worker}, not a tuple of its arguments")
        return part

    def collected(self, results: list[Any]) -> Any:
        """The answer of the call, from the results in the order of the workers."""
        if self.collect == "none":
            return results[0] if self.execute == "first" else results
        return _flatten(results) if self.collect == "flatten" else self.collect(results)


def function(
    group: str | None = None, dispatch: Dispatch = "all", execute: Execute = "all", collect: Collect = "none"
) -> Callable[[F], F]:
    """Mark a method of a class: how it is called on a group of objects of that class. See `Call` for the arguments."""
    call = Call(dispatch, execute, collect, group)

    def mark(method: F) -> F:
        if inspect.iscoroutinefunction(method):
            raise TypeError(f"{method.__qualname__} is async: a worker runs one plain method after another")
        method.group_call = call  # type: ignore[attr-defined]
        return method

    return mark


def call_of(method: Callable[..., Any]) -> Call | None:
    """What `function` said about a method; None if it is not marked."""
    return getattr(method, "group_call", None)


def positional(method: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of a method (`self` left out) in the order of its signature, defaults filled in.

    Raises TypeError if they do not fit the signature; those that a callable dispatches only have to be positional.
    """
    call = call_of(method)
    if call is not None and callable(call.dispatch):
        if kwargs:
            raise TypeError(f"{method.__qualname__} is dispatched by a callable: give {', '.join(kwargs)} by position")
        return tuple(args)
    bound = inspect.signature(method).bind(None, *args, **kwargs)
    bound.apply_defaults()
    if bound.kwargs:
        raise TypeError(f"{method.__qualname__}: {', '.join(bound.kwargs)} cannot be given by keyword only")
    return bound.args[1:]


def first_result(results: list[Any]) -> Any:
    """Collect for calls in which all workers work together and answer the same."""
    return results[0]


def _part(items: list[Any], workers: int, worker: int) -> list[Any]:
    size, longer = divmod(len(items), workers)
    start = worker * size + min(worker, longer)
    return items[start : start + size + (worker < longer)]


def _flatten(results: list[Any]) -> Any:
    if all(isinstance(result, tuple) for result in results):
        return tuple(_flatten(list(position)) for position in zip(*results, strict=True))
    for worker, result in enumerate(results):
        if not isinstance(result, list):
            raise TypeError(f"flatten joins lists, or tuples of lists; worker {worker} gave a {type(result).__name__}")
    return list(chain.from_iterable(results))
