"""One Megatron policy, trained by GRPO and by distillation from a top-k in turn, A B A B ...: the seconds of each step."""

from __future__ import annotations

import argparse
import json
from typing import Any

from benchmarks import batches, workload
from topology.models import model_info
from trainers.algorithms.factory import build_loss
from trainers.config import DistillAlgorithm, DistillConfig, Grpo, MegatronBackend, Optimizer, TrainerConfig
from trainers.distillation.columns import DEMONSTRATED
from trainers.distillation.divergence import divergence_of
from trainers.learner import Rendezvous
from trainers.rank import TrainerRank
from trainers.step import Stepper

COMPUTE = ("pack", "train")  # phases of a step that make up forward and backward


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--top-k", type=int, required=True)
    parser.add_argument("--micro-batch-tokens", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    backend = MegatronBackend(
        type="megatron",
        dtype=workload.DTYPE,
        share_prompt=True,
        micro_batch_tokens=args.micro_batch_tokens,
        threads=args.threads,
    )
    common: dict[str, Any] = {
        "backend": backend,
        "optimizer": Optimizer(lr=workload.LEARNING_RATE),
        "groups_per_step": workload.GROUPS,
        "steps": 1,
    }
    configs = {
        "distill": TrainerConfig(algorithm=DistillAlgorithm(type="distill"), distill=DistillConfig(), **common),
        "grpo": TrainerConfig(algorithm=Grpo(type="grpo"), **common),
    }
    rank = TrainerRank(
        configs["distill"],
        model_path=args.model,
        rendezvous=Rendezvous(rank=0, world_size=1, address=f"127.0.0.1:{args.port}", timeout=60.0),
        bucket_bytes=64 << 20,
        seed=workload.SEED,
    )
    rank.start()
    policy = rank.learner.policy
    steppers = {
        name: Stepper(policy, build_loss(config), config.optimizer, steps=1, past_versions=0)
        for name, config in configs.items()
    }
    vocabulary = model_info(args.model).vocab
    rows = batches.rows("ragged", vocabulary)
    taught = [{**row, **batches.teacher(row, args.top_k, vocabulary)} for row in rows]
    plan = batches.plan(rows, 1, backend.micro_batch_tokens, share_prompt=True)
    steps = {"distill": (batches.label(plan, DEMONSTRATED, rows, 0.0), taught), "grpo": (plan, rows)}
    seconds: dict[str, list[float]] = {name: [] for name in configs}
    for number in range(args.rounds + 1):  # the first is not counted
        for name, stepper in steppers.items():
            policy._divergence = divergence_of(configs[name])  # all that a policy itself knows of a makers' teacher
            result = stepper.run(*steps[name])
            if result.skipped is not None:
                raise RuntimeError(f"a step was skipped: {result.skipped}")
            if number:
                seconds[name].append(sum(result.seconds[phase] for phase in COMPUTE))
    rank.close()
    print(json.dumps({"seconds": seconds, "tokens": batches.tokens(rows)}))


if __name__ == "__main__":
    main()
