"""The ECS service that keeps one kind of Ray node running."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pulumi
import pulumi_aws as aws

from infra.references import NetworkRef, ResourceRef, ServiceRef
from infra.tags import tags


@dataclass(frozen=True, kw_only=True)
class RayServiceArgs:
    """Inputs of RayService.

    The service is made after all of `after`, and gone before any of it goes: the capacity providers' association, and
    the policies of all kinds' roles, since a run needs all kinds till its end. An autoscaled service begins with
    `count`, and nothing here changes that later. `redeploy` has a word for each cause; another word deploys the
    tasks again.
    """

    cluster: ResourceRef
    network: NetworkRef
    zones: Sequence[str]
    task_definition_arn: pulumi.Input[str]
    capacity_provider: pulumi.Input[str]
    count: int
    autoscaled: bool = False
    redeploy: Mapping[str, str] = field(default_factory=dict)
    registry_arn: pulumi.Input[str] | None = None
    after: Sequence[pulumi.Resource] = ()


class RayService(pulumi.ComponentResource):
    """A number of tasks, one on each instance."""

    ref: ServiceRef

    def __init__(self, name: str, args: RayServiceArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("ray-on-ecs:infra:RayService", name, None, opts)
        service = aws.ecs.Service(
            f"{name}-service",
            cluster=args.cluster.arn,
            task_definition=args.task_definition_arn,
            desired_count=args.count,
            # The AWS provider can't plan a change of this without force_new_deployment, nor can ECS delete a provider
            # that a service still uses: replacing one takes two steps.
            # https://github.com/hashicorp/terraform-provider-aws/issues/43533
            capacity_provider_strategies=[
                aws.ecs.ServiceCapacityProviderStrategyArgs(capacity_provider=args.capacity_provider, weight=1)
            ],
            network_configuration=aws.ecs.ServiceNetworkConfigurationArgs(
                subnets=[args.network.subnets[zone] for zone in args.zones],
                security_groups=[args.network.tasks_group_id],
                assign_public_ip=False,
            ),
            service_registries=_registries(args.registry_arn),
            # One task fills one instance, so the old one has to stop before the new one fits. It also keeps two heads
            # from standing behind one name. ECS offers no zone rebalancing under a maximum of 100 %.
            deployment_minimum_healthy_percent=0,
            deployment_maximum_percent=100,
            availability_zone_rebalancing="DISABLED",
            # Pulling the image takes minutes, and `pulumi up` has nothing to do that waits for it.
            wait_for_steady_state=False,
            # While a deployment goes on, ECS lets no scaler take tasks away: one whose tasks fail again and again would
            # keep its instances for ever.
            deployment_circuit_breaker=(
                aws.ecs.ServiceDeploymentCircuitBreakerArgs(enable=True, rollback=False) if args.autoscaled else None
            ),
            # A deployment that ECS has given up starts no more tasks, and nothing else would make ECS try again.
            force_new_deployment=True if args.redeploy else None,
            triggers=args.redeploy or None,
            force_delete=True,
            propagate_tags="SERVICE",
            tags=tags(f"{name}-service"),
            opts=pulumi.ResourceOptions(
                parent=self,
                # A service without its association is refused; one that outlives the network, its roles or its logs
                # cannot report its tasks stopped, and `destroy` waits in DRAINING until it fails.
                depends_on=[args.network.network, *args.after],
                # The scaler's own number would be put back at every `pulumi up` that looks at AWS.
                ignore_changes=["desiredCount"] if args.autoscaled else None,
                custom_timeouts=pulumi.CustomTimeouts(delete="30m"),
            ),
        )
        self.ref = ServiceRef(cluster=args.cluster.name, name=service.name)
        self.register_outputs({"name": service.name})


def _registries(registry_arn: pulumi.Input[str] | None) -> aws.ecs.ServiceServiceRegistriesArgs | None:
    return None if registry_arn is None else aws.ecs.ServiceServiceRegistriesArgs(registry_arn=registry_arn)
