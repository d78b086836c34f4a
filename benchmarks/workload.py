"""The one workload every comparison runs: both sides of a bench take their prompts and sizes from here.

Guarantees: the same seed gives the same prompts in every environment that has the same reasoning-gym; no torch here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

MODEL = "smollm2-135m-instruct"
GROUPS = 8  # prompts a step
SAMPLES = 8  # of one prompt
MAX_TOKENS = 24
TEMPERATURE = 1.0
DTYPE = "bfloat16"
CONTEXT = 256  # tokens, prompt and response together
SEQUENCES = 64  # decoded at once
LEARNING_RATE = 1e-6  # small: response lengths stay the same over the steps that are timed
SEED = 1
CHAIN_SUM = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}

NUMBER = re.compile(r"-?\d+")


@dataclass(frozen=True, slots=True)
class Problem:
    question: str
    entry: dict[str, Any]  # as reasoning-gym gives it

    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.question}]


def problems(count: int, seed: int = SEED) -> list[Problem]:
    import reasoning_gym

    dataset = reasoning_gym.create_dataset("chain_sum", size=count, seed=seed, **CHAIN_SUM)
    return [Problem(dataset[i]["question"], dataset[i]) for i in range(count)]


def score(text: str, answer: str) -> float:
    """1.0 when the last number of `text` is `answer`, else 0.0."""
    numbers = NUMBER.findall(text)
    return float(bool(numbers) and numbers[-1] == answer)
