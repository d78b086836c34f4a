"""The question that a judge is asked about one completion.

Guarantees: values are put in once and never read again, so braces and placeholders inside a completion are text; braces
around anything that is not a name (JSON) stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")
OWN = ("prompt", "completion")


def placeholders(template: str) -> list[str]:
    return list(dict.fromkeys(_PLACEHOLDER.findall(template)))


def check_template(template: str, columns: Collection[str] | None) -> None:
    """`columns`: what the prompts provide, None when unknown. Raises ValueError with the placeholders there are."""
    named = placeholders(template)
    if "completion" not in named:
        raise ValueError("has no {completion}, so every completion would be judged alike: put it in")
    if columns is None:
        return
    known = list(dict.fromkeys([*OWN, *columns]))
    if unknown := [name for name in named if name not in known]:
        raise ValueError(
            f"unknown placeholder {', '.join(f'{{{name}}}' for name in unknown)}; there are: "
            f"{', '.join(f'{{{name}}}' for name in known)}"
        )


def fill(template: str, values: Mapping[str, Any]) -> str:
    """Raises KeyError for a placeholder without a value."""
    return _PLACEHOLDER.sub(lambda match: str(values[match[1]]), template)


def as_text(content: Any) -> str:
    """A prompt: text as it is, chat messages one after another under their roles."""
    if isinstance(content, str):
        return content
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in content)
