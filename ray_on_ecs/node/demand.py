"""GPUs and CPUs that the cluster has and needs, read from Ray; the stack scales GPU and CPU workers by them.

GPU workers are counted in GPUs and CPU workers in CPUs: the head offers neither, a GPU worker both, and a CPU worker
only CPUs.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ray_on_ecs.node import api

if TYPE_CHECKING:
    from ray.autoscaler.v2.schema import NodeInfo, ResourceDemand

TIMEOUT_SECONDS = 10  # the next minute asks again
# Key of the time at which the head has released the idle nodes, in Ray's key-value store, and how long that holds.
RELEASED, RELEASED_SECONDS = b"ray-on-ecs:released", 120.0
# Ray counts in ten-thousandths; a smaller remainder is a rounding error of a sum.
DIGITS = 4
# Resources by their names in Ray.
Resources = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Need:
    """Demand for one kind of worker: GPUs or CPUs that programs need and that there are, and its nodes.

    `idle_seconds` has an entry for each node that is not in use.
    """

    requested: int
    available: float
    in_use: int
    idle_seconds: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Resources of the cluster and the demand for them, as numbers of GPUs or CPUs.

    Used are those that run work, or that a placement group reserves. Pending tasks, actors and placement groups wait
    for others; CPUs count as waiting or requested only in bundles without a GPU. Requested are those of
    `ray.autoscaler.sdk.request_resources`, independent of pending work: Ray Data uses it to double the resources of a
    busy pipeline.
    """

    gpus: float = 0
    gpus_used: float = 0
    gpus_waiting: float = 0
    gpus_requested: float = 0
    worker_cpus_used: float = 0
    cpu_worker_cpus: float = 0
    cpu_worker_cpus_used: float = 0
    workers_in_use: int = 0
    cpu_workers_in_use: int = 0
    cpus_waiting: float = 0
    cpus_requested: float = 0
    workers_idle: tuple[float, ...] = ()  # seconds, one for each node that is not in use
    cpu_workers_idle: tuple[float, ...] = ()
    has_cpu_workers: bool = False  # the stack can have some

    @property
    def gpus_needed(self) -> int:
        """Desired number of GPUs.

        Without CPU workers in the stack, pending work that needs only CPUs counts as one GPU if the cluster has none.
        """
        for_cpus = float(self.cpus_waiting > 0 and not self.gpus and not self.has_cpu_workers)
        return _needed(self.gpus_in_use, self.gpus_waiting or for_cpus, self.gpus_requested)

    @property
    def gpus_in_use(self) -> float:
        """Number of used GPUs; workers with only CPUs in use count as one."""
        return self.gpus_used or float(self.worker_cpus_used > 0)

    @property
    def cpu_worker_cpus_needed(self) -> int:
        """Desired number of CPUs of the CPU workers."""
        return _needed(self.cpu_worker_cpus_used, self.cpus_waiting, self.cpus_requested)

    @property
    def of_workers(self) -> Need:
        """Demand for GPU workers."""
        return Need(
            requested=self.gpus_needed,
            available=self.gpus,
            in_use=self.workers_in_use,
            idle_seconds=self.workers_idle,
        )

    @property
    def of_cpu_workers(self) -> Need:
        """Demand for CPU workers."""
        return Need(
            requested=self.cpu_worker_cpus_needed,
            available=self.cpu_worker_cpus,
            in_use=self.cpu_workers_in_use,
            idle_seconds=self.cpu_workers_idle,
        )


def read(gcs_address: str, *, has_cpu_workers: bool) -> Demand:
    """Read the current demand from the GCS at `host:port`; any of Ray's errors if it doesn't answer in a minute."""
    # Not at the top: the import takes seconds and would delay `ray start`.
    from ray._private.ray_constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL
    from ray.autoscaler.v2 import sdk

    # Without an autoscaler, request_resources leaves its bundles under this key, and the status doesn't show them.
    client = sdk.GcsClient(gcs_address)
    stored_request = client.internal_kv_get(AUTOSCALER_RESOURCE_REQUEST_CHANNEL, timeout=TIMEOUT_SECONDS)
    status = sdk.get_cluster_status(gcs_address, timeout=TIMEOUT_SECONDS)
    demands = status.resource_demands
    waiting = _bundles([*demands.ray_task_actor_demand, *demands.placement_group_demand])
    requested = [*json.loads(stored_request or "[]"), *_bundles(demands.cluster_constraint_demand)]
    nodes = [*status.active_nodes, *status.idle_nodes]
    workers = [node for node in nodes if node.total_resources().get("GPU")]
    cpu_workers = [node for node in nodes if not node.total_resources().get("GPU")]
    return Demand(
        gpus=_sum("GPU", [node.total_resources() for node in workers]),
        gpus_used=_sum("GPU", [node.used_resources() for node in workers]),
        gpus_waiting=_sum("GPU", waiting),
        gpus_requested=_sum("GPU", requested),
        worker_cpus_used=_sum("CPU", [node.used_resources() for node in workers]),
        cpu_worker_cpus=_sum("CPU", [node.total_resources() for node in cpu_workers]),
        cpu_worker_cpus_used=_sum("CPU", [node.used_resources() for node in cpu_workers]),
        workers_in_use=sum(map(_is_used, workers)),
        cpu_workers_in_use=sum(map(_is_used, cpu_workers)),
        workers_idle=_idle_seconds(workers),
        cpu_workers_idle=_idle_seconds(cpu_workers),
        cpus_waiting=_sum("CPU", [bundle for bundle in waiting if not bundle.get("GPU")]),
        cpus_requested=_sum("CPU", [bundle for bundle in requested if not bundle.get("GPU")]),
        has_cpu_workers=has_cpu_workers,
    )


def node_in_use(gcs_address: str, ip_address: str) -> bool | None:
    """Return True if a CPU or GPU of the node with this address is used, or reserved by a placement group.

    Return None if it is idle, and the head has released the idle nodes.
    """
    api.check_gcs(gcs_address)  # a GCS client would wait for an unresponsive GCS and fill the log meanwhile
    from ray.autoscaler.v2 import sdk

    status = sdk.get_cluster_status(gcs_address, timeout=TIMEOUT_SECONDS)
    nodes = [*status.active_nodes, *status.idle_nodes]
    if any(_is_used(node) for node in nodes if node.ip_address == ip_address):
        return True
    released = sdk.GcsClient(gcs_address).internal_kv_get(RELEASED, timeout=TIMEOUT_SECONDS)
    return None if released and 0 <= time.time() - float(released) < RELEASED_SECONDS else False


def release_idle(gcs_address: str) -> None:
    """Tell the nodes that are idle now to release their tasks: the run that used them stops them, and no other runs."""
    from ray.autoscaler.v2 import sdk

    now = str(time.time()).encode()
    sdk.GcsClient(gcs_address).internal_kv_put(RELEASED, now, True, timeout=TIMEOUT_SECONDS)


def _is_used(node: NodeInfo) -> bool:
    used = node.used_resources()
    return any(round(used.get(name, 0), DIGITS) > 0 for name in ("CPU", "GPU"))


def _idle_seconds(nodes: Iterable[NodeInfo]) -> tuple[float, ...]:
    idle = [node.resource_usage for node in nodes if not _is_used(node)]
    return tuple(usage.idle_time_ms / 1000 if usage else 0.0 for usage in idle)


def _needed(used: float, waiting: float, requested: float) -> int:
    """Return the desired number of GPUs or CPUs of a kind of node."""
    return math.ceil(round(max(used + waiting, requested), DIGITS))


def _bundles(demands: Iterable[ResourceDemand]) -> list[Resources]:
    """Return the demanded resources, with the sum of all bundles of one shape."""
    bundles: list[Resources] = []
    for demand in demands:
        for shape in demand.bundles_by_count:
            bundles.append({name: amount * shape.count for name, amount in shape.bundle.items()})
    return bundles


def _sum(name: str, resources: Iterable[Resources]) -> float:
    return sum(amounts.get(name, 0) for amounts in resources)
