"""docs/configuration.md, made from the config classes: `python -m topology.reference > docs/configuration.md`.

The classes are the one home of names, types, bounds and defaults; a test holds the page against them.
"""

from __future__ import annotations

import inspect
import json
import types
import typing
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from topology.config import RunConfig

HEAD = """# Configuration

Every setting of a run, made from the classes that read them (`python -m topology.reference`). A key that is not listed
is an error. `required` settings have no default. `tandem plan FILE` checks a file without starting anything.
"""


def page() -> str:
    sections: list[str] = [HEAD]
    seen: set[type[BaseModel]] = set()
    queue: list[tuple[str, type[BaseModel]]] = [("the file", RunConfig)]
    while queue:
        path, model = queue.pop(0)
        if model in seen:
            continue
        seen.add(model)
        sections.append(_section(path, model))
        for name, field in model.model_fields.items():
            prefix = name if path == "the file" else f"{path}.{name}"
            queue += [(prefix, inner) for inner in _models(field.annotation)]
    return "\n".join(sections)


def _section(path: str, model: type[BaseModel]) -> str:
    lines = [f"## {model.__name__}", "", "The whole file." if path == "the file" else f"Section `{path}`.", ""]
    described = inspect.cleandoc(model.__doc__) if model.__doc__ and "usage docs" not in model.__doc__.lower() else ""
    lines += [described, ""] if described and model.__doc__ is not BaseModel.__doc__ else []
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        meaning = " ".join(filter(None, [field.description or "", _bounds(field.metadata)]))
        lines.append(f"| `{name}` | {_type(field.annotation)} | {_default(field)} | {meaning} |")
    return "\n".join([*lines, ""])


def _models(hint: Any) -> list[type[BaseModel]]:
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return [hint]
    return [model for inner in get_args(hint) for model in _models(inner)]


def _type(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _type(args[0])
    if origin is Literal:
        return " \\| ".join(f"`{value}`" for value in args)
    if origin in (Union, types.UnionType):
        return " \\| ".join("null" if arg is type(None) else _type(arg) for arg in args)
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    if origin is not None:
        return f"{getattr(origin, '__name__', str(origin))} of {', '.join(_type(arg) for arg in args)}"
    return "any" if hint is typing.Any else getattr(hint, "__name__", str(hint))


def _default(field: Any) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, BaseModel):
        changed = value.model_dump(mode="json", exclude_defaults=True)
        return f"`{json.dumps(changed)}`" if changed else "its defaults"
    return f"`{json.dumps(value)}`"


def _bounds(metadata: list[Any]) -> str:
    signs = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
    found = [
        f"{words} {getattr(item, key):g}" for item in metadata for key, words in signs.items() if hasattr(item, key)
    ]
    found += [f"matches `{item.pattern}`" for item in metadata if getattr(item, "pattern", None)]
    return f"({', '.join(found)})" if found else ""


if __name__ == "__main__":
    print(page(), end="")
