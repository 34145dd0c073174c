"""Service discovery: a private DNS name in AWS Cloud Map that follows the head's task."""

from __future__ import annotations

from dataclasses import dataclass

import pulumi
import pulumi_aws as aws

# A worker restarts a minute after it loses the head; by then the name must resolve to the new head.
TTL_SECONDS = 10


@dataclass(frozen=True, kw_only=True)
class DiscoveryArgs:
    """Inputs of Discovery; the namespace is a single DNS label below `internal`, unique in the VPC."""

    namespace: pulumi.Input[str]
    vpc_id: pulumi.Input[str]


class Discovery(pulumi.ComponentResource):
    """Private DNS namespace with the head's service, in which ECS registers the head's task."""

    registry_arn: pulumi.Output[str]
    head_host: pulumi.Output[str]

    def __init__(self, name: str, args: DiscoveryArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("ray-on-ecs:infra:Discovery", name, None, opts)
        namespace = aws.servicediscovery.PrivateDnsNamespace(
            f"{name}-namespace",
            name=pulumi.Output.concat(args.namespace, ".internal"),
            vpc=args.vpc_id,
            opts=pulumi.ResourceOptions(parent=self),
        )
        service = aws.servicediscovery.Service(
            f"{name}-head",
            name="head",
            dns_config={
                "namespace_id": namespace.id,
                "dns_records": [{"type": "A", "ttl": TTL_SECONDS}],
                "routing_policy": "MULTIVALUE",
            },
            # ECS deregisters a stopped task late, and Cloud Map refuses to delete a service with instances.
            force_destroy=True,
            opts=pulumi.ResourceOptions(parent=self),
        )
        self.registry_arn = service.arn
        self.head_host = pulumi.Output.concat(service.name, ".", namespace.name)
        self.register_outputs({"registry_arn": self.registry_arn, "head_host": self.head_host})
