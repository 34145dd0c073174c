"""How many GPUs the cluster has and how many it needs, as Ray tells: what the stack's number of workers follows.

All is counted in GPUs. The head has neither CPUs nor GPUs, and a worker brings both.
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
class Demand:
    """What the cluster has, and what is asked of it.

    Attributes:
        gpus: Those of all nodes.
        gpus_used: Those that run work, or that a placement group holds.
        cpus_used: The same of CPUs.
        gpus_waiting: Those of all tasks, actors and placement groups that wait.
        cpus_waiting: The same of CPUs.
        gpus_requested: Those that the cluster shall have in any case: `ray.autoscaler.sdk.request_resources`.
    """

    gpus: float = 0
    gpus_used: float = 0
    cpus_used: float = 0
    gpus_waiting: float = 0
    cpus_waiting: float = 0
    gpus_requested: float = 0

    @property
    def gpus_wanted(self) -> int:
        """The GPUs that the cluster should have.

        ECS can't be told which worker to stop. So while any CPU or GPU is in use none may go, for it could be the one
        that works; they go when none is in use. What waits for CPUs alone needs a worker if there is none, and counts
        as one GPU then.
        """
        waiting = self.gpus_waiting or float(self.cpus_waiting > 0 and not self.gpus)
        in_use = self.gpus_used > 0 or self.cpus_used > 0
        needed = max(self.gpus, self.gpus_used + waiting) if in_use else waiting
        # Ray counts in ten-thousandths; what lies below comes from adding them up.
        return math.ceil(round(max(needed, self.gpus_requested), 4))


def read(gcs_address: str) -> Demand:
    """What holds now, from the GCS; any of Ray's errors, after up to a minute, where it doesn't answer."""
    from ray._private.ray_constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL  # not with every command: it takes time
    from ray.autoscaler.v2 import sdk

    # Where there is no autoscaler, request_resources leaves its bundles here, and the status doesn't show them.
    requested = sdk.GcsClient(gcs_address).internal_kv_get(AUTOSCALER_RESOURCE_REQUEST_CHANNEL, timeout=TIMEOUT_SECONDS)
    status = sdk.get_cluster_status(gcs_address, timeout=TIMEOUT_SECONDS)
    demands, usage = status.resource_demands, {each.resource_name: each for each in status.cluster_resource_usage}
    waiting = [*demands.ray_task_actor_demand, *demands.placement_group_demand]
    return Demand(
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
