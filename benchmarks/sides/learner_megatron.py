"""The Megatron learner on the rows of the bench, through the interface that a trainer calls.

Prints JSON: seconds of forward and backward (`seconds`) and of the whole step with optimizer (`step_seconds`) of each
repetition after one that is not counted, and the tokens of a repetition.
"""

from __future__ import annotations

import argparse
import json
import time

from benchmarks import batches, workload
from topology.models import model_info
from trainers.config import Grpo, MegatronBackend, Optimizer, TrainerConfig
from trainers.learner import Rendezvous
from trainers.rank import TrainerRank

COMPUTE = ("pack", "train")  # phases of a step that make up forward and backward


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--shape", choices=sorted(batches.SHAPES), required=True)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], required=True)
    parser.add_argument("--share-prompt", action="store_true")
    parser.add_argument("--micro-batch-tokens", type=int, required=True)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    backend = MegatronBackend(
        type="megatron",
        dtype=args.dtype,
        share_prompt=args.share_prompt,
        micro_batch_tokens=args.micro_batch_tokens,
        threads=args.threads,
    )
    config = TrainerConfig(
        algorithm=Grpo(type="grpo"),
        backend=backend,
        optimizer=Optimizer(lr=workload.LEARNING_RATE),
        groups_per_step=workload.GROUPS,
        steps=args.repeat + 1,
    )
    rank = TrainerRank(
        config,
        model_path=args.model,
        rendezvous=Rendezvous(rank=0, world_size=1, address=f"127.0.0.1:{args.port}", timeout=60.0),
        bucket_bytes=64 << 20,
        seed=workload.SEED,
    )
    rank.start()
    rows = batches.rows(args.shape, model_info(args.model).vocab)
    measured = [_step(rank, rows, step, backend) for step in range(1, args.repeat + 2)]
    rank.close()
    answer = {
        "seconds": [compute for compute, _ in measured[1:]],
        "step_seconds": [whole for _, whole in measured[1:]],
        "tokens": batches.tokens(rows),
    }
    print(json.dumps(answer))


def _step(rank: TrainerRank, rows: list[batches.Columns], step: int, backend: MegatronBackend) -> tuple[float, float]:
    start = time.perf_counter()
    plan = batches.plan(rows, step, backend.micro_batch_tokens, share_prompt=backend.share_prompt)
    result = rank.train_step(plan, *rows)
    if result.skipped is not None:
        raise RuntimeError(f"step {step} was skipped: {result.skipped}")
    return sum(result.seconds[phase] for phase in COMPUTE), time.perf_counter() - start


if __name__ == "__main__":
    main()
