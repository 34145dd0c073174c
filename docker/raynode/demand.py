"""The GPUs that the cluster has and needs, read from Ray; the stack scales its workers by them.

Everything is counted in GPUs: the head offers neither CPUs nor GPUs, and each worker offers both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray.autoscaler.v2.schema import ResourceDemand

TIMEOUT_SECONDS = 10


@dataclass(frozen=True, kw_only=True)
class GpuDemand:
    """The resources of the cluster and the demand for them, each a number of GPUs or CPUs.

    Attributes:
        gpus: GPUs of all nodes.
        gpus_used: GPUs that run work, or that a placement group reserves.
        cpus_used: CPUs that run work, or that a placement group reserves.
        gpus_waiting: GPUs of all pending tasks, actors and placement groups.
        cpus_waiting: CPUs of all pending tasks, actors and placement groups.
        gpus_requested: GPUs that a program requests whatever is pending: `ray.autoscaler.sdk.request_resources`.
    """

    gpus: float = 0
    gpus_used: float = 0
    cpus_used: float = 0
    gpus_waiting: float = 0
    cpus_waiting: float = 0
    gpus_requested: float = 0

    @property
    def gpus_needed(self) -> int:
        """The number of GPUs that the cluster should have.

        ECS can't be told which worker to stop. So while any CPU or GPU is in use no worker may be stopped, because it
        could be the one that works; all idle workers may be stopped when nothing is in use. Work that waits for CPUs
        alone needs a worker if there is none, and then counts as one GPU.
        """
        waiting = self.gpus_waiting or float(self.cpus_waiting > 0 and not self.gpus)
        in_use = self.gpus_used > 0 or self.cpus_used > 0
        needed = max(self.gpus, self.gpus_used + waiting) if in_use else waiting
        # Ray counts in ten-thousandths; a smaller remainder is a rounding error of the sum.
        return math.ceil(round(max(needed, self.gpus_requested), 4))


def read(gcs_address: str) -> GpuDemand:
    """Read the present demand from the GCS at `gcs_address`, `host:port`.

    Raises:
        Exception: The GCS didn't answer within a minute; any of Ray's errors.
    """
    # Not at the top: the import takes seconds, by which it would delay `ray start`.
    from ray._private.ray_constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL
    from ray.autoscaler.v2 import sdk

    # Without an autoscaler, request_resources leaves its bundles under this key, and the status doesn't show them.
    requested = sdk.GcsClient(gcs_address).internal_kv_get(AUTOSCALER_RESOURCE_REQUEST_CHANNEL, timeout=TIMEOUT_SECONDS)
    status = sdk.get_cluster_status(gcs_address, timeout=TIMEOUT_SECONDS)
    demands = status.resource_demands
    usage = {each.resource_name: each for each in status.cluster_resource_usage}
    waiting = [*demands.ray_task_actor_demand, *demands.placement_group_demand]
    return GpuDemand(
        gpus=usage["GPU"].total if "GPU" in usage else 0,
        gpus_used=usage["GPU"].used if "GPU" in usage else 0,
        cpus_used=usage["CPU"].used if "CPU" in usage else 0,
        gpus_waiting=_sum("GPU", waiting),
        cpus_waiting=_sum("CPU", waiting),
        gpus_requested=max(
            _sum("GPU", demands.cluster_constraint_demand),
            sum(bundle.get("GPU", 0) for bundle in json.loads(requested or "[]")),
        ),
    )


def _sum(kind: str, demands: Iterable[ResourceDemand]) -> float:
    return sum(each.bundle.get(kind, 0) * each.count for demand in demands for each in demand.bundles_by_count)
