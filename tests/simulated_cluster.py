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
}


@contextmanager
def simulated_cluster(nodes: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """`nodes`: by address in 127/8 (not 127.0.0.1), what each offers. Gives the cluster's address; ends its processes by id.

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
            yield cluster.address
        finally:
            cluster.shutdown()
            shutil.rmtree(temporary, ignore_errors=True)


def _node(address: str, offers: Mapping[str, Any]) -> dict[str, Any]:
    return {"node_ip_address": address, "object_store_memory": 96 * MIB, **offers}
