"""A cluster of several nodes on this machine: one raylet each, with an address and with CPUs and GPUs of its own choice."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

MIB = 1 << 20
ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
}


@dataclass(frozen=True)
class SimulatedCluster:
    address: str
    raylets: Mapping[str, int]  # process ids by the node's address: who kills one has killed the node


@contextmanager
def simulated_cluster(nodes: Mapping[str, Mapping[str, Any]]) -> Iterator[SimulatedCluster]:
    """`nodes`: by address in 127/8 (not 127.0.0.1), what each offers. Ends its processes by id.

    Whoever joins it meanwhile finds the right settings in the environment.
    """
    from ray.cluster_utils import Cluster

    temporary = tempfile.mkdtemp(prefix="tandem-")  # short: paths of Unix sockets may have 107 characters
    head, *others = nodes
    with mock.patch.dict(os.environ, ENVIRONMENT):
        cluster = Cluster(
            initialize_head=True,
            head_node_args={
                **_node(head, nodes[head]),
                "include_dashboard": False,
                "temp_dir": temporary,
            },
        )
        try:
            for address in others:
                cluster.add_node(wait=False, **_node(address, nodes[address]))
            cluster.wait_for_nodes(timeout=60)
            yield SimulatedCluster(
                cluster.address, {node.node_ip_address: _raylet(node) for node in cluster.list_all_nodes()}
            )
        finally:
            cluster.shutdown()
            shutil.rmtree(temporary, ignore_errors=True)


def _raylet(node: Any) -> int:
    """Its process id. Waited for from now on: the workers of a killed raylet live on until somebody has reaped it."""
    process = node.all_processes["raylet"][0].process
    threading.Thread(target=process.wait, daemon=True).start()
    return process.pid


def _node(address: str, offers: Mapping[str, Any]) -> dict[str, Any]:
    return {"node_ip_address": address, "object_store_memory": 96 * MIB, **offers}
