"""ECS cluster with Container Insights, and the log group of its containers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import pulumi
import pulumi_aws as aws

from infra.types import ResourceRef


@dataclass(frozen=True, kw_only=True)
class ClusterArgs:
    """Inputs of Cluster."""

    name: pulumi.Input[str]
    log_retention_days: int
    kms_key_arn: pulumi.Input[str] = ""


class Cluster(pulumi.ComponentResource):
    """ECS cluster without instances, which join it by its name; `associate` adds their capacity providers."""

    ref: ResourceRef
    logs: ResourceRef

    def __init__(self, name: str, args: ClusterArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("ray-on-ecs:infra:Cluster", name, None, opts)
        self._prefix = name
        cluster = self._cluster(name, args)
        logs = aws.cloudwatch.LogGroup(
            f"{name}-logs",
            retention_in_days=args.log_retention_days,
            kms_key_id=args.kms_key_arn or None,
            opts=pulumi.ResourceOptions(parent=self),
        )
        self.ref = ResourceRef(name=cluster.name, arn=cluster.arn)
        self.logs = ResourceRef(name=logs.name, arn=logs.arn)
        self.register_outputs({"name": cluster.name, "log_group_name": logs.name})

    def _cluster(self, name: str, args: ClusterArgs) -> aws.ecs.Cluster:
        """ECS cluster and the log group of its Container Insights, whose task counts alarms and dashboard use.

        Container Insights creates its log group under a name derived from the cluster's. Created here, the group is
        deleted with the stack, after the cluster that writes to it: so the cluster's name must be known beforehand. It
        is random, since late writes of Insights can re-create the group, which would block a later stack of that name.
        """
        insights = aws.cloudwatch.LogGroup(
            f"{name}-insights",
            name=pulumi.Output.concat("/aws/ecs/containerinsights/", args.name, "/performance"),
            retention_in_days=args.log_retention_days,
            kms_key_id=args.kms_key_arn or None,
            opts=pulumi.ResourceOptions(parent=self),
        )
        return aws.ecs.Cluster(
            f"{name}-cluster",
            name=args.name,
            settings=[{"name": "containerInsights", "value": "enabled"}],
            opts=pulumi.ResourceOptions(parent=self, depends_on=[insights]),
        )

    def associate(
        self,
        capacity_providers: Sequence[pulumi.Input[str]],
        end_services: Callable[[pulumi.ResourceHookArgs], Awaitable[None]],
    ) -> aws.ecs.ClusterCapacityProviders:
        """Associate capacity providers with the cluster, by name.

        Every service depends on the association: ECS refuses a service whose provider is not associated, and the AWS
        provider does not retry. ECS also refuses to remove a provider that a service uses, so `end_services` deletes
        these services before an update.
        """
        return aws.ecs.ClusterCapacityProviders(
            f"{self._prefix}-capacity-providers",
            cluster_name=self.ref.name,
            capacity_providers=capacity_providers,
            opts=pulumi.ResourceOptions(parent=self, hooks=pulumi.ResourceHookBinding(before_update=[end_services])),
        )
