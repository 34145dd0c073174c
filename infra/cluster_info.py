"""SSM parameter with the workers' pools, instance types, zones, prices, groups and limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pulumi
import pulumi_aws as aws

from infra.definitions.cluster_info import document
from infra.types import NodeSpec, ResourceRef, Scale


@dataclass(frozen=True, kw_only=True)
class ClusterInfoArgs:
    """Inputs of ClusterInfo: ECS cluster, the head's zone, and by kind nodes, scales, groups and capacity providers."""

    cluster: pulumi.Input[str]
    zone: pulumi.Input[str]
    nodes: Mapping[str, NodeSpec]
    scales: Mapping[str, Scale]
    group_names: Mapping[str, pulumi.Input[str]]
    provider_names: Mapping[str, pulumi.Input[str]]


class ClusterInfo(pulumi.ComponentResource):
    """SSM parameter: the same values in the head's task definition would restart the head at each change of workers."""

    parameter: ResourceRef

    def __init__(self, name: str, args: ClusterInfoArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("ray-on-ecs:infra:ClusterInfo", name, None, opts)
        names = pulumi.Output.all(
            cluster=args.cluster,
            zone=args.zone,
            group_names={kind: args.group_names[kind] for kind in args.scales},
            provider_names={kind: args.provider_names[kind] for kind in args.scales},
        )
        parameter = aws.ssm.Parameter(
            f"{name}-parameter",
            description="Instance types, zones, prices, groups and scaling of the Ray workers",
            type="String",
            # Not a secret, so a preview can show its changes.
            insecure_value=names.apply(lambda names: document(args.nodes, args.scales, **names)),
            opts=pulumi.ResourceOptions(parent=self),
        )
        self.parameter = ResourceRef(name=parameter.name, arn=parameter.arn)
        self.register_outputs({"parameter_name": parameter.name})
