"""Reward functions of a user, well-behaved and otherwise, that the tests name by dotted path."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import numpy as np

CALLS = 0


def length(completions, prompt, **fields):
    return [float(len(text)) for text in completions]


def only_answer(completions, answer):
    return [float(text == answer) for text in completions]


def with_options(completions, *, bonus, answer="none"):
    return [bonus + (answer == "none") for _ in completions]


def needs_solution(completions, solution):
    return [1.0 for _ in completions]


def trl_style(prompts, completions, answer, **kwargs):
    assert len(prompts) == len(completions) == len(answer)
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(text == right) for text, right in zip(texts, answer, strict=True)]


def counting(completions):
    global CALLS  # noqa: PLW0603  shows whether the process is still the same
    CALLS += 1
    return [float(CALLS)] * len(completions)


def heavy_modules(completions):
    return [float(any(name in sys.modules for name in ("torch", "ray", "vllm", "transformers")))]


async def asynchronous(completions):
    await asyncio.gather(*(asyncio.sleep(0.001) for _ in completions))
    return [0.5] * len(completions)


def positional(completions, prompt, /):
    return [0.0]


class Scaled:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, completions, **fields):
        return np.full(len(completions), self.scale, dtype=np.float32)


NOT_CALLABLE = 3


def misbehave(completions, how, **fields):
    return BEHAVIOURS[how](completions)


def _print(completions):
    print("\x00\x00 not the protocol " * 100)
    sys.stdout.flush()
    os.write(1, b"raw bytes")
    return [1.0 for _ in completions]


def _raise(completions):
    raise ZeroDivisionError("no such luck")


def _spin(completions):
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP})
    while True:
        pass


def _child_and_sleep(completions):
    child = subprocess.Popen(["sleep", "600"])
    with open(completions[0], "w") as file:
        file.write(str(child.pid))
    time.sleep(600)


BEHAVIOURS = {
    "good": lambda completions: [1.0 for _ in completions],
    "print": _print,
    "raise": _raise,
    "leave": lambda completions: sys.exit(5),
    "exit": lambda completions: os._exit(3),
    "crash": lambda completions: os.kill(os.getpid(), signal.SIGSEGV),
    "spin": _spin,
    "sleep": lambda completions: time.sleep(600),
    "child": _child_and_sleep,
    "nan": lambda completions: [float("nan") for _ in completions],
    "inf": lambda completions: [1e39 for _ in completions],
    "few": lambda completions: [1.0],
    "text": lambda completions: ["1.0" for _ in completions],
    "none": lambda completions: [None for _ in completions],
    "scalar": lambda completions: 1.0,
}
