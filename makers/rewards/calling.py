"""From a function's signature to a checked call: which arguments it gets, and what counts as an answer.

Guarantees: a `Call` returns exactly one finite float (within float32) for each completion, or raises RewardError with
a text for the user. Free of everything but the standard library, because each worker process imports it.
"""

from __future__ import annotations

import inspect
import math
import os
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from makers.dotted import load_dotted, short_traceback
from makers.rewards.builtin import build_builtin

FLOAT32_MAX = 3.4028234663852886e38
LENGTHS = "completion_tokens"  # tokens of each completion, the end-of-sequence token among them
GIVEN = {"row": ("completions", "prompt", LENGTHS), "trl": ("completions", "prompts", LENGTHS)}


class RewardError(Exception):
    """A call gave no usable rewards; the text says why."""


@dataclass(frozen=True, slots=True)
class FunctionSpec:
    """One function of the config, in plain types (it crosses to the worker process)."""

    label: str  # unique among the functions of a maker
    name: str | None
    path: str | None
    options: Mapping[str, Any] = field(default_factory=dict)
    convention: str = "row"


class Call:
    """One reward function, ready to be called for rows."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        options: Mapping[str, Any],
        convention: str,
        columns: Collection[str] = (),
    ) -> None:
        self._function = function
        self._options = dict(options)
        self._convention = convention
        self._accepted = _accepted(function, convention, self._options)
        self.columns = (*columns, *self._required_columns())

    def arguments(
        self, completions: Sequence[str], prompt: str | list[dict[str, str]], fields: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The keyword arguments for one row. Raises RewardError if the function needs a column that is not there."""
        missing = [column for column in self.columns if column not in fields]
        if missing:
            raise RewardError(
                f"needs the column {', '.join(missing)}; the prompt has: {', '.join(fields) or 'no other column'}"
            )
        arguments: dict[str, Any] = dict(fields)
        if self._convention == "trl":
            n, chat = len(completions), isinstance(prompt, list)
            arguments = {name: value if name == LENGTHS else [value] * n for name, value in fields.items()}
            said = [[{"role": "assistant", "content": text}] if chat else text for text in completions]
            arguments |= {"completions": said, "prompts": [prompt] * n}
        else:
            arguments |= {"completions": list(completions), "prompt": prompt}
        if self._accepted is not None:
            arguments = {name: value for name, value in arguments.items() if name in self._accepted}
        return arguments | self._options

    def __call__(
        self,
        completions: Sequence[str],
        prompt: str | list[dict[str, str]],
        fields: Mapping[str, Any],
        wait: Callable[[Any], Any],
    ) -> list[float]:
        """`wait` turns what an async function returned into its result. Raises RewardError."""
        arguments = self.arguments(completions, prompt, fields)
        try:
            result = self._function(**arguments)
            if inspect.isawaitable(result):
                result = wait(result)
        except BaseException as error:  # SystemExit and KeyboardInterrupt too: they are the function's, not ours
            if error.__traceback__ is not None:
                error.__traceback__ = error.__traceback__.tb_next
            raise RewardError(f"raised {_summary(error)}\n{short_traceback(error)}") from error
        return check_values(result, len(completions))

    def _required_columns(self) -> tuple[str, ...]:
        parameters = inspect.signature(self._function).parameters.values()
        given = {*GIVEN[self._convention], *self._options}
        return tuple(
            p.name
            for p in parameters
            if p.kind in _BY_NAME and p.default is inspect.Parameter.empty and p.name not in given
        )


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def build_call(spec: FunctionSpec) -> Call:
    """Import, build and inspect. Raises ValueError with the remedy."""
    if spec.name is not None:
        function = build_builtin(spec.name, spec.options)
        return Call(function, options={}, convention="row", columns=function.columns)
    function, options = load_dotted(spec.path or ""), spec.options
    if isinstance(function, type):
        try:
            function, options = function(**options), {}
        except Exception as error:
            raise ValueError(f"building it with options {dict(options)} raised\n{short_traceback(error)}") from error
    if not callable(function):
        raise ValueError(f"is {type(function).__name__}: a function, or a class with __call__, is needed")
    return Call(function, options=options, convention=spec.convention)


def _summary(error: BaseException) -> str:
    """Type, message and place of an error in one line."""
    text = traceback.format_exception_only(error)[-1].strip().partition("\n")[0]
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else text


def check_values(result: Any, n: int) -> list[float]:
    """n finite floats out of a list, a tuple, an array or a tensor. Raises RewardError."""
    if hasattr(result, "tolist"):  # numpy and torch
        result = result.tolist()
    if not isinstance(result, (list, tuple)):
        raise RewardError(f"returned {_show(result)}: a list of {n} numbers is needed, one a completion")
    if len(result) != n:
        raise RewardError(f"returned {len(result)} values for {n} completions")
    return [_check_value(value, index) for index, value in enumerate(result)]


def _check_value(value: Any, index: int) -> float:
    if hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, (int, float)):
        raise RewardError(f"returned {_show(value)} for completion {index}: a number is needed")
    if not math.isfinite(value) or abs(value) > FLOAT32_MAX:
        raise RewardError(f"returned {value!r:.40} for completion {index}: a finite float32 is needed")
    return float(value)


def _show(value: Any) -> str:
    return f"{value!r:.80} ({type(value).__name__})"


def _accepted(function: Callable[..., Any], convention: str, options: Mapping[str, Any]) -> set[str] | None:
    """Names that the function takes; None: all. Raises ValueError if it cannot be called with ours."""
    parameters = inspect.signature(function).parameters
    blind = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if blind:
        raise ValueError(f"takes {', '.join(blind)} by position only: arguments come by name; remove the `/`")
    if convention == "row" and "prompts" in parameters:
        raise ValueError("takes `prompts`, as functions for TRL do: set `convention: trl`, or take `prompt`")
    names = [p.name for p in parameters.values() if p.kind in _BY_NAME]
    everything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if not everything:
        refused = sorted({"completions", *options} - set(names))
        if refused:
            raise ValueError(f"does not take {', '.join(refused)}; it takes: {', '.join(names) or 'nothing'}")
    return None if everything else set(names)
