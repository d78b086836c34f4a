"""Settings of the weight channel; the one home of their defaults."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from buffer.config import Strict


class WeightsConfig(Strict):
    transport: Literal["object_store"] = "object_store"
    every: int = Field(1, ge=1, description="Optimizer steps between two published versions.")
    bucket_bytes: int = Field(
        64 << 20, gt=0, description="Size of a packed bucket; a larger tensor gets one of its own."
    )
    keep: int = Field(2, ge=1, description="Newest versions the store holds.")
    timeout: float = Field(120.0, gt=0, description="Seconds for one export, or for one pull by a maker.")
