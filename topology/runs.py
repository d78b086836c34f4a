"""The run folder `runs/NAME/`: where everything of one run lies, and what can be learnt from it without a cluster.

Files are replaced atomically, so a reader never sees half of one. The folder works after the run as well as during it.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from topology.config import RUN_NAME, RUN_NAME_IN_WORDS, ConfigError

log = logging.getLogger("tandem")
ENDED = ("done", "failed", "stopped")
RUNS = "TANDEM_RUNS"  # the variable that names the folder of all run folders; without it `runs`, here
JOB_CODE = "working_dir_files"  # the folder into which Ray unpacks the code that a job brought
HUNG = 30.0  # seconds without an answer after which the supervisor of a run that runs is killed: Ray starts another
SILENCE = 120.0  # seconds without a status after which a supervisor is taken for dead
LINE_BYTES = 4096  # more than a metrics object takes


class RunError(RuntimeError):
    """The run could not be started or reached (exit code 3)."""


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    config = property(lambda self: self.path / "config.yaml")
    buffer_state = property(lambda self: self.path / "buffer.json")
    status_file = property(lambda self: self.path / "status.json")
    metrics = property(lambda self: self.path / "metrics.jsonl")
    events = property(lambda self: self.path / "events.jsonl")
    checkpoints = property(lambda self: self.path / "checkpoints")
    collected = property(lambda self: self.path / "collected")
    rows = property(lambda self: self.path / "rows")
    logs = property(lambda self: self.path / "logs")
    cluster_file = property(lambda self: self.path / "cluster.json")
    token_file = property(lambda self: self.path / "token")

    def create(self) -> None:
        for folder in (self.path, self.checkpoints, self.rows, self.logs):
            folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def being_resumed(self) -> Iterator[None]:
        """Raises ConfigError while another process does so too: two supervisors would write over each other."""
        folder = os.open(self.path, os.O_RDONLY)  # the lock is on the folder itself: a refused resume leaves no file
        try:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)  # goes with this process
            except BlockingIOError:
                raise ConfigError(f"run {self.name} is being resumed by another process: wait for it") from None
            except OSError as error:  # a file system without locks
                log.warning("%s cannot be locked: %s", self.path, error)
            yield
        finally:
            os.close(folder)

    def require_here(self) -> None:
        """Raise RunError on a node that does not see the folder: who writes checkpoints there would find out too late."""
        if not self.config.exists():
            raise RunError(
                f"node {socket.gethostname()} does not see the run folder {self.path}, into which it is to write checkpoints: "
                f"start the run in a folder that all nodes share, or name one in {RUNS}"
            )

    def write_token(self) -> None:
        """A token of its own for the run's own cluster: only who can read the run folder can join or steer it."""
        descriptor = os.open(self.token_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))

    def status(self) -> dict[str, Any]:
        """The last status the supervisor wrote; a run whose cluster is gone without a last word is `failed`."""
        status = read_json(self.status_file, ("name", "state", "step"))
        if status is None:
            status = {"name": self.name, "state": "starting", "cause": None, "step": 0, "folder": str(self.path)}
        alive = self.cluster_alive() and not self._silent(status)
        if status["state"] not in ENDED and not alive and not _being_started(status):
            status |= {
                "state": "failed",
                "cause": status.get("cause") or "the run's cluster is gone without a last word",
            }
        return status

    def write_starting(self, status: dict[str, Any]) -> None:
        """The status until the supervisor writes its own: as good as the process that starts the run, which is this."""
        write_json(self.status_file, {**status, "starter": this_process()})

    def cluster(self) -> dict[str, Any] | None:
        """Address of the run's Ray cluster, and process id and start time of its `keeper`: None in one it joined."""
        return read_json(self.cluster_file, ("address", "keeper"))

    def cluster_alive(self) -> bool:
        """False once the process that keeps the run's own cluster is gone; a joined cluster counts as alive."""
        cluster = self.cluster()
        if cluster is None:
            return False
        return cluster["keeper"] is None or process_alive(cluster["keeper"], cluster["keeper_started"])

    def _silent(self, status: dict[str, Any]) -> bool:
        """In a joined cluster there is no keeper that would notice the death of the supervisor."""
        cluster = self.cluster()
        joined = cluster is not None and cluster["keeper"] is None
        return joined and time.time() - status.get("time", time.time()) > SILENCE

    def tail(self, file: Path, count: int) -> list[dict[str, Any]]:
        """The last `count` objects of a .jsonl file; a half-written last line is left out."""
        if not file.exists():
            return []
        with file.open("rb") as stream:  # asked for twice a second: not the whole of a long run's file
            start = max(0, stream.seek(0, os.SEEK_END) - count * LINE_BYTES)
            stream.seek(start)
            lines = stream.read().splitlines()
        whole = lines[1:] if start else lines  # the first may have been cut
        return list(_objects(whole[-count:]))


def runs_root() -> Path:
    return Path(os.environ.get(RUNS) or "runs")


def run_folder(name: str, root: Path | None = None) -> RunFolder:
    """The folder of a run by name, or by path (`runs/NAME`). Raises ConfigError for a name that could leave the root."""
    base = root if root is not None else runs_root()
    if os.sep in name:
        base, name = Path(name).parent, Path(name.rstrip(os.sep)).name
    if not re.fullmatch(RUN_NAME, name):
        raise ConfigError(f"run name {name!r}: use {RUN_NAME_IN_WORDS}")
    return RunFolder((base / name).resolve())


def existing_run(name: str, root: Path | None = None) -> RunFolder:
    folder = run_folder(name, root)
    if not folder.config.exists():
        known = ", ".join(sorted(run.name for run in all_runs(folder.path.parent))) or "none"
        raise ConfigError(
            f"no run `{folder.name}` in {folder.path.parent} (runs there: {known}): give a run's name, or its folder"
        )
    return folder


def all_runs(root: Path | None = None) -> Iterator[RunFolder]:
    for path in sorted((root if root is not None else runs_root()).glob("*/config.yaml")):
        yield RunFolder(path.parent.resolve())


def read_json(file: Path, keys: Iterable[str] = ()) -> Any | None:
    """What is in the file; None if there is none. Raises RunError if that cannot be read or is no object with these keys."""
    try:
        value = json.loads(file.read_text())
    except FileNotFoundError:
        return None
    except OSError as error:  # a folder in its place, or somebody else's file
        raise RunError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise RunError(f"{file} is broken: {error}") from None
    if not isinstance(value, dict):
        raise RunError(f"{file} is broken: an object is expected, found {type(value).__name__}")
    if missing := [key for key in keys if key not in value]:
        raise RunError(f"{file} is broken: it has no {', '.join(missing)}")
    return value


def write_json(file: Path, value: Any, indent: int | None = 1) -> None:
    write_text(file, json.dumps(value, indent=indent, default=str))


def write_text(file: Path, text: str) -> None:
    """The old text or the new one, never half of it."""
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(file)


def _objects(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Of those that hold one: a line may be half-written, or damaged."""
    for line in lines:
        with suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict):
                yield value


def _being_started(status: dict[str, Any]) -> bool:
    starter = status.get("starter")
    return starter is not None and process_alive(starter["pid"], starter["started"])


def this_process() -> dict[str, Any]:
    """What `process_alive` knows it by."""
    me = psutil.Process()
    return {"pid": me.pid, "started": me.create_time()}


def process_alive(pid: int, started: float) -> bool:
    """True if `pid` is still the process that was started at `started` (pids are used again)."""
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - started) < 2.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for_file(file: Path, timeout: float, alive: Any, what: str) -> Any:
    """The JSON object in `file` as soon as it is there. Raises TimeoutError, or RuntimeError once `alive()` is false."""
    deadline = time.monotonic() + timeout
    while (value := read_json(file)) is None:
        if not alive():
            raise RuntimeError(f"{what} ended before it was ready")
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} was not ready within {timeout:.0f} s")
        time.sleep(0.05)
    return value
