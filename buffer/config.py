"""Settings of the experience table; the one home of their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Order = Literal["fifo", "window", "ready"]


class Strict(BaseModel):
    """Every section of a Tandem config: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Route(Strict):
    """Which rows a group of makers takes: those whose prompt has one of these values in this field."""

    column: str = Field(min_length=1, description="A column of the prompts.")
    values: tuple[str | int | float | bool | None, ...] = Field(
        min_length=1, description="The values that it takes; null: prompts without the column, or with nothing in it."
    )

    def takes(self, fields: Mapping[str, Any]) -> bool:
        """Whether a prompt with these fields is for the group."""
        value = fields.get(self.column)
        return any(value == mine and isinstance(value, bool) == isinstance(mine, bool) for mine in self.values)

    def meets(self, other: Route | None) -> bool:
        """Whether some row may be taken by both; None: a group that takes every row."""
        if other is None or self.column != other.column:
            return True
        return any(self.takes({other.column: value}) for value in other.values)

    def __str__(self) -> str:
        return f"{self.column} in {list(self.values)}"


class Resources(Strict):
    """What one actor asks of the cluster."""

    cpus: float = Field(1.0, ge=0)
    gpus: float = Field(0.0, ge=0)
    custom: dict[str, float] = {}

    def threads(self, setting: int | None) -> int:
        """CPU threads of the actor: its own setting, else as many as the CPUs it asks for, at least one."""
        return setting or max(1, int(self.cpus))


class BufferConfig(Strict):
    max_staleness: int = Field(1, ge=0, description="Largest age, in published versions, of a row at training.")
    order: Order = Field("fifo", description="Which complete rows a trainer may take.")
    window: int = Field(0, ge=0, description="order=window: how many rows beyond the oldest may be taken before it.")
    max_bytes: int = Field(2 << 30, gt=0, description="Bound on the bytes of all columns the table refers to.")
    lease_timeout: float = Field(300.0, gt=0, description="Seconds a maker has for one stage of one row.")
    max_attempts: int = Field(
        3, ge=1, description="Failed leases (not data) of one stage of one row before the run ends."
    )
    max_data_failures: int = Field(
        16,
        ge=0,
        description="Rows in a row (without one complete between them) that may fail as data before the run ends.",
    )
