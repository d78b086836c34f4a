"""The rollout maker's baseline: bare `vllm.LLM.generate` on the same prompts with the same sampling.

It gets what makes it fastest: engine in this process, no text made of the tokens, flat log-probs, no seeds. Log-probs of
the sampled tokens are asked for, because a rollout is of no use without. Prints JSON as the maker's side does.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

from benchmarks import workload


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=int, required=True)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument(
        "--as-maker", action="store_true", help="with the engine settings of a maker, not vLLM's defaults"
    )
    args = parser.parse_args()
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
        TORCHDYNAMO_DISABLE="1",
    )
    import torch

    torch.set_num_threads(args.threads)
    from vllm import LLM, SamplingParams

    from buffer.records import Prompt
    from makers.config import VllmEngine
    from makers.engines.vllm_core import engine_arguments
    from makers.prompt_ids import PromptEncoder

    engine = VllmEngine(dtype=workload.DTYPE, max_model_len=workload.CONTEXT, max_num_seqs=workload.SEQUENCES)
    if args.as_maker:
        llm = LLM(**engine_arguments(engine, args.model, workload.SEED, sleeps=False))
    else:
        llm = LLM(
            model=args.model,
            dtype=engine.dtype,
            max_model_len=engine.max_model_len,
            max_num_seqs=engine.max_num_seqs,
            kv_cache_memory_bytes=int(engine.kv_cache_gib * 2**30),
            enforce_eager=True,
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
            use_tqdm_on_load=False,
            seed=workload.SEED,
        )
    sampling = SamplingParams(
        n=workload.SAMPLES,
        temperature=workload.TEMPERATURE,
        max_tokens=workload.MAX_TOKENS,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
    )
    encoder = PromptEncoder(args.model)
    prompts = [
        {"prompt_token_ids": encoder.encode(Prompt(problem.question, problem.question))}
        for problem in workload.problems(args.prompts)
    ]
    _rate(llm, prompts[:2], sampling)
    print(json.dumps({"tokens_per_second": [_rate(llm, prompts, sampling) for _ in range(args.repeat)]}), flush=True)


def _rate(llm: Any, prompts: list[dict[str, Any]], sampling: Any) -> float:
    start = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    return tokens / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
