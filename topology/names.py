"""Names that are contracts: the namespace of a run, and where an actor's log lies. Free of ray."""

from __future__ import annotations

from pathlib import Path


def namespace_of(run: str) -> str:
    return f"tandem/{run}"


def log_file(folder: str | Path, actor: str) -> Path:
    return Path(folder) / "logs" / f"{actor.replace('/', '-')}.log"
