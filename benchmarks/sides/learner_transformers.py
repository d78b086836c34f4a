"""The learner's baseline: a transformers model, forward and backward of a policy gradient on padded micro-batches.

Prints JSON: seconds of each repetition after one that is not counted, and the tokens of a repetition.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import batches

MicroBatch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]  # ids, attention mask, response mask, tokens to keep


def padded(rows: list[batches.Columns], micro_batch: int) -> list[MicroBatch]:
    """`micro_batch` samples each, in order of length, so that the least is padded; responses padded on the right."""
    samples = [
        (row["prompt_ids"], row["response_ids"][start:end])
        for row in rows
        for start, end in zip(row["response_offsets"], row["response_offsets"][1:], strict=False)
    ]
    samples.sort(key=lambda sample: len(sample[1]))
    made = []
    for first in range(0, len(samples), micro_batch):
        chosen = samples[first : first + micro_batch]
        longest = max(len(response) for _, response in chosen)
        ids = np.zeros((len(chosen), batches.PROMPT_TOKENS + longest), np.int64)
        response_mask = np.zeros((len(chosen), longest), bool)
        for index, (prompt, response) in enumerate(chosen):
            ids[index, : len(prompt) + len(response)] = np.concatenate([prompt, response])
            response_mask[index, : len(response)] = True
        mask = np.concatenate([np.ones((len(chosen), batches.PROMPT_TOKENS), bool), response_mask], axis=1)
        made.append((torch.from_numpy(ids), torch.from_numpy(mask), torch.from_numpy(response_mask), longest))
    return made


def loss(model: torch.nn.Module, batch: MicroBatch, total: int) -> torch.Tensor:
    ids, mask, response_mask, longest = batch
    attention = None if bool(mask.all()) else mask.long()  # none: the fast causal kernel
    logits = model(input_ids=ids, attention_mask=attention, use_cache=False, logits_to_keep=longest + 1).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), ids[:, -longest:].flatten(), reduction="none"
    )
    return (losses * response_mask.flatten()).sum() / total


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--shape", choices=sorted(batches.SHAPES), required=True)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], required=True)
    parser.add_argument("--micro-batch", type=int, required=True, help="samples")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    config = AutoConfig.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).train()
    rows = batches.rows(args.shape, config.vocab_size)
    prepared = padded(rows, args.micro_batch)
    total = sum(int(response_mask.sum()) for _, _, response_mask, _ in prepared)
    seconds = []
    for _ in range(args.repeat + 1):
        start = time.perf_counter()
        model.zero_grad()
        for batch in prepared:
            loss(model, batch, total).backward()
        seconds.append(time.perf_counter() - start)
    print(json.dumps({"seconds": seconds[1:], "tokens": batches.tokens(rows)}))


if __name__ == "__main__":
    main()
