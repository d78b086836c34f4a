"""The actors of a run as its supervisor knows them, and the status object that the world reads. Free of ray."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from topology.capacity import PlannedActor
from topology.config import RunConfig
from topology.consumer import consumer_of, steps_of
from topology.lifecycle import Lifecycle, State
from topology.roles import role_of


@dataclass
class Member:
    """One actor under supervision. `status` is what it last said of itself."""

    planned: PlannedActor
    life: Lifecycle
    handle: Any = None  # of the actor that has the name now
    place: dict[str, Any] = field(default_factory=dict)  # pid and node, once it has answered
    status: dict[str, Any] = field(default_factory=dict)
    info: Any = None  # of a maker: its MakerInfo
    joining: bool = False  # a maker that is being attached: if it dies it is refused, not made anew
    attached_to: Any = None  # of a maker: the buffer's actor that calls it
    watchers: list[asyncio.Task[None]] = field(default_factory=list)  # of that actor

    @property
    def name(self) -> str:
        return self.planned.name

    @property
    def kind(self) -> str:
        return self.planned.kind

    @property
    def state(self) -> State:
        return self.life.state

    def row(self, committed: int | None) -> dict[str, Any]:
        """`committed`: stages of rows that a maker has filled since it was attached last."""
        return {
            "name": self.name,
            "kind": self.kind,
            "state": self.state,
            "pid": self.place.get("pid"),
            "node": self.place.get("node"),
            "version": self.status.get("version"),
            "committed": committed,
            "joining": self.joining,
        }


def snapshot(
    config: RunConfig, members: Mapping[str, Member], *, state: str, cause: str | None, folder: str, first_step: int
) -> dict[str, Any]:
    """The object that `tandem status --json` prints; `first_step` is the step until the consumer of the rows tells its own."""

    def status_of(name: str) -> dict[str, Any]:
        return members[name].status if name in members else {}

    consumer, buffer = status_of(consumer_of(config)), status_of("buffer")
    makers = [member.status.get("version") for member in members.values() if member.planned.kind == "maker"]
    versions = [version for version in makers if version is not None]
    committed = {name: maker["committed"] for name, maker in buffer.get("makers", {}).items()}
    ledger = buffer.get("ledger")
    return {
        "name": config.name,
        "state": state,
        "cause": cause,
        "step": consumer.get("step", first_step),
        "steps": steps_of(config),
        "phase": consumer.get("phase"),
        "versions": {
            "trainer": consumer.get("version"),
            "maker_min": min(versions, default=None),
            "maker_max": max(versions, default=None),
        },
        "actors": [member.row(committed.get(member.name)) for member in members.values()],
        "buffer": {"rows": buffer.get("rows", {}), "bytes": buffer.get("bytes", 0)},
        "ledger": {**ledger["rows"], "tokens": ledger["tokens"]} if ledger else {},
        "failures": buffer.get("failures", {}),
        "rates": consumer.get("rates", {}),
        "bound_by": consumer.get("bound_by"),
        "knob": consumer.get("knob"),
        "held_out": consumer.get("held_out"),
        "collected": consumer.get("collected"),
        "folder": folder,
        "time": time.time(),
    }


def threads_of(config: RunConfig, planned: PlannedActor) -> int:
    """CPU threads of an actor: its engine's or backend's own setting, else the CPUs it asks for, reserved or not."""
    if planned.kind == "rank":
        return config.trainers[role_of(planned.name)].threads
    if planned.kind == "maker":
        maker = config.makers[planned.name.split("/")[1]]
        return maker.resources.threads(getattr(getattr(maker, "engine", maker), "threads", None))
    return planned.resources.threads(None)
