"""The tables of docs/ that tell how a name of another system is called here: whatever their column `here` names exists.

A number in parentheses behind a key is its default.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from topology.config import RunConfig
from trainers.algorithms.config import CALLED_HERE

PAGES = ("algorithms", "distillation", "jobs", "rewards", "sft", "teachers")
METRICS = Path("docs/metrics.md").read_text()
Keys = tuple[str, ...]


class Known(NamedTuple):
    """A key path. `*` is a name that the user chooses: a setting has a field, such a name has none."""

    path: Keys
    field: FieldInfo | None
    default: Any = None


def fields(hint: Any, path: Keys = (), default: Any = None) -> Iterator[Known]:
    """Every key path of the config. `default` is that of the section, whose settings may not have the defaults of its class."""
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        for name, field in hint.model_fields.items():
            own = field.get_default(call_default_factory=True)
            value = getattr(default, name) if isinstance(default, hint) else own
            yield Known((*path, name), field, value)
            yield from fields(field.annotation, (*path, name), value)
    elif get_origin(hint) is dict:
        yield Known((*path, "*"), None)
        yield from fields(get_args(hint)[1], (*path, "*"))
    elif get_origin(hint) is not Literal:
        for inner in get_args(hint):
            yield from fields(inner, path, default)


def words(hint: Any) -> Iterator[Any]:
    """The words that a setting chooses among."""
    if get_origin(hint) is Literal:
        yield from get_args(hint)
    else:
        for inner in get_args(hint):
            yield from words(inner)


FIELDS = list(fields(RunConfig))
WORDS = {word for known in FIELDS if known.field for word in words(known.field.annotation)}


def named(span: str | Keys) -> list[Known]:
    """The keys whose path ends with this one."""
    path = tuple(span.split(".")) if isinstance(span, str) else span

    def fits(known: Keys) -> bool:
        ends = zip(path, known[-len(path) :], strict=True)
        return len(path) <= len(known) and all(ours in (written, "*") for written, ours in ends)

    return [known for known in FIELDS if fits(known.path) and known.path[-len(path)] != "*"]


def takes(known: Known, value: Any) -> bool:
    if known.field is None or value is None:
        return True
    try:
        TypeAdapter(Annotated[known.field.annotation, known.field]).validate_python(value)
    except ValidationError:
        return False
    return True


def settings(value: Any, path: Keys) -> Iterator[tuple[Keys, Any]]:
    """The key paths in a piece of YAML, each with what it is set to; None where that is left open."""
    if isinstance(value, dict) and path[-1:] != ("options",):
        for key, inner in value.items():
            yield from settings(inner, (*path, *str(key).split(".")))
    else:
        yield path, value


def problem(span: str) -> str | None:
    """Why a piece of code in a column `here` means nothing: not a setting, a word for one, a metric or a shipped file."""
    if span.startswith("configs/"):
        return None if Path(span).exists() else "no such file"
    if "/" in span:
        return None if f"`{span}`" in METRICS else "no such metric"
    given = yaml.safe_load(span)
    if isinstance(given, str):
        return None if given in WORDS or named(given) else "neither a key nor a word for one"
    for path, value in settings(given, ()):
        if not (found := named(path)):
            return f"no key {'.'.join(path)}"
        if not any(takes(known, value) for known in found):
            return f"{'.'.join(path)} cannot be {value!r}"
    return None


def said_here(page: str) -> Iterator[str]:
    """The cells of the columns `here` of a page."""
    column = None
    for line in Path(f"docs/{page}.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("|") else []
        if not cells:
            column = None
        elif column is None:
            heads = [cell.split(" (")[0] for cell in cells]
            column = heads.index("here") if "here" in heads else -1
        elif column >= 0 and not set(line) <= set("|-"):
            yield cells[column]


@pytest.mark.parametrize("page", PAGES)
def test_what_a_table_of_names_says_of_this_system_exists(page: str) -> None:
    spans = [span for cell in said_here(page) for span in re.findall(r"`([^`]+)`", cell)]
    assert len(spans) >= 10, "the page has lost its table"
    assert [f"{span}: {why}" for span in spans if (why := problem(span))] == []


@pytest.mark.parametrize("page", PAGES)
def test_the_defaults_that_a_table_of_names_tells_are_ours(page: str) -> None:
    told = [pair for cell in said_here(page) for pair in re.findall(r"`([\w.*]+)` \((\d[\d.e-]*)", cell)]
    wrong = [(key, value) for key, value in told if float(value) not in [known.default for known in named(key)]]
    assert wrong == []


def test_what_a_wrong_key_of_an_algorithm_is_said_to_be_called_exists() -> None:
    names = [name for said in CALLED_HERE.values() for name in re.split(" and |, or ", said)]
    assert [f"{name}: {why}" for name in names if (why := problem(name))] == []


@pytest.mark.parametrize(
    "span",
    [
        "clip_upper",
        "makers.rollout.sampling.k",
        "sampling.clip_low",
        "type: grop",
        "corrections.truncate: {level: word}",
        "n: 0",
        "configs/none.yaml",
        "dpo/none",
    ],
)
def test_a_name_that_means_nothing_is_noticed(span: str) -> None:
    assert problem(span) is not None
