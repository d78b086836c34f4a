"""Two processes that compute together through gloo, for what needs no learner around it.

They are forked from a server that has imported torch once for all tests of this process, and killed when they have answered:
importing and unloading torch would take ten times as long as what they compute.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from typing import Any

PATIENCE = 60  # seconds for one answer


def answers_of_two(work: Callable[[int, str, Any], None], count: int) -> list[Any]:
    """The `count` things that `work(rank, meeting, results)`, a function of a module, puts into its queue on both ranks.

    `meeting` is the init_method of their process group: a file, since a port that is free now may be taken when they listen.
    """
    with tempfile.TemporaryDirectory() as folder:
        return _answers(work, f"file://{folder}/meeting", count)


def _answers(work: Callable[[int, str, Any], None], meeting: str, count: int) -> list[Any]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "pytest"])
    results = context.Queue()
    processes = [context.Process(target=work, args=(rank, meeting, results), daemon=True) for rank in range(2)]
    try:
        for process in processes:
            process.start()
        return [results.get(timeout=PATIENCE) for _ in range(count)]
    finally:
        for process in processes:
            process.kill()
            process.join(timeout=10)
