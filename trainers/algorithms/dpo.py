"""Direct preference optimisation (arXiv 2305.18290), with the losses of IPO (arXiv 2310.12036) and SLiC (arXiv 2305.10425).

A pair is two neighbouring samples of a micro-batch, chosen before rejected: a plan of `whole_rows` keeps them together. With
z = (log p - log p_ref)(chosen) - (log p - log p_ref)(rejected), the log-probs summed over a sample's tokens, a pair costs

    sigmoid: -(1 - s) log sigmoid(beta z) - s log sigmoid(-beta z), s = label_smoothing (conservative DPO)
    hinge:   max(0, 1 - beta z)
    ipo:     (z - 1 / (2 beta))^2, with log-probs averaged over a sample's tokens instead of summed

and the loss is the mean over the pairs of the minibatch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from trainers.algorithms.base import REFERENCE, LossTerms, TokenBatch
from trainers.config import Dpo


class DpoLoss:
    entropy_gradient = False

    def __init__(self, config: Dpo) -> None:
        self._config = config
        self.needs_reference = config.reference == "start"

    def __call__(self, batch: TokenBatch) -> LossTerms:
        reference = batch.reference if self.needs_reference else batch.labels[REFERENCE]
        assert reference is not None
        if batch.current.numel() == 0:
            return LossTerms(batch.current.sum(), {}, {})
        ratios = self._of_samples(batch.current - reference, batch)
        margin = ratios[:, 0] - ratios[:, 1]
        loss = 2.0 * self._cost(margin).sum() / batch.totals.samples
        rewards, margin = self._config.beta * ratios.detach(), self._config.beta * margin.detach()
        sums = {
            "dpo/pairs": torch.tensor(float(margin.numel())),
            "dpo/margin": margin.sum(),
            "dpo/accuracy": (margin > 0).float().sum(),
            "dpo/reward_chosen": rewards[:, 0].sum(),
            "dpo/reward_rejected": rewards[:, 1].sum(),
            "entropy": batch.entropy.detach().sum(),
        }
        return LossTerms(loss, sums, {})

    def _of_samples(self, per_token: Tensor, batch: TokenBatch) -> Tensor:
        """Sums (ipo: means) over the tokens of each sample, [pairs, 2]."""
        samples = int(batch.samples.max()) + 1
        weighted = per_token / batch.lengths if self._config.loss == "ipo" else per_token
        return per_token.new_zeros(samples).index_add(0, batch.samples, weighted).view(-1, 2)

    def _cost(self, margin: Tensor) -> Tensor:
        config = self._config
        if config.loss == "ipo":
            return (margin - 1 / (2 * config.beta)).square()
        logits = config.beta * margin
        if config.loss == "hinge":
            return torch.relu(1 - logits)
        smoothing = config.label_smoothing
        return -(1 - smoothing) * logsigmoid(logits) - smoothing * logsigmoid(-logits)
