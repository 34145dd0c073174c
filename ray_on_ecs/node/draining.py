"""Drain of this node by Ray: it gets no new work, and those who use it learn when it ends."""

from __future__ import annotations

from ray_on_ecs.node import api

TIMEOUT_SECONDS = 10


class Draining:
    """Drain of the node with this address, at the GCS at `host:port`."""

    def __init__(self, gcs_address: str, ip_address: str) -> None:
        self._gcs_address, self._ip_address = gcs_address, ip_address
        self._node_id = ""

    def drain(self, deadline: float, reason: str) -> None:
        """Drain the node until a deadline (Unix time), which a later call replaces; OSError if it has not joined."""
        api.check_gcs(self._gcs_address)  # a GCS client would wait for an unresponsive GCS and fill the log meanwhile
        # Not at the top: the import takes seconds and would delay `ray start`.
        from ray.autoscaler.v2 import sdk
        from ray.core.generated.autoscaler_pb2 import DRAIN_NODE_REASON_PREEMPTION  # ty: ignore[missing-module-member]

        if not self._node_id:
            status = sdk.get_cluster_status(self._gcs_address, timeout=TIMEOUT_SECONDS)
            nodes = [*status.active_nodes, *status.idle_nodes]
            self._node_id = next((node.node_id or "" for node in nodes if node.ip_address == self._ip_address), "")
        if not self._node_id:
            raise OSError("this node has not joined the cluster")
        is_accepted, refusal = sdk.GcsClient(self._gcs_address).drain_node(
            self._node_id, DRAIN_NODE_REASON_PREEMPTION, reason, int(deadline * 1000), timeout=TIMEOUT_SECONDS
        )
        if not is_accepted:
            raise OSError(f"Ray refuses: {refusal}")
