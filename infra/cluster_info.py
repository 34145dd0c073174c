"""SSM parameter with the workers' pools, instance types, zones, prices, groups and limits.

Head, runs and command line read it: see ray_on_ecs/cluster_info.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pulumi
import pulumi_aws as aws

from infra.tags import tags
from infra.types import NetworkRef, NodeSpec, ResourceRef, Scale, in_zone
from ray_on_ecs.contract import CPU_WORKERS, WORKERS, gpu_name


@dataclass(frozen=True, kw_only=True)
class ClusterInfoArgs:
    """Inputs of ClusterInfo: ECS cluster, network, and by kind nodes, scales, Auto Scaling groups, capacity providers.

    `placement_groups` are those of `workers` by zone, which a head of an earlier version reads.
    """

    cluster: pulumi.Input[str]
    nodes: Mapping[str, NodeSpec]
    scales: Mapping[str, Scale]
    default_gpus: int
    group_names: Mapping[str, pulumi.Input[str]]
    provider_names: Mapping[str, pulumi.Input[str]]
    network: NetworkRef
    placement_groups: Mapping[str, pulumi.Input[str]]


class ClusterInfo(pulumi.ComponentResource):
    """SSM parameter: the same values in the head's task definition would restart the head at each change of workers."""

    parameter: ResourceRef

    def __init__(self, name: str, args: ClusterInfoArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("ray-on-ecs:infra:ClusterInfo", name, None, opts)
        parameter = aws.ssm.Parameter(
            f"{name}-parameter",
            description="Instance types, zones, prices, groups and scaling of the Ray workers",
            type="String",
            # Not a secret, so a preview can show its changes.
            insecure_value=pulumi.Output.json_dumps(_document(args)),
            tags=tags(f"{name}-parameter"),
            opts=pulumi.ResourceOptions(parent=self),
        )
        self.parameter = ResourceRef(name=parameter.name, arn=parameter.arn)
        self.register_outputs({"parameter_name": parameter.name})


def _document(args: ClusterInfoArgs) -> dict[str, pulumi.Input[object]]:
    """Content of the parameter.

    Its own keys describe `workers` and `cpu-workers`, as they did before there were other pools, so that a stack
    without these keeps its document, and a head that has not restarted can read it. `pools` has the other kinds.
    """
    worker, network = args.nodes[WORKERS], args.network
    own = {kind: scale for kind, scale in args.scales.items() if kind in (WORKERS, CPU_WORKERS)}
    pools = {kind: _node_group(kind, args) for kind in args.scales if kind not in own}
    # A placement group would only limit the capacity for a single worker.
    placement_groups = args.placement_groups if worker.max_count > 1 else {}
    return {
        "cluster": args.cluster,
        "group": args.group_names[WORKERS],
        "types": list(worker.instance_types),
        "gpus": worker.task.gpus,
        **({"gpu": worker.gpu} if worker.gpu != gpu_name(list(worker.instance_types)) else {}),
        "default_gpus": args.default_gpus,
        "zones": [
            {
                "zone": zone,
                "subnet_id": in_zone(network.subnets, zone),
                "placement_group": in_zone(placement_groups, zone) if placement_groups else None,
            }
            for zone in network.zones(worker.zones)
        ],
        "spot": worker.spot_count > 0,
        "spread": worker.spread,
        "prices": _prices(*(node for kind, node in args.nodes.items() if kind != "head")),
        "disk_usd": worker.disk_usd,
        "head_usd": max((price.on_demand for price in (args.nodes["head"].prices or {}).values()), default=None),
        "scaling": {
            kind: {
                "min": scale.min_count,
                "max": scale.max_count,
                "idle_minutes": scale.idle_minutes,
                "units": args.nodes[kind].units,
                "group": args.group_names[kind],
                "provider": args.provider_names[kind],
            }
            for kind, scale in own.items()
        },
        **({"pools": pools} if pools else {}),
    }


def _node_group(kind: str, args: ClusterInfoArgs) -> dict[str, pulumi.Input[object]]:
    node, scale = args.nodes[kind], args.scales[kind]
    return {
        "pool": node.pool,
        "zones": list(args.network.zones(node.zones)),
        "types": list(node.instance_types),
        "gpu": node.gpu,
        "units": node.units,
        "spot": node.spot_count > 0,
        "min": scale.min_count,
        "max": scale.max_count,
        "default_nodes": scale.default_job_count,
        "idle_minutes": scale.idle_minutes,
        "group": args.group_names[kind],
        "provider": args.provider_names[kind],
        "disk_usd": node.disk_usd,
    }


def _prices(*nodes: NodeSpec) -> dict[str, float] | None:
    """On-demand prices by instance type; None unless all are known."""
    prices: dict[str, float] = {}
    for node in nodes:
        if node.prices is None:
            return None
        prices |= {name: price.on_demand for name, price in node.prices.items()}
    return prices
