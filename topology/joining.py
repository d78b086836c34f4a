"""Which Ray cluster a run is on; joining one for a few calls, and leaving it again.

Guarantees: one process may join the clusters of several runs one after another, each with its own token; the environment
is afterwards what it was; a cluster that cannot be reached, or fails meanwhile, is a `RunError` with its address.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from topology.checks import unread_sizes
from topology.config import ConfigError, RunConfig
from topology.interrupts import kept_sigterm
from topology.keeper import cluster_environment
from topology.runs import RunError, RunFolder

HOST_AND_PORT = r"[^/]+:\d+"
CONNECT = 60.0  # seconds to reach a cluster, and for one call to a supervisor
KNOCK = 5.0  # seconds a head has to accept a connection
OWN = "local"  # how Ray's own tools write it


def cluster_address(config: RunConfig) -> str | None:
    """host:port of the cluster that a run joins, None if it starts its own. Raises ConfigError.

    RAY_ADDRESS counts where the config names none, as in every program on Ray; Ray sets it for the command of a job.
    """
    key, address = "cluster.address", config.cluster.address
    if address is None:
        key, address = "RAY_ADDRESS", os.environ.get("RAY_ADDRESS", OWN)
        if address in ("", OWN):
            return None
    if re.fullmatch(HOST_AND_PORT, address) is None:
        raise ConfigError(
            f"{key}: {address!r} is not the address of a cluster: give host:port of its head, as `ray start --head` prints "
            f"it, or {'unset it' if key == 'RAY_ADDRESS' else 'leave it out'}, and the run starts a cluster of its own"
        )
    for problem in unread_sizes(config, f"{key} is {address}"):
        raise ConfigError(problem)
    return address


@contextmanager
def connected(folder: RunFolder | None, address: str, own: bool) -> Iterator[Any]:
    """Join a cluster for a few calls. With `own`, with the run's token; else with the user's own Ray settings."""
    _knock(address)
    with _environment(cluster_environment(folder) if own and folder is not None else {}):
        import ray
        from ray._raylet import AuthenticationTokenLoader

        AuthenticationTokenLoader.instance().reset_cache()  # a process may join one run after another, each with its token
        try:
            with kept_sigterm():  # Ray takes it when it joins, and resets it when it leaves
                ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
        except ConnectionError as error:
            raise RunError(
                f"cannot reach the cluster at {address} (is it up, and is its token set?): {error}"
            ) from None
        try:
            yield ray
        except ray.exceptions.RayError as error:
            raise RunError(f"the cluster at {address} failed: {_first_line(error)}") from error
        finally:
            with kept_sigterm():
                ray.shutdown()


def _knock(address: str) -> None:
    """Raise RunError if nobody listens there: Ray would go on trying for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK).close()
    except (OSError, OverflowError) as error:  # the latter for a port above 65535
        raise RunError(f"nobody answers at {address}, the address of the run's cluster: {error}") from None


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set while the block runs; what it sees is gone afterwards, and what was there is back."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
