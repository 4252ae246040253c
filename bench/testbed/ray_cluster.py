"""A real Ray cluster on this machine, with nodes of unlike resources, on loopback only."""

from __future__ import annotations

import importlib.util
import os
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

HOST = "127.0.0.2"  # loopback; Ray replaces 127.0.0.1 by an address for other hosts
VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_worker_niceness": "0",  # 15 by default, which other work on this machine would slow down
}


def missing() -> str:
    """Why there can be no Ray here; empty if there can."""
    if importlib.util.find_spec("ray") is None:
        return 'needs: pip install "evenstep[ray]"'
    return ""


class RayCluster:
    """A head without CPUs, and nodes to add and to remove; processes on them get `env`."""

    def __init__(self, folder: str, env: Mapping[str, str]) -> None:
        os.environ.update({**env, **VARIABLES})
        from ray._private.utils import get_ray_address_file
        from ray.cluster_utils import Cluster

        # Ray notes the newest cluster there, also of one with a folder of its own.
        Path(get_ray_address_file(None)).parent.mkdir(parents=True, exist_ok=True)
        self._cluster: Any = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "include_dashboard": False,
                "node_ip_address": HOST,
                "temp_dir": folder,
            },
        )
        self.address: str = self._cluster.address

    def add(self, *, wait: bool = True, **resources: Any) -> Any:
        """Another node: num_cpus, num_gpus, resources, labels."""
        return self._cluster.add_node(wait=wait, node_ip_address=HOST, **resources)

    def remove(self, node: Any) -> None:
        """A node is lost: nothing on it is told."""
        self._cluster.remove_node(node, allow_graceful=False)

    def drain(self, node: Any, deadline_s: float) -> None:
        """The cloud says that it takes a node away."""
        from ray.core.generated import autoscaler_pb2

        at_ms = int((datetime.now(UTC).timestamp() + deadline_s) * 1000)
        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        client = import_module("ray._raylet").GcsClient(address=self.address)
        accepted, why = client.drain_node(node.node_id, reason, "the cloud takes it", at_ms)
        assert accepted, why

    def head_process(self) -> psutil.Process:
        """The process that knows of nodes and actors."""
        (found,) = self._cluster.head_node.all_processes["gcs_server"]
        return psutil.Process(found.process.pid)

    def close(self) -> None:
        with suppress(psutil.Error):
            self.head_process().send_signal(signal.SIGCONT)
        self._cluster.shutdown()


@contextmanager
def ray_cluster(env: Mapping[str, str]) -> Iterator[RayCluster]:
    """A cluster; nothing of it is left afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder,  # sockets: short paths
        patch.dict(os.environ),
    ):
        cluster = RayCluster(folder, env)
        try:
            yield cluster
        finally:
            cluster.close()
            _kill_left(Path(folder))


def _kill_left(folder: Path) -> None:
    """Ray's processes name the folder of their session."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(str(folder) in part for part in process.cmdline()):
                process.kill()
