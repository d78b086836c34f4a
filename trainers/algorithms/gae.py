"""From rewards and values to what PPO learns from, over all samples of a step. Pure, numpy only: the controller calls this.

The samples lie flat, one after another: an array [T] has one entry for each response token, and sample i is
`[offsets[i], offsets[i + 1])` of it; no sample is empty. `values[t]` is the worth of the state *before* token t, that is
with the prompt and the tokens up to t - 1 in it.
"""

from __future__ import annotations

import numpy as np

RETURNS, VALUES = "returns", "values"  # labels of a critic's plan: what to predict, and what was predicted
EPSILON = 1e-8  # added to a standard deviation
MAX_LOG_RATIO = 20.0  # exp of more is a number without meaning, and soon infinite


def token_rewards(rewards: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Float32 [T]: the reward of a sample [n] at its last token, 0 elsewhere."""
    per_token = np.zeros(int(offsets[-1]), dtype=np.float32)
    per_token[offsets[1:] - 1] = rewards
    return per_token


def kl_per_token(policy: np.ndarray, reference: np.ndarray, estimator: str) -> np.ndarray:
    """KL(policy || reference) in nats, float32 [T], from log-probs [T] of tokens that the policy sampled.

    The estimators are those of `trainers.algorithms.grpo.kl_estimate`, on arrays.
    """
    log_ratio = np.clip(policy - reference, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * np.square(log_ratio)
    return np.expm1(-log_ratio) + log_ratio


def generalised_advantages(
    rewards: np.ndarray, values: np.ndarray, beyond: np.ndarray, offsets: np.ndarray, *, gamma: float, lam: float
) -> np.ndarray:
    """Generalised advantage estimates (arXiv 1506.02438), float32 [T].

    A_t = d_t + gamma * lam * A_{t+1} with d_t = r_t + gamma * V_{t+1} - V_t. `rewards` and `values` are [T]; `beyond` [n]
    is the worth of what comes after a sample's last token: 0 where the sample ended.
    """
    starts, lengths = offsets[:-1], np.diff(offsets)
    values = values.astype(np.float64)
    following = np.append(values[1:], 0.0)
    following[offsets[1:] - 1] = beyond
    deltas = rewards + gamma * following - values
    advantages = np.zeros(values.size)
    carried = np.zeros(lengths.size)
    for back in range(1, int(lengths.max(initial=0)) + 1):  # from the last token to the first, all samples at once
        reached = lengths >= back
        at = (starts + lengths - back)[reached]
        carried[reached] = deltas[at] + gamma * lam * carried[reached]
        advantages[at] = carried[reached]
    return advantages.astype(np.float32)


def whitened(advantages: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """To mean 0 and standard deviation 1 over the `valid` tokens (bool [T]); 0 elsewhere. Float32 [T]."""
    chosen = advantages[valid].astype(np.float64)
    result = np.zeros(advantages.shape, dtype=np.float32)
    if chosen.size:
        result[valid] = (chosen - chosen.mean()) / (chosen.std() + EPSILON)
    return result


def explained_variance(values: np.ndarray, returns: np.ndarray) -> float | None:
    """1 - Var(returns - values) / Var(returns): 1 for perfect values, 0 for a constant. None where returns do not vary."""
    variance = float(np.var(returns, dtype=np.float64)) if returns.size else 0.0
    return 1.0 - float(np.var(returns - values, dtype=np.float64)) / variance if variance > 0 else None
