"""vLLM as a frozen model that scores given tokens: the log-probs of the prompt, of which the response is the end.

What vLLM's `prompt_logprobs=K` gives, and what is done about it:
- entry i is about token i given the tokens before it, and there is none for the first: the response's entries begin at its
  own first token, not one before.
- K + 1 entries a token, in the flat form (no object for each): the token itself, then the K likeliest, best first. So the token
  itself is apart, whether it is among the K or not.
- always of the raw logits: temperature and top-p of the request do not reach them.
- nothing comes from the prefix cache (vLLM would have no logits of a cached token): a prompt is computed once a sample.
- the logits of a step are [tokens of the step, vocabulary] in float32: `micro_batch_tokens` bounds the tokens of a step, and
  longer sequences go in chunks, which changes no value. Seeds, which forbid chunks on CPU, are not used here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from makers.config import VllmEngine
from makers.engines.engine import ScoreRequest, Scores
from makers.engines.vllm_core import VllmCore, engine_arguments, prepare_environment


class ScoringCore(VllmCore):
    """Rows to score in, scored rows out, one `step` at a time. Raises ValueError for a `top_k` above the vocabulary."""

    def __init__(
        self,
        config: VllmEngine,
        model_path: str,
        *,
        threads: int,
        top_k: int,
        micro_batch_tokens: int,
        **settings: Any,
    ) -> None:
        prepare_environment(threads, config.workers)
        self._top_k = top_k
        self._step_tokens = micro_batch_tokens
        super().__init__(config, model_path, **settings)
        vocabulary = self._engine.model_config.get_vocab_size()
        if top_k > vocabulary:
            raise ValueError(f"top_k {top_k} is above the {vocabulary} tokens of the vocabulary")

    def _arguments(self, config: VllmEngine, model_path: str, seed: int, sleeps: bool) -> dict[str, Any]:
        return {
            **engine_arguments(config, model_path, seed, sleeps),
            "logprobs_mode": "raw_logprobs",
            "max_logprobs": max(1, self._top_k),
            "enable_prefix_caching": False,
            "enable_chunked_prefill": True,
            "max_num_batched_tokens": max(self._step_tokens, config.max_num_seqs),  # vLLM wants a token for each
            **config.extra,
        }

    def _asked(self, request: ScoreRequest) -> Iterator[tuple[list[int], Any]]:  # type: ignore[override]
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        settings = SamplingParams(
            temperature=0.0,
            max_tokens=1,  # vLLM makes at least one; nobody reads it
            prompt_logprobs=request.top_k,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        for response in request.responses:
            yield [*request.prompt_ids, *response.tolist()], settings

    def _answer(self, request: ScoreRequest, index: int, output: Any) -> Scores:  # type: ignore[override]
        return scores_of(output.prompt_logprobs, len(request.prompt_ids), request.responses[index], request.top_k)


def scores_of(flat: Any, prompt: int, response: np.ndarray, top_k: int) -> Scores:
    """The entries of the response, cut from those of its whole sequence. Raises RuntimeError if they are not its."""
    width = top_k + 1
    begin = (prompt - 1) * width  # the sequence's first token has none
    shape = response.size, width
    ids = np.asarray(flat.token_ids[begin:], np.int32)
    logprobs = np.asarray(flat.logprobs[begin:], np.float32)
    if ids.size != shape[0] * width or not np.array_equal(ids.reshape(shape)[:, 0], response):
        raise RuntimeError(f"vLLM returned {ids.size} entries that are not those of the {shape[0]} tokens x {width}")
    ids, logprobs = ids.reshape(shape), logprobs.reshape(shape)
    own = np.ascontiguousarray(logprobs[:, 0])
    return Scores(response, own, np.ascontiguousarray(ids[:, 1:]), np.ascontiguousarray(logprobs[:, 1:]))
