"""The process that keeps a run's own Ray cluster: `python -m topology.keeper RUN_FOLDER --cpus 4 ...`.

A cluster started inside the command would die with it. This process outlives the command, and guarantees that the
cluster does not outlive the run: it ends the cluster (and every process below it, by id) when the run has ended, when
the supervisor has been silent for `SILENCE` seconds, or when it is told to (SIGTERM). When the keeper is killed itself,
the kernel ends the head process with it.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from topology.runs import ENDED, SILENCE, RunFolder, read_json, write_json

GRACE = 2.0  # seconds between the run's last word and the end of its cluster: readers of actors finish
HEAD_START = 120.0  # seconds a cluster may take to start; Ray gives up after 30 s, a busy machine needs another try
ADDRESS = "ray_current_cluster"  # the file in which `ray start` leaves it
PR_SET_PDEATHSIG = 1


def start_keeper(folder: RunFolder, *, cpus: int, gpus: int | None, object_store_bytes: int) -> subprocess.Popen[bytes]:
    """Start the keeper in a session of its own, so that it neither gets the command's Ctrl-C nor ends with it."""
    command = [sys.executable, "-m", "topology.keeper", str(folder.path), f"--cpus={cpus}"]
    command += [f"--object-store-bytes={object_store_bytes}"] + ([] if gpus is None else [f"--gpus={gpus}"])
    log = (folder.logs / "cluster.log").open("ab")
    with log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


def end_keeper(keeper: subprocess.Popen[bytes]) -> None:
    """End it, and thereby the cluster, by id."""
    keeper.terminate()
    try:
        keeper.wait(timeout=60)
    except subprocess.TimeoutExpired:
        keeper.kill()  # the kernel ends the head
        keeper.wait(timeout=10)


def cluster_environment(folder: RunFolder) -> dict[str, str]:
    """Variables that every process of the run's cluster, and everyone who joins it, needs."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder.token_file),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # actors are ended by the supervisor, nothing is left to drain
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_DEDUP_LOGS": "0",
    }


class Keeper:
    def __init__(self, folder: RunFolder, cpus: int, gpus: int | None, object_store_bytes: int) -> None:
        self.folder = folder
        self.told_to_stop = threading.Event()
        self.started = time.time()
        # Unix socket paths may have 107 characters, and Ray adds about 60 of its own.
        self.temporary = Path(tempfile.mkdtemp(prefix="tandem-"))
        ray = Path(sys.executable).with_name("ray")
        self.command = [str(ray), "start", "--head", "--block", "--port=0", f"--temp-dir={self.temporary}"]
        self.command += [
            "--include-dashboard=false",
            "--node-ip-address=127.0.0.1",
            f"--num-cpus={cpus}",
            "--disable-usage-stats",
        ]
        self.command += [f"--object-store-memory={object_store_bytes}"] + (
            [] if gpus is None else [f"--num-gpus={gpus}"]
        )

    def run(self) -> None:
        signal.signal(signal.SIGTERM, lambda *_: self.told_to_stop.set())
        signal.signal(signal.SIGINT, lambda *_: self.told_to_stop.set())
        head = self._start_head()
        try:
            while (
                not self._announce(head) and time.time() - self.started < HEAD_START and not self.told_to_stop.is_set()
            ):
                end_cluster(head)
                head = self._start_head()
            cause = self._watch(head)
            if cause is not None:
                self._write_failure(cause)
        finally:
            end_cluster(head)
            shutil.rmtree(self.temporary, ignore_errors=True)

    def _start_head(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.command,
            env={**os.environ, **cluster_environment(self.folder)},
            stdin=subprocess.DEVNULL,
            preexec_fn=_die_with_parent,  # noqa: PLW1509  (this process has one thread)
        )

    def _announce(self, head: subprocess.Popen[bytes]) -> bool:
        """Write cluster.json once the head has told its address; false if it ends before, or is late."""
        address_file = self.temporary / ADDRESS
        while not (address_file.exists() and address_file.read_text().strip()):
            if time.time() - self.started > HEAD_START or head.poll() is not None or self.told_to_stop.wait(0.05):
                return False
        me = psutil.Process()
        write_json(
            self.folder.cluster_file,
            {"address": address_file.read_text().strip(), "keeper": me.pid, "keeper_started": me.create_time()},
        )
        return True

    def _watch(self, head: subprocess.Popen[bytes]) -> str | None:
        """Wait for the end of the run, of the head, or of the supervisor's patience; the cause if it is a failure."""
        since = time.time()
        while not self.told_to_stop.wait(0.5):
            status = read_json(self.folder.status_file)
            if status is not None and status["state"] in ENDED:
                time.sleep(GRACE)
                return None
            if head.poll() is not None:
                return f"the run's Ray cluster ended with exit code {head.returncode}: see logs/cluster.log"
            last = self.folder.status_file.stat().st_mtime if status is not None else since
            silent = time.time() - max(last, since)
            if silent > SILENCE:
                return f"the supervisor has been silent for {SILENCE:.0f} s: see logs/supervisor.log"
        return None

    def _write_failure(self, cause: str) -> None:
        status = read_json(self.folder.status_file) or {
            "name": self.folder.name,
            "step": 0,
            "folder": str(self.folder.path),
        }
        write_json(self.folder.status_file, {**status, "state": "failed", "cause": cause})


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def end_cluster(head: subprocess.Popen[bytes]) -> None:
    """End the head and everything below it, by id."""
    try:
        below = psutil.Process(head.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        below = []
    head.terminate()
    try:
        head.wait(timeout=10)
    except subprocess.TimeoutExpired:
        head.kill()
        head.wait(timeout=10)
    _, alive = psutil.wait_procs(below, timeout=3)
    for process in alive:
        process.kill()  # psutil refuses if the id has gone to another process
    psutil.wait_procs(alive, timeout=5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cpus", type=int, required=True)
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--object-store-bytes", type=int, required=True)
    options = parser.parse_args()
    Keeper(RunFolder(options.folder), options.cpus, options.gpus, options.object_store_bytes).run()


if __name__ == "__main__":
    main()
