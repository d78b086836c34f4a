"""Log-probs of given tokens under a frozen model: one Hugging Face forward pass.

Plain transformers rather than an inference engine, because an engine reports the log-probs of a prompt at temperature 1
only, and what is compared with the behaviour's must be tempered as that was: this needs all logits. They are computed
exactly, in float32 from the logits on, and there is no decoding here that an engine would be faster at.

The prompt of a row is computed once for all its samples. The responses follow on its keys and values, padded on the
right (under causal attention a token never sees what comes after it) and in batches of similar length.

CPU is what has been measured; on a GPU the same code runs there, not yet run on one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from buffer.columns import Columns
from buffer.records import DataFailure


@dataclass(frozen=True, slots=True)
class Scored:
    """One sample of a row: where its tokens lie in the flat columns, and what the model says at each of them."""

    span: slice
    targets: Tensor  # int64 [tokens]: the tokens that were sampled
    log_probs: Tensor  # float32 [tokens, vocabulary]: of the distribution tempered as the sample was


class FrozenModel:
    """A model of a checkpoint folder that never changes. Synchronous; one call at a time."""

    def __init__(self, auto: Any, folder: str | Path, *, dtype: str, micro_batch_tokens: int) -> None:
        """`auto`: the class of transformers that makes the model. Raises ValueError for a folder without all its weights."""
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._home = self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        safe = {"trust_remote_code": False, "use_safetensors": True, "local_files_only": True}
        model, told = auto.from_pretrained(folder, dtype=getattr(torch, dtype), output_loading_info=True, **safe)
        if missing := sorted(told["missing_keys"]):  # transformers would go on with random ones
            raise ValueError(f"its weights lack {', '.join(missing)}")
        self._model: Any = model.to(self._device).eval()
        self._micro_batch_tokens = micro_batch_tokens
        self._vocabulary = int(model.config.vocab_size)
        self._max_positions = getattr(model.config, "max_position_embeddings", None)

    def move(self, device: str | None) -> None:
        """The model to another device, or, None, back to where it was loaded. Frees what it leaves."""
        self._device = self._home if device is None else torch.device(device)
        self._model.to(self._device)
        if self._home.type == "cuda":
            torch.cuda.empty_cache()

    def _ids(self, ids: np.ndarray) -> Tensor:
        return torch.from_numpy(ids.astype(np.int64)).to(self._device)

    def _check(self, rollout: Columns) -> None:
        prompt, longest = rollout["prompt_ids"].size, int(np.diff(rollout["response_offsets"]).max())
        if self._max_positions and prompt + longest > self._max_positions:
            raise DataFailure(
                f"{prompt} prompt tokens + {longest} response tokens exceed the {self._max_positions} positions of the model"
            )
        highest = max(int(rollout["prompt_ids"].max()), int(rollout["response_ids"].max()))
        if highest >= self._vocabulary:
            raise DataFailure(f"token id {highest} is beyond the model's vocabulary of {self._vocabulary}")


class Scorer(FrozenModel):
    """A causal model: log-probs."""

    def __init__(self, folder: str | Path, *, dtype: str, micro_batch_tokens: int) -> None:
        from transformers import AutoModelForCausalLM

        super().__init__(AutoModelForCausalLM, folder, dtype=dtype, micro_batch_tokens=micro_batch_tokens)

    @torch.inference_mode()
    def score(self, rollout: Columns) -> Iterator[Scored]:
        """Each sample of one row once, in any order. Raises DataFailure, with the numbers, for a row it cannot take."""
        self._check(rollout)
        offsets = rollout["response_offsets"]
        prompt = self._ids(rollout["prompt_ids"])
        output = self._model(input_ids=prompt[None], use_cache=True, logits_to_keep=1)
        first, cache = output.logits[0], output.past_key_values  # [1, vocabulary]
        for samples in batches_by_length(np.diff(offsets), self._micro_batch_tokens):
            spans = [slice(int(offsets[sample]), int(offsets[sample + 1])) for sample in samples]
            targets = [self._ids(rollout["response_ids"][span]) for span in spans]
            following = self._following(cache, targets)
            for row, (sample, span) in enumerate(zip(samples, spans, strict=True)):
                kept = len(targets[row]) - 1  # the logits of a response's last token predict nothing here
                logits = torch.cat([first, following[row, :kept]]).float() / float(rollout["temperatures"][sample])
                yield Scored(span, targets[row], logits.log_softmax(-1))

    def _following(self, cache: Any, targets: Sequence[Tensor]) -> Tensor:
        """Logits [samples, longest - 1, vocabulary] of every response token but its last, given the prompt's `cache`."""
        fed = torch.nn.utils.rnn.pad_sequence([response[:-1] for response in targets], batch_first=True)
        if fed.shape[1] == 0:
            return torch.empty(*fed.shape, self._vocabulary, device=self._device)
        cache = copy.deepcopy(cache)  # the pass appends to it
        cache.batch_repeat_interleave(len(targets))
        logits: Tensor = self._model(input_ids=fed, past_key_values=cache, use_cache=True).logits
        return logits


def batches_by_length(lengths: np.ndarray, tokens: int) -> list[list[int]]:
    """Samples in batches, longest first, of at most `tokens` tokens with padding; at least one sample each."""
    batches: list[list[int]] = []
    longest = 0
    for sample in np.argsort(-lengths, kind="stable").tolist():
        if not batches or (len(batches[-1]) + 1) * longest > tokens:
            batches.append([])
            longest = int(lengths[sample])
        batches[-1].append(sample)
    return batches
