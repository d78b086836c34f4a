"""What all actors have in common, without a cluster."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from topology.actors import Shell


def test_an_actor_made_a_moment_before_the_supervisor_died_waits_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nobody(shell: Shell, name: str) -> Any:
        raise ValueError(name)

    def ended(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(Shell, "actor", nobody)
    monkeypatch.setattr("topology.actors.release", lambda namespace: None)
    monkeypatch.setattr("os._exit", ended)
    shell = Shell.__new__(Shell)
    shell.identity, shell._holds = SimpleNamespace(name="weights", namespace="tandem/run"), 0  # type: ignore[assignment]
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(shell.hold(), 0.2))
