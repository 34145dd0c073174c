"""ECS service for one kind of Ray node."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pulumi
import pulumi_aws as aws

from infra.tags import SLEEP_TAG
from infra.types import NetworkRef, ResourceRef, ServiceRef


@dataclass(frozen=True, kw_only=True)
class ServiceArgs:
    """Inputs of Service.

    The service is created after `after` and deleted before it: the capacity providers' association and the roles'
    policies. An autoscaled service starts with `count`, which the program does not change later. A new value in
    `redeploy`, by cause, forces a new deployment. A service that sleeps is one, too, between no task and `count`.
    `before_update` is a hook.
    """

    cluster: ResourceRef
    network: NetworkRef
    subnets: Sequence[pulumi.Input[str]]
    task_definition_arn: pulumi.Input[str]
    capacity_provider: pulumi.Input[str]
    count: int
    autoscaled: bool = False
    sleeps: bool = False
    before_update: Callable[[pulumi.ResourceHookArgs], Awaitable[None]] | None = None
    redeploy: Mapping[str, str] = field(default_factory=dict)
    registry_arn: pulumi.Input[str] | None = None
    after: Sequence[pulumi.Resource] = ()


class Service(pulumi.ComponentResource):
    """ECS service with one task per instance."""

    ref: ServiceRef

    def __init__(self, name: str, args: ServiceArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("ray-on-ecs:infra:Service", name, None, opts)
        service = aws.ecs.Service(
            f"{name}-service",
            cluster=args.cluster.arn,
            task_definition=args.task_definition_arn,
            desired_count=args.count,
            # The AWS provider can't plan a change of the strategy without force_new_deployment, and ECS can't delete a
            # capacity provider in use: replacing one takes two steps.
            # https://github.com/hashicorp/terraform-provider-aws/issues/43533
            capacity_provider_strategies=[{"capacity_provider": args.capacity_provider, "weight": 1}],
            network_configuration={
                "subnets": args.subnets,
                "security_groups": [args.network.tasks_group_id],
                "assign_public_ip": False,
            },
            service_registries=None if args.registry_arn is None else {"registry_arn": args.registry_arn},
            # A task fills its instance, so the old task must stop before the new one is placed. This also prevents two
            # heads behind one DNS name. ECS requires a maximum above 100 % for zone rebalancing.
            deployment_minimum_healthy_percent=0,
            deployment_maximum_percent=100,
            availability_zone_rebalancing="DISABLED",
            # The image pull takes minutes, and no other resource depends on running tasks.
            wait_for_steady_state=False,
            # ECS refuses scale-in during a deployment: tasks that fail again and again would keep their instances. A
            # head goes on trying.
            # https://docs.aws.amazon.com/AmazonECS/latest/developerguide/service-auto-scaling.html
            deployment_circuit_breaker={"enable": True, "rollback": False} if args.autoscaled else None,
            # After the circuit breaker has fired, ECS starts tasks again only with a new deployment.
            force_new_deployment=True if args.redeploy else None,
            triggers=args.redeploy or None,
            # ECS otherwise refuses to delete a service whose desired count is above 0.
            force_delete=True,
            propagate_tags="SERVICE",
            tags={SLEEP_TAG: "true"} if args.sleeps else None,
            opts=pulumi.ResourceOptions(
                parent=self,
                # ECS refuses a service without the association. A service that outlives the network, its roles or its
                # logs cannot report its tasks stopped, and `destroy` waits in DRAINING until it times out.
                depends_on=[args.network.network, *args.after],
                # Application Auto Scaling sets the count, which `pulumi up --refresh` would reset.
                ignore_changes=["desiredCount"] if args.autoscaled or args.sleeps else None,
                custom_timeouts=pulumi.CustomTimeouts(delete="30m"),
                hooks=pulumi.ResourceHookBinding(before_update=[args.before_update]) if args.before_update else None,
            ),
        )
        self.ref = ServiceRef(cluster=args.cluster.name, name=service.name)
        self.register_outputs({"name": service.name})
