"""Sampled rows as Parquet, for eyes and notebooks: `rows/step-000001.parquet`, one record a sample.

Guarantees: the trainer never waits for the disk (a thread writes, one file at a time); a file that exists is complete.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from buffer.records import SampledRow

Columns = Mapping[str, np.ndarray]
Decode = Callable[[Sequence[int]], str]
FINISH_REASONS = ("stop", "length")
TOKEN_REWARDS = "token_rewards"  # one a token: their sum is in the reward


def load_decoder(model: Path) -> Decode:
    """Token ids to text, special tokens shown, with the tokenizer of a model folder."""
    from tokenizers import Tokenizer

    file = Path(model) / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: rows cannot be written as text, set rows.every to null")
    tokenizer = Tokenizer.from_file(str(file))
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)


class RowsWriter:
    """Writes the rows of every `every`-th step below `folder`."""

    def __init__(self, folder: Path, every: int, decode: Decode) -> None:
        self.folder = Path(folder)
        self.every = every
        self._decode = decode
        self._writing: asyncio.Task[None] | None = None

    def wants(self, step: int) -> bool:
        return step % self.every == 0 or step == 1

    async def write(self, step: int, rows: Sequence[SampledRow], columns: Sequence[Mapping[str, Columns]]) -> None:
        """Begin to write one step: `columns[i]` are the fetched columns of `rows[i]` by stage.

        Waits for the file before, and raises what went wrong with it.
        """
        await self.finish()
        self._writing = asyncio.create_task(asyncio.to_thread(self._write, step, list(rows), list(columns)))

    async def finish(self) -> None:
        """Wait for the file that is being written; raises what went wrong with it."""
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing

    def _write(self, step: int, rows: list[SampledRow], columns: list[Mapping[str, Columns]]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        records = [
            record for row, stages in zip(rows, columns, strict=True) for record in self._records(step, row, stages)
        ]
        partial = self.folder / f".partial-step-{step:06d}"
        try:
            pq.write_table(pa.Table.from_pylist(records), partial)
            partial.rename(self.folder / f"step-{step:06d}.parquet")
        finally:
            partial.unlink(missing_ok=True)

    def _records(self, step: int, row: SampledRow, stages: Mapping[str, Columns]) -> list[dict[str, Any]]:
        rollout = stages["rollout"]
        offsets = rollout["response_offsets"]
        content = row.prompt.content
        records = []
        for sample, (start, end) in enumerate(pairwise(offsets)):
            ids = rollout["response_ids"][start:end]
            records.append(
                {
                    "step": step,
                    "row_id": row.row_id,
                    "sample": sample,
                    "maker": row.makers["rollout"],
                    "prompt_id": row.prompt.id,
                    "prompt": content if isinstance(content, str) else json.dumps(content),
                    "completion": self._decode(ids.tolist()),
                    "finish_reason": FINISH_REASONS[rollout["finish_reasons"][sample]],
                    "age": row.age,
                    **{
                        _reward_name(key): float(values[sample])
                        for key, values in stages.get("reward", {}).items()
                        if key != TOKEN_REWARDS
                    },
                    "prompt_ids": rollout["prompt_ids"],
                    "response_ids": ids,
                    "behaviour_logprobs": rollout["behaviour_logprobs"][start:end],
                    "policy_versions": rollout["policy_versions"][start:end],
                }
            )
        return records


def _reward_name(key: str) -> str:
    return "reward" if key == "rewards" else key
