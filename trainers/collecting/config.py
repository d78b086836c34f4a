"""Settings of a job; the one home of their defaults. Free of torch and pyarrow."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field

from buffer.config import Strict


class SelectAll(Strict):
    """Every sample is kept."""

    type: Literal["all"] = "all"


class BestOfN(Strict):
    """Of each prompt the samples with the highest scores; of equal ones the earlier."""

    type: Literal["best_of_n"]
    keep: int = Field(1, ge=1, description="Samples kept of one prompt.")


class Rejection(Strict):
    """Samples whose score is high enough; a prompt may have none."""

    type: Literal["rejection"]
    threshold: float = Field(description="The lowest score that is kept.")
    keep: int | None = Field(None, ge=1, description="At most so many of one prompt, the best of them; null: all.")


SelectConfig = Annotated[SelectAll | BestOfN | Rejection, Discriminator("type")]


class PassConfig(Strict):
    """pass@k over all prompts, and the mean score."""

    pass_at: tuple[Annotated[int, Field(ge=1)], ...] = Field((1,), min_length=1, description="The k of pass@k.")
    threshold: float = Field(1.0, description="The lowest score of a sample that counts as right.")


class CollectConfig(Strict):
    """Makers alone: complete rows go to files, and nobody trains. Takes the place of `trainers`."""

    select: SelectConfig = SelectAll()
    scores: dict[str, float] = Field(
        {"reward": 1.0},
        description="A sample's score is the sum of column `rewards` of these stages, times these weights. {}: no scores.",
    )
    report: PassConfig | None = None
    jsonl: bool = Field(False, description="Write each Parquet file as JSON lines too.")
    rows_per_part: int = Field(64, ge=1, description="Rows (prompt groups) of one file.")
    parts_in_flight: int = Field(2, ge=1, description="Rows in flight at most, in files.")
