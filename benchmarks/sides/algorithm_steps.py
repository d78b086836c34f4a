"""One Megatron policy, trained by every algorithm in turn, A B C A B C ...: what a step of each takes under the same load."""

from __future__ import annotations

import argparse
import json

from pydantic import TypeAdapter

from benchmarks import batches, workload
from topology.models import model_info
from trainers.algorithms.base import REFERENCE
from trainers.algorithms.factory import build_loss
from trainers.batch import StepPlan
from trainers.config import AlgorithmConfig, MegatronBackend, Optimizer, TrainerConfig
from trainers.learner import Rendezvous
from trainers.rank import TrainerRank
from trainers.step import Stepper

SETTINGS = {"dpo": {"type": "dpo", "reference": "maker"}}
COMPUTE = ("pack", "train")  # phases of a step that make up forward and backward


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--algorithms", required=True, help="their types, with commas; all else as it is by default")
    parser.add_argument("--micro-batch-tokens", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    names = args.algorithms.split(",")
    configs = {name: _config(name, args) for name in names}
    rank = TrainerRank(
        configs[names[0]],
        model_path=args.model,
        rendezvous=Rendezvous(rank=0, world_size=1, address=f"127.0.0.1:{args.port}", timeout=60.0),
        bucket_bytes=64 << 20,
        seed=workload.SEED,
    )
    rank.start()
    rows = batches.rows("ragged", model_info(args.model).vocab)
    steppers = {
        name: Stepper(rank.learner.policy, build_loss(config), config.optimizer, steps=1, past_versions=0)
        for name, config in configs.items()
    }
    plans = {name: _plan(name, rows, configs[name].backend) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(args.rounds + 1):  # the first is not counted
        for name, stepper in steppers.items():
            found = _step(stepper, plans[name], rows)
            if number:
                seconds[name].append(found)
    rank.close()
    print(json.dumps({"seconds": seconds, "tokens": batches.tokens(rows)}))


def _config(name: str, args: argparse.Namespace) -> TrainerConfig:
    backend = MegatronBackend(
        type="megatron",
        dtype=workload.DTYPE,
        share_prompt=True,
        micro_batch_tokens=args.micro_batch_tokens,
        threads=args.threads,
    )
    return TrainerConfig(
        algorithm=TypeAdapter(AlgorithmConfig).validate_python(SETTINGS.get(name, {"type": name})),
        backend=backend,
        optimizer=Optimizer(lr=workload.LEARNING_RATE),
        groups_per_step=workload.GROUPS,
        steps=1,
    )


def _step(stepper: Stepper, plan: StepPlan, rows: list[batches.Columns]) -> float:
    result = stepper.run(plan, rows)
    if result.skipped is not None:
        raise RuntimeError(f"a step was skipped: {result.skipped}")
    return sum(result.seconds[phase] for phase in COMPUTE)


def _plan(name: str, rows: list[batches.Columns], backend: MegatronBackend) -> StepPlan:
    """The same for all; that of `dpo`, for which the samples are pairs, has what a reference maker would give."""
    pairs = name == "dpo"
    plan = batches.plan(rows, 1, backend.micro_batch_tokens, share_prompt=backend.share_prompt, whole_rows=pairs)
    return batches.label(plan, REFERENCE, rows, -10.0) if pairs else plan


if __name__ == "__main__":
    main()
