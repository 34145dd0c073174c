"""ECS task definition, task role and execution role of one kind of Ray node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pulumi
import pulumi_aws as aws

from infra.definitions.containers import MOUNTS_VOLUME, TASK_VOLUMES
from infra.definitions.mounts import HOST_DIR
from infra.definitions.policies import Policy
from infra.definitions.sizing import TaskSize
from infra.definitions.user_data import INSTANCE_DIR
from infra.roles import attach_policies, make_role
from infra.types import SecurityOptions


@dataclass(frozen=True, kw_only=True)
class TaskDefinitionArgs:
    """Inputs of TaskDefinition; container definition and policies are JSON documents.

    `family` is unique in the account. `state_volume` is a volume that the next task on the instance mounts again,
    `instance_volume` the host directory with the instance's description, and `mounts` adds that with its file systems.
    """

    family: pulumi.Input[str]
    container: pulumi.Input[str]
    size: TaskSize
    task_trust: Policy
    execution_trust: Policy
    execution_policy: pulumi.Input[str]
    task_policy: pulumi.Input[str]
    security: SecurityOptions
    state_volume: str | None = None
    instance_volume: str | None = None
    mounts: bool = False


class TaskDefinition(pulumi.ComponentResource):
    """ECS task definition with its two roles; one task fills one instance."""

    definition_arn: pulumi.Output[str]
    role_arn: pulumi.Output[str]
    role_name: pulumi.Output[str]
    role_policies: list[pulumi.Resource]

    def __init__(self, name: str, args: TaskDefinitionArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("ray-on-ecs:infra:TaskDefinition", name, None, opts)
        execution_role, execution_policy = self._role(
            f"{name}-execution", args.execution_trust, args.execution_policy, args.security
        )
        task_role, task_policy = self._role(f"{name}-role", args.task_trust, args.task_policy, args.security)
        definition = aws.ecs.TaskDefinition(
            f"{name}-definition",
            family=args.family,
            requires_compatibilities=["EC2"],
            # Each task has its own network interface: Ray's fixed ports can't clash, and DNS resolves to the task.
            network_mode="awsvpc",
            cpu=str(args.size.cpu_units),
            memory=str(args.size.memory_mib),
            runtime_platform={"cpu_architecture": "X86_64", "operating_system_family": "LINUX"},
            execution_role_arn=execution_role.arn,
            task_role_arn=task_role.arn,
            container_definitions=args.container,
            volumes=_volumes(args),
            opts=pulumi.ResourceOptions(parent=self),
        )
        self.definition_arn = definition.arn
        self.role_arn, self.role_name = task_role.arn, task_role.name
        attached = attach_policies(f"{name}-role", task_role, args.security.task_policy_arns, self)
        self.role_policies = [execution_policy, task_policy, *attached]
        self.register_outputs({"definition_arn": self.definition_arn, "role_arn": self.role_arn})

    def _role(
        self, name: str, trust: Policy, policy: pulumi.Input[str], security: SecurityOptions
    ) -> tuple[aws.iam.Role, aws.iam.RolePolicy]:
        role = make_role(name, trust, security, parent=self)
        inline = aws.iam.RolePolicy(
            f"{name}-policy", role=role.name, policy=policy, opts=pulumi.ResourceOptions(parent=self)
        )
        return role, inline


def _volumes(args: TaskDefinitionArgs) -> list[aws.ecs.TaskDefinitionVolumeArgsDict]:
    """Task-scoped volumes, the instance's file systems and description, and the state shared between tasks.

    https://docs.aws.amazon.com/AmazonECS/latest/developerguide/docker-volumes.html
    """
    volumes: list[aws.ecs.TaskDefinitionVolumeArgsDict] = [{"name": volume} for volume in TASK_VOLUMES]
    if args.mounts:
        volumes += [{"name": volume, "host_path": HOST_DIR} for volume in MOUNTS_VOLUME]
    if args.instance_volume:
        volumes.append({"name": args.instance_volume, "host_path": INSTANCE_DIR})
    if args.state_volume:
        shared: Any = {"scope": "shared", "autoprovision": True, "driver": "local"}
        volumes.append({"name": args.state_volume, "docker_volume_configuration": shared})
    return volumes
