"""Bringing the columns of rows to the trainer: of those that it samples, and of all for a checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from buffer.records import ColumnsLost, SampledRow
from buffer.snapshot import Cut, places
from trainers.batch import Columns
from trainers.config import TrainerConfig
from trainers.ports import RowSource


def stages_read(config: TrainerConfig, rows: Sequence[SampledRow]) -> tuple[str, ...]:
    """Those that the trainer needs; and with a teacher on the ranks the makers' too where there is one, to compare them."""
    beside = config.distill is not None and "teacher" not in config.stages
    return (*config.stages, "teacher") if beside and "teacher" in rows[0].columns else config.stages


async def fetch_columns(
    source: RowSource, rows: Sequence[SampledRow], stages: Sequence[str]
) -> tuple[list[dict[str, Columns]], dict[int, ColumnsLost]]:
    """The columns of each row by stage, and what is lost of which row (by id): those of that row are not all there."""
    fetches = (_fetch(source, row, stages) for row in rows)
    fetched = await asyncio.gather(*fetches)
    lost = {row.row_id: error for row, (_, error) in zip(rows, fetched, strict=True) if error is not None}
    return [columns for columns, _ in fetched], lost


async def fetch_cut(source: RowSource, cut: Cut) -> tuple[dict[str, Any], list[Columns]]:
    """A cut's state with its columns. A row of which some are lost is in there without any: it is to be made again."""

    async def one(reference: Any) -> Columns | None:
        try:
            return await source.fetch(reference)
        except ColumnsLost:
            return None

    found = zip(places(cut.state), await asyncio.gather(*map(one, cut.references)), strict=True)
    fetched = [(row_id, columns) for (row_id, _), columns in found]
    lost = {row_id for row_id, columns in fetched if columns is None}
    state = {**cut.state, "filled": [row for row in cut.state["filled"] if row["id"] not in lost]}
    return state, [columns for row_id, columns in fetched if columns is not None and row_id not in lost]


async def _fetch(
    source: RowSource, row: SampledRow, stages: Sequence[str]
) -> tuple[dict[str, Columns], ColumnsLost | None]:
    async def one(stage: str) -> Columns | ColumnsLost:
        try:
            return await source.fetch(row.columns[stage])
        except ColumnsLost as error:
            return error

    columns: dict[str, Columns] = {}
    lost: dict[str, ColumnsLost] = {}
    for stage, answer in zip(stages, await asyncio.gather(*map(one, stages)), strict=True):
        if isinstance(answer, ColumnsLost):
            lost[stage] = answer
        else:
            columns[stage] = answer
    return columns, ColumnsLost(str(next(iter(lost.values()))), list(lost)) if lost else None
