"""Real processes that take the ranks of a learner, for tests of parallel training.

Starting a process and importing torch and Megatron takes far longer than a step of a tiny model: the processes are
started once and meet anew for every job.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from trainers.learner import Rendezvous
from trainers.rank import TrainerRank

MEETING_SECONDS = 60.0  # of the ranks with each other, and for each of their collectives
JOB_SECONDS = 150.0  # the first one waits for imports too


class RankFailed(AssertionError):
    """A rank raised, or did not answer in time. The text has its traceback."""


class Ranks:
    """`size` processes, which may have children of their own. They end when they are closed, or when this process dies."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, world_size: int, job: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Results of `job(rendezvous, *arguments)` in rank order. `job` is a function of a module, its results are
        free of tensors. After a failure the processes are started anew. Raises RankFailed."""
        if not self._processes:
            self._start()
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            for rank, pipe in enumerate(self._pipes[:world_size]):
                held = listener if rank == 0 else None
                pipe.send((job, Rendezvous(rank, world_size, address, MEETING_SECONDS, held), arguments))
        try:
            return self._results(world_size)
        except RankFailed:
            self.close()  # the others may wait for the failed one
            raise

    def close(self) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the children, which would outlive it
        for process in self._processes:
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        for _ in range(self._size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _results(self, world_size: int) -> list[Any]:
        deadline = time.monotonic() + JOB_SECONDS
        results: dict[int, Any] = {}
        while len(results) < world_size:
            waiting = {self._pipes[rank]: rank for rank in range(world_size) if rank not in results}
            ready = multiprocessing.connection.wait(waiting, timeout=deadline - time.monotonic())
            if not ready:
                raise RankFailed(f"ranks {sorted(waiting.values())} did not answer within {JOB_SECONDS:g} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting[pipe]
                try:
                    error, results[rank] = pipe.recv()
                except EOFError:
                    raise RankFailed(f"rank {rank} died") from None
                if error is not None:
                    raise RankFailed(f"rank {rank} of {world_size}:\n{error}")
        return [results[rank] for rank in range(world_size)]


def save(rank: TrainerRank, folder: str) -> None:
    """Copy the rank's state and wait until it is written."""
    rank.stage()
    rank.write(folder).result()


def _serve(pipe: Connection) -> None:
    os.setsid()
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            job, rendezvous, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((None, job(rendezvous, *arguments)))
        except BaseException:
            pipe.send((traceback.format_exc(), None))
