"""The tables of docs/ that tell how a name of another system is called here: whatever their column `here` names exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from topology.config import RunConfig
from trainers.algorithms.config import CALLED_HERE

PAGES = ("algorithms", "distillation", "jobs", "rewards", "sft", "teachers")
METRICS = Path("docs/metrics.md").read_text()
Keys = tuple[str, ...]


def fields(hint: Any, path: Keys = ()) -> Iterator[tuple[Keys, FieldInfo | None]]:
    """Every key path of the config and its field; `*` is a name that the user chooses, and has none."""
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        for name, field in hint.model_fields.items():
            yield (*path, name), field
            yield from fields(field.annotation, (*path, name))
    elif get_origin(hint) is dict:
        yield (*path, "*"), None
        yield from fields(get_args(hint)[1], (*path, "*"))
    elif get_origin(hint) is not Literal:
        for inner in get_args(hint):
            yield from fields(inner, path)


def words(hint: Any) -> Iterator[Any]:
    """The words that a setting chooses among."""
    if get_origin(hint) is Literal:
        yield from get_args(hint)
    else:
        for inner in get_args(hint):
            yield from words(inner)


FIELDS = list(fields(RunConfig))
WORDS = {word for _, field in FIELDS if field for word in words(field.annotation)}


def named(path: Keys) -> list[FieldInfo | None]:
    """The fields whose path ends with this one."""

    def fits(known: Keys) -> bool:
        return len(path) <= len(known) and all(b in (a, "*") for a, b in zip(path, known[-len(path) :], strict=True))

    return [field for known, field in FIELDS if fits(known) and known[-len(path)] != "*"]


def takes(field: FieldInfo | None, value: Any) -> bool:
    if field is None or value is None:
        return True
    try:
        TypeAdapter(Annotated[field.annotation, field]).validate_python(value)
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
        known = given in WORDS or named(tuple(given.split(".")))
        return None if known else "neither a key nor a word for one"
    for path, value in settings(given, ()):
        if not (found := named(path)):
            return f"no key {'.'.join(path)}"
        if not any(takes(field, value) for field in found):
            return f"{'.'.join(path)} cannot be {value!r}"
    return None


def said_here(page: str) -> list[str]:
    """The pieces of code in the columns `here` of a page."""
    found: list[str] = []
    column = None
    for line in Path(f"docs/{page}.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("|") else []
        if not cells:
            column = None
        elif column is None:
            heads = [cell.split(" (")[0] for cell in cells]
            column = heads.index("here") if "here" in heads else -1
        elif column >= 0 and not set(line) <= set("|-"):
            found += re.findall(r"`([^`]+)`", cells[column])
    return found


@pytest.mark.parametrize("page", PAGES)
def test_what_a_table_of_names_says_of_this_system_exists(page: str) -> None:
    spans = said_here(page)
    assert len(spans) >= 10, "the page has lost its table"
    assert [f"{span}: {why}" for span in spans if (why := problem(span))] == []


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
