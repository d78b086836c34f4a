"""The command `tandem` as a user gives it: in a folder of its own, with what it printed, left and started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

TANDEM = str(Path(sys.executable).with_name("tandem"))
TINY = str(Path(__file__).resolve().parents[1] / "configs/tiny.yaml")


def data(folder: Path, name: str, *lines: Any) -> str:
    """A file of prompts as a setting; a line that is text is written as it is."""
    file = folder / f"{name}.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return f"prompts={{type: file, path: {file.name}, shuffle: false}}"


def function(path: str, **settings: Any) -> str:
    """One reward function as a setting."""
    return "makers.reward.functions=" + json.dumps([{"path": path, **settings}])


def tandem(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([TANDEM, *args], cwd=folder, capture_output=True, text=True, timeout=240, check=False)


class Command:
    """A `tandem` command that goes on meanwhile; it is killed when the block is left."""

    def __init__(self, folder: Path, *args: str, prefix: list[str] | None = None) -> None:
        self._process = subprocess.Popen(
            [*(prefix or []), TANDEM, *args],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=_heed_ctrl_c,  # noqa: PLW1509
        )

    def __enter__(self) -> subprocess.Popen[str]:
        return self._process

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait(timeout=10)


def _heed_ctrl_c() -> None:
    """It is ignored in a background job, and so in all that one starts: these tests may be one."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def status(folder: Path, name: str) -> dict[str, Any]:
    return json.loads(tandem(folder, "status", name, "--json").stdout)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    return lines(folder / "runs" / name / "events.jsonl")


def wait_for(condition: Callable[[], Any], timeout: float, what: str) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {timeout:g} s"
        time.sleep(0.5)


def processes_of(folder: Path) -> list[psutil.Process]:
    """Every process of a run below `folder`: its keeper, its cluster, its actors and what they started."""
    found = []
    for process in psutil.process_iter():
        try:
            of_cluster = process.environ().get("RAY_AUTH_TOKEN_PATH", "").startswith(str(folder))
            of_keeper = "topology.keeper" in process.cmdline() and any(
                str(folder) in part for part in process.cmdline()
            )
        except psutil.Error:
            continue
        if of_cluster or of_keeper:
            found.append(process)
    return found


def assert_nothing_left(run: Path) -> None:
    deadline = time.monotonic() + 30
    while (left := processes_of(run)) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not left, [process.cmdline() for process in left]


class SmallDisk:
    """A mount namespace in which `folder/runs` is a disk of its own."""

    def __init__(self, folder: Path, mebibytes: int) -> None:
        self.runs = folder / "runs"
        self.runs.mkdir()
        namespaces = ["--mount"] if os.geteuid() == 0 else ["--mount", "--user", "--map-root-user"]
        script = 'mount -t tmpfs -o "size=$1m" tandem-test "$2" && echo mounted && exec sleep 600'
        command = ["unshare", *namespaces, "sh", "-c", script, "sh", str(mebibytes), str(self.runs)]
        try:
            self._holder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        except FileNotFoundError:
            pytest.skip("no `unshare` here to make a small disk with")
        assert self._holder.stdout is not None
        answer = self._holder.stdout.readline()
        if answer != "mounted\n":
            self._holder.wait(timeout=10)
            pytest.skip(f"no small disk can be mounted here: {answer.strip()}")
        enter = ["--mount"] if os.geteuid() == 0 else ["--mount", "--user", "--preserve-credentials"]
        go = ["sh", "-c", 'cd "$0" && exec "$@"', str(folder)]  # in there: nsenter's own --wd stays outside
        self._enter = ["nsenter", f"--target={self._holder.pid}", *enter, *go]

    def command(self, *args: str) -> list[str]:
        return [*self._enter, *args]

    def fill(self, mebibytes: int) -> None:
        """Take so much of it, until `free`."""
        self.path("filler").write_bytes(bytes(mebibytes << 20))

    def free(self) -> None:
        self.path("filler").unlink()

    def path(self, name: str) -> Path:
        """`folder/runs/name` as seen from outside."""
        return Path(f"/proc/{self._holder.pid}/root{self.runs}/{name}")

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait(timeout=10)
