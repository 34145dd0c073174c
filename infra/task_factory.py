"""Task definition inputs of head and workers, from pure definitions and other components' outputs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pulumi

from infra.definitions import containers, policies
from infra.definitions.containers import ContainerDefaults
from infra.definitions.sizing import TaskSize
from infra.tags import metrics_namespace
from infra.task_definition import TaskDefinitionArgs
from infra.types import Location, NodeSpec, ResourceRef, SecurityOptions
from ray_on_ecs.contract import secrets_prefix


@dataclass(frozen=True, kw_only=True)
class TaskFactory:
    """Factory of task definition inputs; its fields are the values that all kinds of nodes share."""

    cluster: ResourceRef
    location: Location
    security: SecurityOptions
    image_uri: pulumi.Input[str]
    registry_secret_arn: pulumi.Input[str] = ""
    logs: ResourceRef
    token_parameter_arn: pulumi.Input[str]
    bucket: ResourceRef
    data_buckets: Sequence[pulumi.Input[str]] = ()
    job_secrets: Sequence[pulumi.Input[str]] = ()
    environment: Mapping[str, pulumi.Input[str]] = field(default_factory=dict)
    mounts: bool = False

    def by_kind(
        self,
        nodes: Mapping[str, NodeSpec],
        *,
        head_host: pulumi.Input[str],
        cluster_info_parameter: ResourceRef,
        groups: Mapping[str, ResourceRef],
        **of_head: float,
    ) -> dict[str, TaskDefinitionArgs]:
        """Inputs by kind of node; `groups` has their Auto Scaling groups, and `of_head` the settings of `head`."""
        head = self.head(nodes["head"].task, cluster_info_parameter=cluster_info_parameter, **of_head)
        workers = {kind: self.worker(kind, node, head_host, groups[kind]) for kind, node in nodes.items() if node.pool}
        return {"head": head, **workers}

    def head(self, size: TaskSize, *, cluster_info_parameter: ResourceRef, **settings: float) -> TaskDefinitionArgs:
        """Inputs of the head's task, without pools and numbers of workers: a change of these must not restart it."""
        namespace = metrics_namespace(self.cluster.name)
        inputs = pulumi.Output.all(
            common=self._common(size),
            bucket=self.bucket.name,
            cluster=self.cluster.name,
            metrics_namespace=namespace,
            cluster_info_parameter=cluster_info_parameter.name,
            secrets_key_arn=self.security.kms_key_arn,
            **settings,
        )
        return self._args(
            "head",
            inputs.apply(lambda values: json.dumps([containers.head(**values)])),
            size,
            self._task_policy(
                metrics_namespace=namespace,
                parameter_arn=cluster_info_parameter.arn,
                cluster_arn=self.cluster.arn,
                # Jobs delete the secrets of a finished run, and commands in the head's shell submit runs.
                writes_secrets=True,
            ),
            state_volume=containers.STATE_VOLUME,
        )

    def worker(self, kind: str, node: NodeSpec, head_host: pulumi.Input[str], group: ResourceRef) -> TaskDefinitionArgs:
        """Inputs of a worker's task; one with GPUs can have Auto Scaling replace its instance when these fail."""
        inputs = pulumi.Output.all(common=self._common(node.task), head_host=head_host)
        block = node.reservation.id if node.reservation and node.reservation.is_block else ""
        own = {"pool": node.pool, "efa_devices": len(node.efa_cards), "block": block}
        container = inputs.apply(lambda values: json.dumps([containers.worker(**values, **own)]))
        policy = self._task_policy(own_group_arn=group.arn if node.task.gpus else None, in_block=bool(block))
        return self._args(kind, container, node.task, policy, instance_volume=containers.INSTANCE_VOLUME)

    def _args(
        self, kind: str, container: pulumi.Output[str], size: TaskSize, task_policy: pulumi.Output[str], **volumes: str
    ) -> TaskDefinitionArgs:
        return TaskDefinitionArgs(
            family=pulumi.Output.concat(self.cluster.name, "-", kind),
            container=container,
            size=size,
            task_trust=policies.assumed_for("ecs-tasks.amazonaws.com", self.location.arn("ecs", "*")),
            # Without a condition: AWS documents aws:SourceAccount only for task roles.
            execution_trust=policies.assumed_by("ecs-tasks.amazonaws.com"),
            execution_policy=self._execution_policy(),
            task_policy=task_policy,
            security=self.security,
            mounts=self.mounts,
            **volumes,
        )

    def _common(self, size: TaskSize) -> pulumi.Output[ContainerDefaults]:
        inputs = pulumi.Output.all(
            image=self.image_uri,
            log_group=self.logs.name,
            token_arn=self.token_parameter_arn,
            secrets_prefix=self._secrets_prefix,
            registry_secret_arn=self.registry_secret_arn,
            environment=dict(self.environment),
        )
        return inputs.apply(
            lambda values: ContainerDefaults(region=self.location.region, size=size, mounts=self.mounts, **values)
        )

    @property
    def _secrets_prefix(self) -> pulumi.Output[str]:
        return pulumi.Output.from_input(self.cluster.name).apply(secrets_prefix)

    def _execution_policy(self) -> pulumi.Output[str]:
        inputs = pulumi.Output.all(
            image_uri=self.image_uri,
            log_group_arn=self.logs.arn,
            token_arn=self.token_parameter_arn,
            registry_secret_arn=self.registry_secret_arn,
            kms_key_arn=self.security.kms_key_arn,
        )
        return inputs.apply(lambda values: json.dumps(policies.execution(partition=self.location.partition, **values)))

    def _task_policy(
        self, *, writes_secrets: bool = False, in_block: bool = False, **grants: pulumi.Input[str | None]
    ) -> pulumi.Output[str]:
        location = self.location
        tasks_arn = pulumi.Output.concat(location.arn("ecs", "task/"), self.cluster.name, "/*")
        inputs = pulumi.Output.all(
            bucket_arn=self.bucket.arn,
            tasks_arn=tasks_arn,
            data_buckets=list(self.data_buckets),
            secrets_arn=pulumi.Output.concat(location.arn("ssm", "parameter"), self._secrets_prefix, "/*"),
            job_secrets=list(self.job_secrets),
            kms_key_arn=self.security.kms_key_arn,
            **grants,
        )
        return inputs.apply(
            lambda values: json.dumps(
                policies.training(
                    partition=location.partition, writes_secrets=writes_secrets, in_block=in_block, **values
                )
            )
        )
