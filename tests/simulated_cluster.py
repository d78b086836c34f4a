"""A cluster of several nodes on this machine: one raylet each, with an address and with CPUs and GPUs of its own choice."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

MIB = 1 << 20
ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    # A node is taken for lost after about 3 s of silence, not after Ray's 15 s: see docs/cluster.md.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_initial_delay_ms": "1000",
}


class SimulatedCluster:
    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._nodes: dict[str, Any] = {}
        self.address: str = cluster.address

    def add(self, address: str, offers: Mapping[str, Any]) -> None:
        self._nodes[address] = self._cluster.add_node(wait=False, **_node(address, offers))

    def node_id(self, address: str) -> str:
        node_id: str = self._nodes[address].node_id
        return node_id

    def raylet(self, address: str) -> int:
        """Its process id: who kills it has killed the node, once it is reaped."""
        pid: int = self._nodes[address].all_processes["raylet"][0].process.pid
        return pid

    def lose(self, address: str) -> None:
        """The node goes without a word, and all of its processes with it."""
        raylet = self._nodes.pop(address).all_processes["raylet"][0].process
        raylet.kill()
        raylet.wait(timeout=10)  # its workers end only once it is reaped


@contextmanager
def simulated_cluster(nodes: Mapping[str, Mapping[str, Any]]) -> Iterator[SimulatedCluster]:
    """`nodes`: by address in 127/8 (not 127.0.0.1), what each offers, the head first. Ends its processes by id.

    Whoever joins it meanwhile finds the right settings in the environment.
    """
    from ray.cluster_utils import Cluster

    temporary = tempfile.mkdtemp(prefix="tandem-")  # short: paths of Unix sockets may have 107 characters
    head, *others = nodes
    # Ray's Cluster writes its address below the default folder too, which nobody has made on a fresh machine.
    os.mkdir(os.path.join(temporary, "ray"))
    with mock.patch.dict(os.environ, {**ENVIRONMENT, "RAY_TMPDIR": temporary}):
        cluster = Cluster(
            initialize_head=True,
            head_node_args={
                **_node(head, nodes[head]),
                "include_dashboard": False,
                "temp_dir": temporary,
            },
        )
        try:
            simulated = SimulatedCluster(cluster)
            for address in others:
                simulated.add(address, nodes[address])
            cluster.wait_for_nodes(timeout=60)
            yield simulated
        finally:
            cluster.shutdown()
            shutil.rmtree(temporary, ignore_errors=True)


def _node(address: str, offers: Mapping[str, Any]) -> dict[str, Any]:
    return {"node_ip_address": address, "object_store_memory": 96 * MIB, **offers}
