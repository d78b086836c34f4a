"""Two processes that compute together through gloo, for what needs no learner around it.

They are forked from a server that has imported torch once for all tests of this process, and killed when they have answered:
importing and unloading torch would take ten times as long as what they compute.
"""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable
from typing import Any

PATIENCE = 60  # seconds for one answer


def answers_of_two(work: Callable[[int, int, Any], None], count: int) -> list[Any]:
    """The `count` things that `work(rank, port, results)`, a function of a module, puts into its queue on both ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "pytest"])
    results = context.Queue()
    processes = [context.Process(target=work, args=(rank, port, results), daemon=True) for rank in range(2)]
    try:
        for process in processes:
            process.start()
        return [results.get(timeout=PATIENCE) for _ in range(count)]
    finally:
        for process in processes:
            process.kill()
            process.join(timeout=10)
