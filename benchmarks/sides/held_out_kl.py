"""How far a student is from its teacher on prompts that nobody trained on: exact, over the whole vocabulary, in transformers.

Prints `{"own": nats, "teacher": nats}`: KL(teacher, student) a token, mean over the tokens of answers that the student
sampled itself (where on-policy distillation draws it to the teacher), and of answers that the teacher sampled.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import workload
from topology.models import resolve_model

SEED = 10_001  # of questions and samples; the configs train on other seeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--student", required=True, help="a checkpoint folder, or a model's name")
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=32)
    arguments = parser.parse_args()
    student, teacher = (_load(name) for name in (arguments.student, arguments.teacher))
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(arguments.student))
    found = {}
    for name, sampler in (("own", student), ("teacher", teacher)):
        torch.manual_seed(SEED)
        pairs = _answers(sampler, tokenizer, _prompts(tokenizer, arguments.prompts), arguments.max_tokens)
        divergences = torch.cat([_divergence(student, teacher, ids, prompt) for ids, prompt in pairs])
        found[name] = float(divergences.mean())
    print(json.dumps(found))


def _load(name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(resolve_model(name), dtype=torch.float32).eval()


def _prompts(tokenizer: Any, count: int) -> list[torch.Tensor]:
    texts = [problem.messages() for problem in workload.problems(count, SEED)]
    return [
        tokenizer.apply_chat_template(text, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
            "input_ids"
        ]
        for text in texts
    ]


@torch.inference_mode()
def _answers(
    model: Any, tokenizer: Any, prompts: list[torch.Tensor], max_tokens: int
) -> list[tuple[torch.Tensor, int]]:
    """Prompt and answer [1, tokens], and the length of the prompt, of each. Prompts of equal length go together."""
    by_length: dict[int, list[torch.Tensor]] = {}
    for prompt in prompts:
        by_length.setdefault(prompt.shape[1], []).append(prompt)
    found = []
    for length, alike in sorted(by_length.items()):
        batch = torch.cat(alike)
        sampled = model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max_tokens,
            pad_token_id=tokenizer.eos_token_id,
        )
        found += [(_until_end(ids, length, tokenizer.eos_token_id), length) for ids in sampled]
    return found


def _until_end(ids: torch.Tensor, prompt: int, eos: int) -> torch.Tensor:
    """[1, tokens], without the padding behind the first end of sequence of the answer."""
    ends = (ids[prompt:] == eos).nonzero()
    return ids[None, : prompt + int(ends[0]) + 1 if len(ends) else None]


@torch.inference_mode()
def _divergence(student: Any, teacher: Any, ids: torch.Tensor, prompt: int) -> torch.Tensor:
    """KL(teacher, student) in nats at each token of the answer."""
    p, q = (log_softmax(model(ids).logits[0, prompt - 1 : -1].float(), dim=-1) for model in (student, teacher))
    return (q.exp() * (q - p)).sum(dim=-1)


if __name__ == "__main__":
    main()
