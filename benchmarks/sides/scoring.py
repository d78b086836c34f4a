"""Scored response tokens a second: of the teacher maker, or of bare vLLM with `prompt_logprobs`, on the same sequences.

Prints JSON: the rates of each repetition after a short one that is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from typing import Any

import numpy as np

from benchmarks import workload
from buffer.columns import Columns
from buffer.records import Lease, Prompt

PROMPT, RESPONSE = 40, 120  # tokens
STEP_TOKENS = 1024  # of one forward pass, on both sides


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", choices=("maker", "vllm"), required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--top-k", type=int, required=True)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    rows = rows_of(args.rows)
    rates = asyncio.run(maker(args, rows)) if args.side == "maker" else vllm(args, rows)
    print(json.dumps({"tokens_per_second": rates}), flush=True)


def rows_of(count: int) -> list[Columns]:
    rng = np.random.default_rng(workload.SEED)
    samples = workload.SAMPLES
    return [
        {
            "prompt_ids": rng.integers(0, 40000, PROMPT).astype(np.int32),
            "response_ids": rng.integers(0, 40000, RESPONSE * samples).astype(np.int32),
            "response_offsets": np.arange(samples + 1, dtype=np.int64) * RESPONSE,
        }
        for _ in range(count)
    ]


async def maker(args: Any, rows: list[Columns]) -> list[float]:
    from makers.config import Resources, TeacherMaker, VllmEngine
    from makers.factory import build_maker

    engine = VllmEngine(
        dtype=workload.DTYPE, max_model_len=workload.CONTEXT, max_num_seqs=workload.SEQUENCES, threads=args.threads
    )
    config = TeacherMaker(
        kind="teacher",
        resources=Resources(cpus=args.threads),
        engine=engine,
        top_k=args.top_k,
        micro_batch_tokens=STEP_TOKENS,
    )
    made = build_maker(config, name="bench", model_path=args.model, weights=None, seed=workload.SEED)
    await made.start()
    slots = asyncio.Semaphore(made.slots)

    async def row(index: int, columns: Columns) -> int:
        lease = Lease(
            id=index, row_id=index, stage="teacher", maker="bench", prompt=Prompt("p", "x"), min_version=0, seed=0,
            samples=workload.SAMPLES, timeout=600.0,
        )  # fmt: skip
        async with slots:
            _, answer = await made.make(lease, {"rollout": columns})
        return int(answer["teacher_mass"].size)

    rates = []
    for repetition in range(args.repeat + 1):
        began = time.perf_counter()
        tokens = await asyncio.gather(*(row(i, columns) for i, columns in enumerate(rows if repetition else rows[:1])))
        rates.append(sum(tokens) / (time.perf_counter() - began))
    await made.close()
    return rates[1:]


def vllm(args: Any, rows: list[Columns]) -> list[float]:
    from makers.engines.vllm_core import prepare_environment

    prepare_environment(args.threads, 1)
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(
        args.model, dtype=workload.DTYPE, max_model_len=workload.CONTEXT, max_num_seqs=workload.SEQUENCES,
        enforce_eager=True, kv_cache_memory_bytes=2**29, max_logprobs=max(1, args.top_k), enable_prefix_caching=False,
        max_num_batched_tokens=STEP_TOKENS, disable_log_stats=True, use_tqdm_on_load=False,
    )  # fmt: skip
    asked = SamplingParams(
        temperature=0.0, max_tokens=1, prompt_logprobs=args.top_k, flat_logprobs=True, detokenize=False
    )
    prompts = [
        TokensPrompt(prompt_token_ids=[*row["prompt_ids"].tolist(), *response.tolist()])
        for row in rows
        for response in np.split(row["response_ids"], row["response_offsets"][1:-1])
    ]
    rates = []
    for repetition in range(args.repeat + 1):
        some = prompts if repetition else prompts[: workload.SAMPLES]
        began = time.perf_counter()
        llm.generate(some, asked, use_tqdm=False)
        rates.append(len(some) * RESPONSE / (time.perf_counter() - began))
    return rates[1:]


if __name__ == "__main__":
    main()
