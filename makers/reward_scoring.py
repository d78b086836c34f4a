"""What a reward model says of a row: the forward pass of transformers' own classification classes, over token ids.

Prompt and response go through the model as they were sampled, in one sequence, padded on the right and in batches of similar
length. A sequence's score is taken where transformers takes it (the last token that is not `pad_token_id`), so that it is what
the model was trained to say. Of a token classifier with one label the score of a token is its logit; with two, as process
reward models are trained (TRL's PRMTrainer), the probability of the second.

CPU is what has been measured; on a GPU the same code runs there, not yet run on one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from buffer.columns import Columns
from buffer.records import DataFailure
from makers.scoring import FrozenModel, batches_by_length


class RewardScorer(FrozenModel):
    """Of each sample, or, `per_token`, of each response token."""

    def __init__(self, folder: str | Path, *, per_token: bool, dtype: str, micro_batch_tokens: int) -> None:
        from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

        auto = AutoModelForTokenClassification if per_token else AutoModelForSequenceClassification
        super().__init__(auto, folder, dtype=dtype, micro_batch_tokens=micro_batch_tokens)
        self._per_token = per_token
        pad = self._model.config.pad_token_id
        self._pad = pad if pad is not None and 0 <= pad < self._vocabulary else None  # some checkpoints say -1
        labels = self._model.config.num_labels
        if labels != 1 and not (per_token and labels == 2):
            raise ValueError(f"it has {labels} labels, so no one score: 1 is needed{', or 2' if per_token else ''}")

    @torch.inference_mode()
    def score(self, rollout: Columns) -> np.ndarray:
        """Float32, [samples] or [response tokens]. Raises DataFailure, with the numbers, for a row it cannot take."""
        self._check(rollout)
        offsets = rollout["response_offsets"]
        scores = np.empty(int(offsets[-1]) if self._per_token else len(offsets) - 1, np.float32)
        prompt = rollout["prompt_ids"].size
        for samples, logits in self._forward(rollout):
            for row, sample in enumerate(samples):
                if self._per_token:
                    begin, end = offsets[sample : sample + 2]
                    scores[begin:end] = _of_tokens(logits[row, prompt : prompt + end - begin]).cpu().numpy()
                else:
                    scores[sample] = float(logits[row, 0])
        if not np.isfinite(scores).all():
            raise DataFailure(
                f"{int((~np.isfinite(scores)).sum())} of {scores.size} scores of the model are not finite"
            )
        return scores

    def _forward(self, rollout: Columns) -> Iterator[tuple[list[int], Tensor]]:
        """Samples, and their logits [samples, labels], or [samples, tokens, labels]."""
        offsets = rollout["response_offsets"]
        lengths = rollout["prompt_ids"].size + np.diff(offsets)
        # Without a token for padding transformers finds no end in a padded sequence: one sample at a time.
        alone = self._pad is None and not self._per_token
        for samples in batches_by_length(lengths, 1 if alone else self._micro_batch_tokens):
            whole = [
                self._ids(np.concatenate([rollout["prompt_ids"], rollout["response_ids"][offsets[i] : offsets[i + 1]]]))
                for i in samples
            ]
            mask = pad_sequence([torch.ones_like(ids) for ids in whole], batch_first=True)
            padded = pad_sequence(whole, batch_first=True, padding_value=self._pad or 0)
            yield samples, self._model(input_ids=padded, attention_mask=mask, use_cache=False).logits


def _of_tokens(logits: Tensor) -> Tensor:
    """[tokens, labels] -> float32 [tokens]."""
    logits = logits.float()
    return logits[:, 0] if logits.shape[-1] == 1 else logits.softmax(-1)[:, 1]
