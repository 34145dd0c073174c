"""What the Ray head and the Ray workers have in common: roles, task definition and ECS service."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import pulumi
import pulumi_aws as aws

from infra import policies
from infra.containers import VOLUMES, Common, Container
from infra.handles import EcsService, Named, Site
from infra.sizing import TaskSize
from infra.tags import physical_name, tags


@dataclass(frozen=True, kw_only=True)
class RayNodeArgs:
    """What every Ray node runs on."""

    cluster: Named
    site: Site
    region: str
    image_uri: pulumi.Input[str]
    logs: Named
    token_parameter_arn: pulumi.Input[str]
    bucket: Named
    data_buckets: Sequence[str] = ()

    def container(
        self, define: Callable[..., Container], size: TaskSize, **inputs: pulumi.Input[str]
    ) -> pulumi.Output[str]:
        """JSON of the one container that `define` makes of these inputs and of what every node runs on."""
        known = pulumi.Output.all(image=self.image_uri, log_group=self.logs.name, token_arn=self.token_parameter_arn)
        return pulumi.Output.all(known, pulumi.Output.all(**inputs)).apply(
            lambda both: json.dumps([define(Common(**both[0], region=self.region, size=size), **both[1])])
        )


class RayNode(pulumi.ComponentResource):
    """One kind of Ray node, one task on each of its instances; `start` makes the service that runs them."""

    service: EcsService
    rights: list[pulumi.Resource]

    def __init__(
        self,
        kind: str,
        name: str,
        node: RayNodeArgs,
        opts: pulumi.ResourceOptions | None,
        *,
        container: pulumi.Input[str],
        size: TaskSize,
        count: int,
        capacity_provider: pulumi.Input[str],
        scaled: bool = False,
        rights: Mapping[str, pulumi.Input[str]] | None = None,
        registry_arn: pulumi.Input[str] | None = None,
        kept: str | None = None,
    ) -> None:
        super().__init__(f"ray-on-ecs:infra:{kind}", name, None, opts)
        self._prefix = name
        execution_role, execution_policy = self._role("execution", _execution_policy(node))
        task_role, task_policy = self._role("task", _task_policy(node, rights or {}))
        self.rights = [execution_policy, task_policy]
        self._cluster = node.cluster
        self._service = partial(
            self._make_service,
            self._task_definition(container, size, execution_role, task_role, kept),
            node,
            count=count,
            capacity_provider=capacity_provider,
            scaled=scaled,
            registry_arn=registry_arn,
        )
        self.register_outputs({})

    def start(self, after: Sequence[pulumi.Resource]) -> None:
        """Make the service, which is gone before any of `after` goes."""
        self.service = EcsService(cluster=self._cluster.name, name=self._service(after=after).name)

    def _role(self, purpose: str, policy: pulumi.Output[str]) -> tuple[aws.iam.Role, aws.iam.RolePolicy]:
        name = f"{self._prefix}-{purpose}-role"
        role = aws.iam.Role(
            name,
            assume_role_policy=json.dumps(policies.assumed_by("ecs-tasks.amazonaws.com")),
            tags=tags(name),
            opts=pulumi.ResourceOptions(parent=self),
        )
        inline = aws.iam.RolePolicy(
            f"{self._prefix}-{purpose}-policy", role=role.name, policy=policy, opts=pulumi.ResourceOptions(parent=self)
        )
        return role, inline

    def _task_definition(
        self,
        container: pulumi.Input[str],
        size: TaskSize,
        execution_role: aws.iam.Role,
        task_role: aws.iam.Role,
        kept: str | None,
    ) -> aws.ecs.TaskDefinition:
        name = f"{self._prefix}-task"
        return aws.ecs.TaskDefinition(
            name,
            family=physical_name(self._prefix),
            requires_compatibilities=["EC2"],
            # Every task its own network interface: Ray's fixed ports cannot clash, and DNS leads to the task itself.
            network_mode="awsvpc",
            cpu=str(size.cpu_units),
            memory=str(size.memory_mib),
            runtime_platform=aws.ecs.TaskDefinitionRuntimePlatformArgs(
                cpu_architecture="X86_64", operating_system_family="LINUX"
            ),
            execution_role_arn=execution_role.arn,
            task_role_arn=task_role.arn,
            container_definitions=container,
            volumes=_volumes(kept),
            tags=tags(name),
            opts=pulumi.ResourceOptions(parent=self),
        )

    def _make_service(
        self,
        task: aws.ecs.TaskDefinition,
        node: RayNodeArgs,
        *,
        count: int,
        capacity_provider: pulumi.Input[str],
        scaled: bool,
        registry_arn: pulumi.Input[str] | None,
        after: Sequence[pulumi.Resource],
    ) -> aws.ecs.Service:
        name = f"{self._prefix}-service"
        return aws.ecs.Service(
            name,
            cluster=node.cluster.arn,
            task_definition=task.arn,
            desired_count=count,
            capacity_provider_strategies=[
                aws.ecs.ServiceCapacityProviderStrategyArgs(capacity_provider=capacity_provider, weight=1)
            ],
            network_configuration=aws.ecs.ServiceNetworkConfigurationArgs(
                subnets=[node.site.subnet_id], security_groups=[node.site.security_group_id], assign_public_ip=False
            ),
            service_registries=_registries(registry_arn),
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
                aws.ecs.ServiceDeploymentCircuitBreakerArgs(enable=True, rollback=False) if scaled else None
            ),
            force_delete=True,
            propagate_tags="SERVICE",
            tags=tags(name),
            opts=pulumi.ResourceOptions(
                parent=self,
                # A service without its association is refused; one that outlives the network, its roles or its logs
                # cannot report its tasks stopped, and `destroy` waits in DRAINING until it fails.
                depends_on=[node.site.network, *after],
                # The scaler's own number would be put back at every `pulumi up` that looks at AWS.
                ignore_changes=["desiredCount"] if scaled else None,
                custom_timeouts=pulumi.CustomTimeouts(delete="30m"),
            ),
        )


def start(nodes: Sequence[RayNode], after: Sequence[pulumi.Resource]) -> None:
    """Start the services of all nodes after the policies of all their roles, and so destroy them before any of those.

    A run needs both kinds till its end, and a task that stops late still writes its log and its last checkpoint.
    """
    rights = [policy for node in nodes for policy in node.rights]
    for node in nodes:
        node.start([*after, *rights])


def _volumes(kept: str | None) -> list[aws.ecs.TaskDefinitionVolumeArgs]:
    """Those that go with the task, and the one that stays on the instance's disk for the next task, and goes with it.

    https://docs.aws.amazon.com/AmazonECS/latest/developerguide/docker-volumes.html
    """
    volumes = [aws.ecs.TaskDefinitionVolumeArgs(name=volume) for volume in VOLUMES]
    if kept is None:
        return volumes
    shared = aws.ecs.TaskDefinitionVolumeDockerVolumeConfigurationArgs(
        scope="shared", autoprovision=True, driver="local"
    )
    return [*volumes, aws.ecs.TaskDefinitionVolumeArgs(name=kept, docker_volume_configuration=shared)]


def _registries(registry_arn: pulumi.Input[str] | None) -> aws.ecs.ServiceServiceRegistriesArgs | None:
    return None if registry_arn is None else aws.ecs.ServiceServiceRegistriesArgs(registry_arn=registry_arn)


def _execution_policy(node: RayNodeArgs) -> pulumi.Output[str]:
    return pulumi.Output.all(
        image_uri=node.image_uri, log_group_arn=node.logs.arn, token_arn=node.token_parameter_arn
    ).apply(lambda inputs: json.dumps(policies.execution(**inputs)))


def _task_policy(node: RayNodeArgs, rights: Mapping[str, pulumi.Input[str]]) -> pulumi.Output[str]:
    return pulumi.Output.all(bucket_arn=node.bucket.arn, **rights).apply(
        lambda inputs: json.dumps(policies.training(**inputs, data_buckets=node.data_buckets))
    )
