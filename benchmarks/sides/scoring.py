"""Scoring by the teacher maker and by bare vLLM with `prompt_logprobs`, of the same sequences, in turn: the seconds of each.

All are in one process, each with an engine of its own, so that a round has them within seconds of each other. The order turns
by one from round to round. Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from benchmarks import workload
from buffer.columns import Columns
from buffer.records import Lease, Prompt
from makers.config import Resources, TeacherMaker, VllmEngine

PROMPT, RESPONSE = 40, 120  # tokens
STEP_TOKENS = 1024  # of one forward pass, on both sides
Score = Callable[[list[Columns]], Awaitable[int]]  # rows in, the number of response tokens that were scored


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--top-k", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    print(json.dumps(asyncio.run(_measured(parser.parse_args()))), flush=True)


async def _measured(args: argparse.Namespace) -> dict[str, Any]:
    rows = rows_of(args.rows)
    sides: dict[str, Score] = {
        "maker": await maker(args, args.top_k),
        "maker without K": await maker(args, 0),
        "vllm": vllm(args),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(args.rounds + 1):  # the first is not counted
        names = list(sides)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            began = time.perf_counter()
            tokens = await sides[name](rows)
            if number:
                seconds[name].append(time.perf_counter() - began)
    return {"seconds": seconds, "tokens": tokens}


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


def engine_of(threads: int) -> VllmEngine:
    return VllmEngine(
        dtype=workload.DTYPE, max_model_len=workload.CONTEXT, max_num_seqs=workload.SEQUENCES, threads=threads
    )


async def maker(args: argparse.Namespace, top_k: int) -> Score:
    from makers.factory import build_maker

    config = TeacherMaker(
        kind="teacher",
        resources=Resources(cpus=args.threads),
        engine=engine_of(args.threads),
        top_k=top_k,
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

    async def score(rows: list[Columns]) -> int:
        return sum(await asyncio.gather(*(row(index, columns) for index, columns in enumerate(rows))))

    return score


def vllm(args: argparse.Namespace) -> Score:
    """As anyone would call it, with the flat form of the log-probs and the maker's settings where there is one."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    engine = engine_of(args.threads)
    llm = LLM(
        args.model,
        dtype=engine.dtype,
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.max_num_seqs,
        kv_cache_memory_bytes=int(engine.kv_cache_gib * 2**30),
        max_num_batched_tokens=STEP_TOKENS,
        max_logprobs=args.top_k,
        enable_prefix_caching=False,
        enforce_eager=True,
        disable_log_stats=True,
        use_tqdm_on_load=False,
    )
    asked = SamplingParams(
        temperature=0.0, max_tokens=1, prompt_logprobs=args.top_k, flat_logprobs=True, detokenize=False
    )

    async def score(rows: list[Columns]) -> int:
        responses = [(row, np.split(row["response_ids"], row["response_offsets"][1:-1])) for row in rows]
        prompts = [
            TokensPrompt(prompt_token_ids=[*row["prompt_ids"].tolist(), *response.tolist()])
            for row, parts in responses
            for response in parts
        ]
        llm.generate(prompts, asked, use_tqdm=False)
        return sum(response.size for _, parts in responses for response in parts)

    return score


if __name__ == "__main__":
    main()
