"""The ECS cluster, and the log group that everything in it writes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pulumi
import pulumi_aws as aws
import pulumi_random as random

from infra.references import ResourceRef
from infra.tags import birth_name, tags


@dataclass(frozen=True, kw_only=True)
class ClusterArgs:
    """Inputs of Cluster.

    `made_for` is what the cluster is made for, such as its account: the state keeps the values of the first `up`.
    """

    made_for: Mapping[str, str] = field(default_factory=dict)
    log_retention_days: int
    kms_key_arn: pulumi.Input[str] = ""


class Cluster(pulumi.ComponentResource):
    """An empty ECS cluster; instances join it by its name, and their capacity providers are associated afterwards.

    `name` is known in the preview of a stack that is up, and unknown in that of a new one. `made_for` has the values of
    the first `up`.
    """

    name: pulumi.Output[str]
    made_for: pulumi.Output[Mapping[str, str]]
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
            tags=tags(f"{name}-logs"),
            opts=pulumi.ResourceOptions(parent=self),
        )
        self.ref = ResourceRef(name=cluster.name, arn=cluster.arn)
        self.logs = ResourceRef(name=logs.name, arn=logs.arn)
        self.register_outputs({"name": cluster.name, "log_group_name": logs.name})

    def _cluster(self, name: str, args: ClusterArgs) -> aws.ecs.Cluster:
        """Container Insights counts the tasks that run and are wanted, which alarms and dashboard read.

        It makes a log group of its own under a name that follows from the cluster's. Made here, it goes with the stack:
        after the cluster, which writes to it till its end. That is why the name has to be known beforehand. It is never
        used again: what Insights still had to write after that could have made the group anew.
        """
        suffix = random.RandomId(
            f"{name}-suffix",
            byte_length=3,
            prefix=f"{birth_name()}-",
            keepers=args.made_for,
            # Another prefix or keeper would replace everything. So a renamed stack keeps its cluster's name, and the
            # program can compare the keepers, which are those of the first `up`, with today's.
            opts=pulumi.ResourceOptions(parent=self, ignore_changes=["prefix", "keepers"]),
        )
        self.made_for = suffix.keepers.apply(lambda kept: kept or {})
        self.name = physical = pulumi.Output.concat(name, "-", suffix.hex)
        insights = aws.cloudwatch.LogGroup(
            f"{name}-insights",
            name=pulumi.Output.concat("/aws/ecs/containerinsights/", physical, "/performance"),
            retention_in_days=args.log_retention_days,
            kms_key_id=args.kms_key_arn or None,
            tags=tags(f"{name}-insights"),
            opts=pulumi.ResourceOptions(parent=self),
        )
        return aws.ecs.Cluster(
            f"{name}-cluster",
            name=physical,
            settings=[aws.ecs.ClusterSettingArgs(name="containerInsights", value="enabled")],
            tags=tags(f"{name}-cluster"),
            opts=pulumi.ResourceOptions(parent=self, depends_on=[insights]),
        )

    def associate(self, capacity_providers: Sequence[pulumi.Input[str]]) -> aws.ecs.ClusterCapacityProviders:
        """Let services run on these capacity providers, which are known by name.

        Every service depends on the association: ECS refuses one whose provider the cluster does not know yet, and the
        AWS provider does not try again. In turn it can go only when no service uses it any more.
        """
        return aws.ecs.ClusterCapacityProviders(
            f"{self._prefix}-capacity-providers",
            cluster_name=self.ref.name,
            capacity_providers=capacity_providers,
            opts=pulumi.ResourceOptions(parent=self),
        )
