"""The ECS cluster, and the log group that everything in it writes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pulumi
import pulumi_aws as aws

from infra.tags import tags


@dataclass(frozen=True, kw_only=True)
class ClusterArgs:
    """Inputs of Cluster."""

    log_retention_days: int


class Cluster(pulumi.ComponentResource):
    """An empty ECS cluster; instances join it by its name, and their capacity providers are associated afterwards."""

    name: pulumi.Output[str]
    arn: pulumi.Output[str]
    log_group_name: pulumi.Output[str]
    log_group_arn: pulumi.Output[str]

    def __init__(self, name: str, args: ClusterArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("ray-on-ecs:infra:Cluster", name, None, opts)
        self._prefix = name
        cluster = aws.ecs.Cluster(
            f"{name}-cluster", tags=tags(f"{name}-cluster"), opts=pulumi.ResourceOptions(parent=self)
        )
        logs = aws.cloudwatch.LogGroup(
            f"{name}-logs",
            retention_in_days=args.log_retention_days,
            tags=tags(f"{name}-logs"),
            opts=pulumi.ResourceOptions(parent=self),
        )
        self.name = cluster.name
        self.arn = cluster.arn
        self.log_group_name = logs.name
        self.log_group_arn = logs.arn
        self.register_outputs(
            {
                "name": self.name,
                "arn": self.arn,
                "log_group_name": self.log_group_name,
                "log_group_arn": self.log_group_arn,
            }
        )

    def associate(self, capacity_providers: Sequence[pulumi.Input[str]]) -> aws.ecs.ClusterCapacityProviders:
        """Let services run on these capacity providers, which are known by name.

        Every service depends on the association: ECS refuses one whose provider the cluster does not know yet, and the
        AWS provider does not try again. In turn it can go only when no service uses it any more.
        """
        return aws.ecs.ClusterCapacityProviders(
            f"{self._prefix}-capacity-providers",
            cluster_name=self.name,
            capacity_providers=capacity_providers,
            opts=pulumi.ResourceOptions(parent=self),
        )
