"""Rows for the learner bench: columns of stage `rollout`, the same for both sides. numpy only."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks import workload
from trainers.batch import RowShape, StepPlan, plan_step

Columns = dict[str, np.ndarray]

PROMPT_TOKENS = 48  # about what the shared workload has, its chat template included
SHAPES = {
    "equal": (workload.MAX_TOKENS, workload.MAX_TOKENS),  # shortest and longest response: nothing to pad
    "ragged": (1, workload.MAX_TOKENS),
}


def rows(shape: str, vocabulary: int, seed: int = workload.SEED) -> list[Columns]:
    """Random tokens in GROUPS rows of SAMPLES responses."""
    shortest, longest = SHAPES[shape]
    random = np.random.default_rng(seed)
    made = []
    for _ in range(workload.GROUPS):
        lengths = random.integers(shortest, longest + 1, workload.SAMPLES)
        tokens = int(lengths.sum())
        made.append(
            {
                "prompt_ids": random.integers(0, vocabulary, PROMPT_TOKENS, dtype=np.int32),
                "response_ids": random.integers(0, vocabulary, tokens, dtype=np.int32),
                "response_offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
                "behaviour_logprobs": np.full(tokens, -10.0, np.float32),
                "policy_versions": np.zeros(tokens, np.int32),
                "finish_reasons": np.zeros(workload.SAMPLES, np.int8),
                "temperatures": np.ones(workload.SAMPLES, np.float32),
            }
        )
    return made


def teacher(row: Columns, count: int, vocabulary: int, seed: int = workload.SEED) -> Columns:
    """Columns of stage `teacher` for a row: `count` different ids a token, best first, which hold nine tenths of the mass."""
    random = np.random.default_rng(seed)
    tokens = row["response_ids"].size
    ids = random.integers(0, vocabulary, (tokens, 1)) + np.arange(count)
    weights = 1.0 / np.arange(1, count + 1)
    return {
        "teacher_ids": (ids % vocabulary).astype(np.int32).ravel(),
        "teacher_logprobs": np.tile(np.log(0.9 * weights / weights.sum()).astype(np.float32), tokens),
        "teacher_mass": np.full(tokens, 0.9, np.float32),
        "teacher_target_logprobs": np.full(tokens, -10.0, np.float32),
    }


def advantages(rows: list[Columns]) -> list[np.ndarray]:
    """One a sample, none of them 0, so that no sample may be left out."""
    return [np.where(np.arange(workload.SAMPLES) % 2 == 0, 1.0, -1.0).astype(np.float32) for _ in rows]


def plan(
    rows: list[Columns], step: int, micro_batch_tokens: int, *, share_prompt: bool, whole_rows: bool = False
) -> StepPlan:
    """Of a step in which every sample is computed, on one rank."""
    return plan_step(
        step=step,
        version=None,
        shapes=[RowShape.of(row) for row in rows],
        advantages=advantages(rows),
        masks=[np.ones(workload.SAMPLES, bool) for _ in rows],
        max_response_tokens=workload.MAX_TOKENS,
        micro_batch_tokens=micro_batch_tokens,
        share_prompt=share_prompt,
        whole_rows=whole_rows,
    )


def label(plan: StepPlan, name: str, rows: list[Columns], value: float) -> StepPlan:
    """The plan with a label that has one value for all response tokens."""
    values = tuple(np.full(row["response_ids"].size, value, np.float32) for row in rows)
    return replace(plan, labels={**plan.labels, name: values})


def tokens(rows: list[Columns]) -> int:
    """Prompt and response of every sample: what is counted as trained, however a side computes it."""
    return sum(workload.SAMPLES * row["prompt_ids"].size + row["response_ids"].size for row in rows)
