"""A complete row as records, one for each sample. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from buffer.records import SampledRow

Columns = Mapping[str, np.ndarray]
Decode = Callable[[Sequence[int]], str]
FINISH_REASONS = ("stop", "length")
PER_TOKEN = ("token_", "reference_", "teacher_")  # how the names of columns begin that have entries for each token


def scores_of(stages: Mapping[str, Columns], weights: Mapping[str, float], samples: int) -> np.ndarray:
    """Float64 [samples]: the weighted sum of the stages' `rewards`; 0 without weights."""
    total = np.zeros(samples)
    for stage, weight in weights.items():
        total += weight * stages[stage]["rewards"].astype(np.float64)
    return total


def records_of(
    row: SampledRow, stages: Mapping[str, Columns], scores: np.ndarray, kept: Sequence[int], decode: Decode
) -> list[dict[str, Any]]:
    """The kept samples. Of stages other than `rollout` whatever has an entry for each sample, or some for each token."""
    rollout, content = stages["rollout"], row.prompt.content
    offsets = [int(offset) for offset in rollout["response_offsets"]]
    bounds = list(pairwise(offsets))
    records = []
    for sample in kept:
        start, end = bounds[sample]
        ids = rollout["response_ids"][start:end]
        records.append(
            {
                "row_id": row.row_id,
                "sample": int(sample),
                "prompt_id": row.prompt.id,
                "prompt": content if isinstance(content, str) else json.dumps(content),
                "fields": json.dumps(dict(row.prompt.fields), default=str),
                "completion": decode(ids.tolist()),
                "finish_reason": FINISH_REASONS[rollout["finish_reasons"][sample]],
                "score": float(scores[sample]),
                "maker": row.makers["rollout"],
                "prompt_ids": rollout["prompt_ids"],
                "response_ids": ids,
                "behaviour_logprobs": rollout["behaviour_logprobs"][start:end],
                **_of_others(stages, sample, start, end, offsets),
            }
        )
    return records


def _of_others(stages: Mapping[str, Columns], sample: int, start: int, end: int, offsets: list[int]) -> dict[str, Any]:
    tokens, samples = offsets[-1], len(offsets) - 1
    found: dict[str, Any] = {}
    for stage, columns in stages.items():
        for key, values in columns.items() if stage != "rollout" else ():
            name = key if key.startswith(f"{stage}_") else f"{stage}_{key}"
            if key.startswith(PER_TOKEN) and tokens and len(values) % tokens == 0:
                width = len(values) // tokens
                found[name] = values[start * width : end * width]
            elif len(values) == samples:
                found[name] = values[sample].item()
    return found
