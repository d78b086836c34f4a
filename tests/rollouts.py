"""Rollout columns for tests of the trainer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def rollout_columns(
    rng: np.random.Generator,
    prompt: int,
    responses: Sequence[int],
    *,
    vocab: int = 300,
    version: int = 0,
    temperature: float = 1.0,
) -> dict[str, np.ndarray]:
    """Columns of stage `rollout` with random tokens: `prompt` prompt tokens, and responses of the given lengths."""
    tokens = sum(responses)
    return {
        "prompt_ids": rng.integers(0, vocab, prompt).astype(np.int32),
        "response_ids": rng.integers(0, vocab, tokens).astype(np.int32),
        "response_offsets": np.concatenate([[0], np.cumsum(responses)]).astype(np.int64),
        "behaviour_logprobs": -np.abs(rng.normal(5.0, 1.0, tokens)).astype(np.float32),
        "policy_versions": np.full(tokens, version, dtype=np.int32),
        "finish_reasons": np.zeros(len(responses), dtype=np.int8),
        "temperatures": np.full(len(responses), temperature, dtype=np.float32),
    }
