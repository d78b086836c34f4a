"""A Ray cluster of two nodes with a job server on this machine, as `ray start` makes it; ended by id."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.command_line import wait_for
from topology.keeper import end_cluster

BIN = Path(sys.executable).parent
START = (
    str(BIN / "ray"),
    "start",
    "--block",
    "--num-gpus=0",
    "--object-store-memory=100000000",
    "--disable-usage-stats",
)
# Its default is one port for all clusters of a machine, and jobs need the agent.
AGENT = "--dashboard-agent-listen-port=0"


@dataclass(frozen=True)
class JobCluster:
    address: str  # host:port
    environment: dict[str, str]  # of everyone who talks to it
    runs: Path  # TANDEM_RUNS of every node
    second: Path  # temporary folder of the second node, below which it unpacks the code of jobs

    def ray(self, folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
        """A `ray` command, given in `folder`; its output and errors are in stdout."""
        return subprocess.run(
            [str(BIN / "ray"), *args],
            cwd=folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
            check=False,
        )


@contextmanager
def job_cluster() -> Iterator[JobCluster]:
    """The first node has 4 CPUs, the second 1 and a resource of its own, `second`."""
    temporary = Path(tempfile.mkdtemp(prefix="tandem-"))  # short: paths of Unix sockets may have 107 characters
    first, second, runs = (temporary / name for name in ("first", "second", "runs"))
    (temporary / "token").write_text(secrets.token_hex(32))
    server = f"http://127.0.0.1:{_free_port()}"
    environment = {
        **{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(temporary / "token"),
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_API_SERVER_ADDRESS": server,
        "TANDEM_RUNS": str(runs),
    }
    head = ["--head", "--port=0", "--num-cpus=4", f"--temp-dir={first}", "--include-dashboard=true"]
    head += ["--dashboard-host=127.0.0.1", f"--dashboard-port={server.rpartition(':')[2]}"]
    with ExitStack() as ends:
        ends.callback(shutil.rmtree, temporary, ignore_errors=True)
        ends.enter_context(node(temporary / "first.log", environment, *head))
        file = first / "ray_current_cluster"
        wait_for(lambda: file.exists() and file.read_text(), 90, "the address of the head")
        address = file.read_text().strip()
        place = ("--num-cpus=1", '--resources={"second": 1}', f"--temp-dir={second}")
        ends.enter_context(node(temporary / "second.log", environment, f"--address={address}", *place))
        wait_for(lambda: _nodes(environment, server) == 2, 90, "the job server and both nodes")
        yield JobCluster(address, environment, runs, second)


@contextmanager
def node(log: Path, environment: dict[str, str], *args: str) -> Iterator[None]:
    with log.open("wb") as output:
        node = subprocess.Popen(
            [*START, AGENT, *args],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield
    finally:
        end_cluster(node)


def _nodes(environment: dict[str, str], server: str) -> int:
    """How many nodes the job server knows; 0 while it does not answer."""
    token = Path(environment["RAY_AUTH_TOKEN_PATH"]).read_text()
    request = urllib.request.Request(f"{server}/api/v0/nodes", headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            found = json.load(answer)["data"]["result"]["result"]
    except (urllib.error.URLError, TimeoutError):
        return 0
    return sum(node["state"] == "ALIVE" for node in found)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
