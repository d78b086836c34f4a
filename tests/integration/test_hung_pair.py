"""In a cluster that is not the run's own, the two that watch each other hang at once: the consumer of the rows notices."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from tests.command_line import TINY, events, status, tandem, wait_for
from tests.simulated_cluster import simulated_cluster

pytestmark = pytest.mark.timeout(400)


def test_a_supervisor_and_a_buffer_that_hang_together_are_both_made_anew(tmp_path: Path) -> None:
    with simulated_cluster({"127.0.6.1": {"num_cpus": 8}}) as cluster:
        settings = ("trainers.policy.steps=100000", "limits.ping=5", f"cluster.address={cluster.address}")
        sets = [part for setting in settings for part in ("--set", setting)]
        done = tandem(tmp_path, "run", TINY, "--detach", *sets)
        assert done.returncode == 0, done.stdout + done.stderr
        wait_for(lambda: status(tmp_path, "tiny")["step"] >= 2, 150, "the first steps")
        now = status(tmp_path, "tiny")
        pids = [now["supervisor"]["pid"], *(row["pid"] for row in now["actors"] if row["name"] == "buffer")]
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            wait_for(lambda: len(deaths(tmp_path)) >= 2, 180, "the death of both")
            first, second = deaths(tmp_path)[:2]
            assert first == "supervisor: hung, no answer for 60 s"
            assert second.startswith("buffer: hung, no answer for limits.ping = 5 s")
            reached = status(tmp_path, "tiny")["step"]
            wait_for(lambda: status(tmp_path, "tiny")["step"] >= reached + 3, 120, "steps after both were made anew")
        finally:
            for pid in pids:  # still there only if nobody made them anew
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            tandem(tmp_path, "stop", "tiny", "--now")


def deaths(folder: Path) -> list[str]:
    return [event["cause"] for event in events(folder, "tiny") if event["event"] == "death"]
