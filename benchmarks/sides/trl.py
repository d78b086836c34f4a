"""TRL's GRPOTrainer on the shared workload. Runs in its own environment (requirements/bench-trl.txt).

Prints one JSON object on the last line: seconds of each timed step, samples of a step, mean response length.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks import workload


class Stopwatch(TrainerCallback):
    """Ends of steps, by the wall clock. A step holds generation, rewards, forward, backward and the update."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.logs: list[dict[str, float]] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())

    def on_log(self, *_: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
        if logs:
            self.logs.append(logs)

    def seconds(self) -> list[float]:
        return [end - start for start, end in zip(self.ends, self.ends[1:], strict=False)]


def reward(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
    return [workload.score(c[-1]["content"], a) for c, a in zip(completions, answer, strict=True)]


def settings(args: argparse.Namespace, folder: str) -> GRPOConfig:
    samples = args.groups * workload.SAMPLES
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=args.precision == "autocast",
        model_init_kwargs={"dtype": "bfloat16" if args.precision == "bfloat16" else "float32"},
        gradient_checkpointing=False,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=samples // args.micro_batch,
        num_generations=workload.SAMPLES,
        num_iterations=1,
        max_completion_length=workload.MAX_TOKENS,
        temperature=workload.TEMPERATURE,
        learning_rate=workload.LEARNING_RATE,
        lr_scheduler_type="constant",
        max_steps=args.steps,
        use_transformers_continuous_batching=args.generation == "continuous",
        transformers_continuous_batching_config=json.loads(args.continuous)
        if args.generation == "continuous"
        else None,
        use_vllm=args.generation == "vllm",
        vllm_max_model_length=256 if args.generation == "vllm" else None,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=workload.SEED,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--groups", type=int, default=workload.GROUPS)
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", choices=["float32", "bfloat16", "autocast"], default="bfloat16")
    parser.add_argument("--generation", choices=["generate", "continuous", "vllm"], default="generate")
    parser.add_argument("--continuous", default="{}", help="JSON of transformers' ContinuousBatchingConfig")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found = workload.problems(args.groups * args.steps)
    dataset = Dataset.from_list([{"prompt": p.messages(), "answer": p.entry["answer"]} for p in found])
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(args.model, reward, args=settings(args, folder), train_dataset=dataset, callbacks=[watch])
        trainer.train()
    lengths = [entry["completions/mean_length"] for entry in watch.logs if "completions/mean_length" in entry]
    answer = {
        "seconds": watch.seconds(),
        "samples": args.groups * workload.SAMPLES,
        "response_length": sum(lengths) / len(lengths),
        "reward": [entry["reward"] for entry in watch.logs if "reward" in entry],
    }
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
