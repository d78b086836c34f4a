"""From sums over tokens to the figures of one step. Sums add over micro-batches and ranks, so any split gives the same.

Every sum is divided by the number of computed tokens (`tokens`), those named `mismatch/*` by the number of tokens that were
compared with their maker at equal version (`mismatch/tokens`), those named `dpo/*` by the number of pairs (`dpo/pairs`).
Parts of the loss (`loss/*`) are no means: they stay sums.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trainers.algorithms.base import LossTerms


class MetricSums:
    """Adds up `LossTerms` and mismatch figures. Tensors are kept as they are; reading them out happens once a step."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.maxima: dict[str, Tensor] = {}

    def add(self, sums: Mapping[str, Tensor], maxima: Mapping[str, Tensor]) -> None:
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value.detach().double()
        for name, value in maxima.items():
            known = self.maxima.get(name)
            self.maxima[name] = value.detach().double() if known is None else torch.maximum(known, value.double())

    def add_terms(self, terms: LossTerms) -> None:
        self.add({"loss": terms.loss, **terms.sums}, terms.maxima)


def mismatch(proximal: Tensor, behaviour: Tensor, at_version: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """How far the trainer's log-probs are from the maker's on the tokens [tokens] that both made at the same version.

    `at_version` is bool [tokens]. `mismatch/kl` is the k3 estimate of KL(maker || trainer).
    """
    difference = (proximal - behaviour)[at_version]
    sums = {
        "mismatch/tokens": at_version.sum(),
        "mismatch/kl": (torch.expm1(difference) - difference).sum(),
        "mismatch/logp_abs_diff_mean": difference.abs().sum(),
    }
    return sums, {"mismatch/logp_abs_diff_max": difference.abs().max()} if difference.numel() else {}


def finish(sums: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, float]:
    """Metrics of a step from its sums over all ranks. Names without any token to measure are left out."""
    counts = {"mismatch": sums.get("mismatch/tokens", 0.0), "dpo": sums.get("dpo/pairs", 0.0)}
    metrics: dict[str, float] = {"mismatch/tokens": counts["mismatch"]}
    for name, value in sums.items():
        count = counts.get(name.split("/")[0], sums.get("tokens", 0.0))
        if name.startswith("loss/"):
            metrics[name] = value
        elif name not in ("loss", "tokens", "mismatch/tokens", "dpo/pairs") and count > 0:
            metrics[name] = value / count
    measured, overlap = metrics.pop("topk_overlap/tokens", 0.0), metrics.pop("topk_overlap/sum", 0.0)
    if measured > 0:
        metrics["distill/topk_overlap"] = overlap / measured
    square = metrics.pop("is/square", 0.0)
    if square > 0:  # (sum w)^2 / (n * sum w^2): 1 when all weights are equal, 1/n when one token has all the weight
        metrics["is/ess"] = metrics["is/mean"] ** 2 / square
    return metrics | dict(maxima)
