"""What a PPO controller makes of the rewards and values of one step. Pure, numpy only.

The reward of a token is -kl_coef * KL(behaviour, reference), and that of a sample's last token has the sample's reward
added. Where the stage `reward` has `token_rewards`, each stands at its own token, and the last one gets what the sample's
reward has beyond their sum. KL is between the policies that are at hand without another forward pass: the one that sampled
the token, and the frozen one of the stage `reference`. A sample's end is an end, at `max_tokens` too: its reward function
has judged what is there, nothing follows. With `bootstrap_truncated` a truncated sample goes on being worth its last value,
that of the state before its last token (the state after it is never computed).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from trainers.algorithms.gae import (
    RETURNS,
    VALUES,
    explained_variance,
    generalised_advantages,
    kl_per_token,
    token_rewards,
    whitened,
)
from trainers.config import Ppo

if TYPE_CHECKING:
    from trainers.planner import Batch


@dataclass(frozen=True)
class Estimates:
    """Arrays are float32 [T], one for each row of the step; figures are over the tokens that are not masked."""

    advantages: list[np.ndarray]
    labels: dict[str, tuple[np.ndarray, ...]]  # what a critic learns from
    mean_return: float
    explained_variance: float | None  # of the values, before this step


def estimate(
    settings: Ppo,
    batch: Batch,
    rewards: Sequence[np.ndarray],
    masks: Sequence[np.ndarray],
    values: Sequence[np.ndarray],
) -> Estimates:
    """`rewards[row]` and `masks[row]` (False: not in the loss) are [samples], `values[row]` is [T].

    Raises ValueError, with the row's id, when the reference does not fit the row.
    """
    lengths = batch.lengths
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    old, truncated = np.concatenate(values), np.concatenate(batch.truncated)
    valid = np.repeat(np.concatenate(masks), lengths)
    per_token = _per_token(batch, np.concatenate(rewards), offsets)
    if settings.kl_coef > 0:
        per_token -= settings.kl_coef * np.concatenate(kl_to_reference(batch, settings.kl_estimator))
    beyond = np.where(truncated & settings.bootstrap_truncated, old[offsets[1:] - 1], 0.0)
    raw = generalised_advantages(per_token, old, beyond, offsets, gamma=settings.gamma, lam=settings.lam)
    returns = raw + old
    advantages = whitened(raw, valid) if settings.whiten_advantages else np.where(valid, raw, np.float32(0.0))
    ends = np.cumsum([part.size for part in values])[:-1]
    return Estimates(
        advantages=np.split(advantages, ends),
        labels={RETURNS: tuple(np.split(returns, ends)), VALUES: tuple(np.split(old, ends))},
        mean_return=float(returns[valid].mean()),
        explained_variance=explained_variance(old[valid], returns[valid]),
    )


def _per_token(batch: Batch, rewards: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Rewards [samples] at the tokens that they are for, float32 [T of all rows]."""
    if not any("token_rewards" in columns["reward"] for columns in batch.columns):
        return token_rewards(rewards, offsets)
    none = np.zeros(0, np.float32)
    parts = []
    for row, columns in zip(batch.rows, batch.columns, strict=True):
        own, tokens = columns["reward"].get("token_rewards", none), columns["rollout"]["response_ids"].size
        if own.size not in (0, tokens):
            raise ValueError(f"row {row.row_id}: {own.size} token rewards for {tokens} response tokens")
        parts.append(own if own.size else np.zeros(tokens, np.float32))
    single = np.concatenate(parts)
    left = rewards - np.add.reduceat(single.astype(np.float64), offsets[:-1])
    return single + token_rewards(left, offsets)


def kl_to_reference(batch: Batch, estimator: str) -> list[np.ndarray]:
    """KL(behaviour, reference) by the estimator, float32 [T] for each row. Raises ValueError with the row's id."""
    found = []
    for row, columns in zip(batch.rows, batch.columns, strict=True):
        behaviour = columns["rollout"]["behaviour_logprobs"]
        reference = columns["reference"]["reference_logprobs"]
        if reference.shape != behaviour.shape:
            raise ValueError(
                f"row {row.row_id}: the reference has {reference.size} log-probs for {behaviour.size} response tokens"
            )
        found.append(kl_per_token(behaviour, reference, estimator))
    return found
