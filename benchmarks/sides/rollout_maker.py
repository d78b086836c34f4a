"""Tandem's rollout maker with its engine, fed as a buffer feeds it: up to `slots` rows at once, the next as one ends.

Prints JSON: tokens a second of each repetition after a short one that is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time

from benchmarks import workload
from buffer.records import Lease, Prompt
from makers.config import Resources, RolloutMaker, Sampling, VllmEngine
from makers.factory import build_maker
from makers.maker import Maker

TIMEOUT = 300.0  # seconds for one row


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=int, required=True)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    config = RolloutMaker(
        kind="rollout",
        resources=Resources(cpus=args.threads),
        engine=VllmEngine(
            dtype=workload.DTYPE, max_model_len=workload.CONTEXT, max_num_seqs=workload.SEQUENCES, threads=args.threads
        ),
        sampling=Sampling(n=workload.SAMPLES, temperature=workload.TEMPERATURE, max_tokens=workload.MAX_TOKENS),
    )
    maker = build_maker(config, name="bench", model_path=args.model, weights=None, seed=workload.SEED)
    await maker.start()
    prompts = [Prompt(problem.question, problem.question) for problem in workload.problems(args.prompts)]
    await _rate(maker, prompts[:2], 0)
    rates = [await _rate(maker, prompts, number) for number in range(1, args.repeat + 1)]
    await maker.close()
    print(json.dumps({"tokens_per_second": rates}), flush=True)


async def _rate(maker: Maker, prompts: list[Prompt], repetition: int) -> float:
    """Tokens a second, from the first row entered to the last one out."""
    slots = asyncio.Semaphore(maker.slots)

    async def row(index: int, prompt: Prompt) -> int:
        lease = Lease(
            id=index,
            row_id=index,
            stage="rollout",
            maker="bench",
            prompt=prompt,
            min_version=0,
            seed=repetition * len(prompts) + index,
            samples=workload.SAMPLES,
            timeout=TIMEOUT,
        )
        async with slots:
            produced, _ = await maker.make(lease, {})
        return produced.tokens

    start = time.perf_counter()
    tokens = await asyncio.gather(*(row(index, prompt) for index, prompt in enumerate(prompts)))
    return sum(tokens) / (time.perf_counter() - start)


if __name__ == "__main__":
    asyncio.run(main())
