"""What the workers are, where they may be, what they cost and what ends them, where runs and laptops find it.

See ray_on_ecs/tracking/cost.py, ray_on_ecs/run/zone_failover.py and ray_on_ecs/cli/status.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pulumi
import pulumi_aws as aws

from infra.references import NodeSpec, ResourceRef, Scale
from infra.tags import tags


@dataclass(frozen=True, kw_only=True)
class ClusterInfoArgs:
    """Inputs of ClusterInfo: the kinds of nodes, the workers' group, and by zone its subnets and placement groups.

    A run without GPUs may use CPU workers, and pays for those. `scales` says how many GPU and CPU workers
    there are.
    """

    head: NodeSpec
    worker: NodeSpec
    cpu_worker: NodeSpec | None = None
    scales: Mapping[str, Scale]
    group_name: pulumi.Input[str]
    subnets: Mapping[str, pulumi.Input[str]]
    placement_groups: Mapping[str, pulumi.Input[str]]


class ClusterInfo(pulumi.ComponentResource):
    """A parameter in SSM: a task definition that held the same would replace the head at each change to the workers."""

    parameter: ResourceRef

    def __init__(self, name: str, args: ClusterInfoArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("ray-on-ecs:infra:ClusterInfo", name, None, opts)
        parameter = aws.ssm.Parameter(
            f"{name}-parameter",
            description="The types, zones and prices of the workers, for runs that wait for them and what they cost",
            type="String",
            value=pulumi.Output.json_dumps(_facts(args)),
            tags=tags(f"{name}-parameter"),
            opts=pulumi.ResourceOptions(parent=self),
        )
        self.parameter = ResourceRef(name=parameter.name, arn=parameter.arn)
        self.register_outputs({"parameter_name": parameter.name})


def _facts(args: ClusterInfoArgs) -> dict[str, pulumi.Input[object]]:
    worker = args.worker
    nodes = [node for node in (args.cpu_worker, worker) if node]
    known = all(node.prices is not None for node in nodes)
    prices = {name: price.on_demand for node in nodes for name, price in (node.prices or {}).items()} if known else None
    alone = worker.max_count < 2
    return {
        "group": args.group_name,
        "types": list(worker.instance_types),
        "gpus": worker.task.gpus,
        "zones": [
            {
                "zone": zone,
                "subnet_id": args.subnets[zone],
                "placement_group": None if alone else args.placement_groups.get(zone),
            }
            for zone in worker.zones
        ],
        "spot": worker.spot_count > 0,
        "spread": worker.spread,
        "prices": prices,
        "head_usd": max((price.on_demand for price in (args.head.prices or {}).values()), default=None),
        "scaling": {kind: _scaling(scale) for kind, scale in args.scales.items()},
    }


def _scaling(scale: Scale) -> dict[str, object]:
    return {
        "min": scale.min_count,
        "max": scale.max_count,
        "idle_minutes": scale.idle_minutes,
    }
