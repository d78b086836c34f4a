"""How far a student is from its teacher on prompts that nobody trained on: exact, over the whole vocabulary, in transformers.

Prints `{"own": nats, "teacher": nats}`: KL(teacher, student) a token, mean over the tokens of answers that the student
sampled itself (where on-policy distillation draws it to the teacher), and of answers that the teacher sampled.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import reasoning_gym
import torch
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM, AutoTokenizer

from topology.models import resolve_model

SEED = 10_001  # of questions and samples; the configs train on other seeds
QUESTIONS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


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
        pairs = [_answered(sampler, ids, arguments.max_tokens) for ids in _prompts(tokenizer, arguments.prompts)]
        divergences = torch.cat([_divergence(student, teacher, ids, prompt) for ids, prompt in pairs])
        found[name] = float(divergences.mean())
    print(json.dumps(found))


def _load(name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(resolve_model(name), dtype=torch.float32).eval()


def _prompts(tokenizer: Any, count: int) -> list[torch.Tensor]:
    questions = reasoning_gym.create_dataset("chain_sum", size=count, seed=SEED, **QUESTIONS)
    texts = [[{"role": "user", "content": row["question"]}] for row in questions]
    return [
        tokenizer.apply_chat_template(text, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
            "input_ids"
        ]
        for text in texts
    ]


@torch.inference_mode()
def _answered(model: Any, prompt: torch.Tensor, max_tokens: int) -> tuple[torch.Tensor, int]:
    """Prompt and answer [1, tokens], and the length of the prompt."""
    ids = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max_tokens,
        pad_token_id=0,
    )
    return ids, prompt.shape[1]


@torch.inference_mode()
def _divergence(student: Any, teacher: Any, ids: torch.Tensor, prompt: int) -> torch.Tensor:
    """KL(teacher, student) in nats at each token of the answer."""
    p, q = (log_softmax(model(ids).logits[0, prompt - 1 : -1].float(), dim=-1) for model in (student, teacher))
    return (q.exp() * (q - p)).sum(dim=-1)


if __name__ == "__main__":
    main()
