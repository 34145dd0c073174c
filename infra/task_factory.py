"""Task definition inputs of head, workers and CPU workers, from pure definitions and other components' outputs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
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

    def by_kind(
        self,
        nodes: Mapping[str, NodeSpec],
        *,
        head_host: pulumi.Input[str],
        cluster_info_parameter: ResourceRef,
        group: ResourceRef,
    ) -> dict[str, TaskDefinitionArgs]:
        """Inputs by kind of node; `group` is the workers' Auto Scaling group."""
        head = self.head(
            nodes["head"].task,
            cluster_info_parameter=cluster_info_parameter,
            group=group,
            moves=nodes["workers"].moves,
            cpu_workers="cpu-workers" in nodes,
        )
        tasks = {"head": head, "workers": self.worker(nodes["workers"].task, head_host, group)}
        if "cpu-workers" in nodes:
            tasks["cpu-workers"] = self.cpu_worker(nodes["cpu-workers"].task, head_host)
        return tasks

    def head(
        self, size: TaskSize, *, cluster_info_parameter: ResourceRef, group: ResourceRef, moves: bool, cpu_workers: bool
    ) -> TaskDefinitionArgs:
        """Inputs of the head's task, without the number of workers, so that a change of it does not restart the head.

        Jobs on the head read the workers' Auto Scaling group, and with `moves` they move it to another zone.
        """
        namespace = metrics_namespace(self.cluster.name)
        inputs = pulumi.Output.all(
            common=self._common(size),
            bucket=self.bucket.name,
            cluster=self.cluster.name,
            metrics_namespace=namespace,
            cluster_info_parameter=cluster_info_parameter.name,
            secrets_key_arn=self.security.kms_key_arn,
        )
        return self._args(
            "head",
            inputs.apply(lambda values: json.dumps([containers.head(**values, cpu_workers=cpu_workers)])),
            size,
            self._task_policy(
                metrics_namespace=namespace,
                parameter_arn=cluster_info_parameter.arn,
                cluster_arn=self.cluster.arn,
                group_arn=group.arn if moves else None,
                # Jobs delete the secrets of a finished run, and commands in the head's shell submit runs.
                writes_secrets=True,
            ),
            state_volume=containers.STATE_VOLUME,
        )

    def worker(self, size: TaskSize, head_host: pulumi.Input[str], group: ResourceRef) -> TaskDefinitionArgs:
        """Inputs of a worker's task, which can have Auto Scaling replace its instance when GPUs fail."""
        return self._joining("workers", size, head_host, containers.worker, own_group_arn=group.arn)

    def cpu_worker(self, size: TaskSize, head_host: pulumi.Input[str]) -> TaskDefinitionArgs:
        """Inputs of a CPU worker's task."""
        return self._joining("cpu-workers", size, head_host, containers.cpu_worker)

    def _joining(
        self,
        kind: str,
        size: TaskSize,
        head_host: pulumi.Input[str],
        define: Callable[..., containers.Container],
        own_group_arn: pulumi.Input[str] | None = None,
    ) -> TaskDefinitionArgs:
        inputs = pulumi.Output.all(common=self._common(size), head_host=head_host)
        container = inputs.apply(lambda values: json.dumps([define(**values)]))
        policy = self._task_policy(own_group_arn=own_group_arn)
        return self._args(kind, container, size, policy, instance_volume=containers.INSTANCE_VOLUME)

    def _args(
        self, kind: str, container: pulumi.Output[str], size: TaskSize, task_policy: pulumi.Output[str], **volumes: str
    ) -> TaskDefinitionArgs:
        location = self.location
        return TaskDefinitionArgs(
            family=pulumi.Output.concat(self.cluster.name, "-", kind),
            container=container,
            size=size,
            task_trust=policies.assumed_by_tasks(
                partition=location.partition, region=location.region, account=location.account
            ),
            # Without a condition: AWS documents aws:SourceAccount only for task roles.
            execution_trust=policies.assumed_by("ecs-tasks.amazonaws.com"),
            execution_policy=self._execution_policy(),
            task_policy=task_policy,
            security=self.security,
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
        return inputs.apply(lambda values: ContainerDefaults(region=self.location.region, size=size, **values))

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

    def _task_policy(self, *, writes_secrets: bool = False, **grants: pulumi.Input[str | None]) -> pulumi.Output[str]:
        location = self.location
        tasks = f"arn:{location.partition}:ecs:{location.region}:{location.account}:task/"
        tasks_arn = pulumi.Output.concat(tasks, self.cluster.name, "/*")
        parameters = f"arn:{location.partition}:ssm:{location.region}:{location.account}:parameter"
        inputs = pulumi.Output.all(
            bucket_arn=self.bucket.arn,
            tasks_arn=tasks_arn,
            data_buckets=list(self.data_buckets),
            secrets_arn=pulumi.Output.concat(parameters, self._secrets_prefix, "/*"),
            job_secrets=list(self.job_secrets),
            kms_key_arn=self.security.kms_key_arn,
            **grants,
        )
        where = {"partition": location.partition, "region": location.region}
        return inputs.apply(
            lambda values: json.dumps(policies.training(**where, writes_secrets=writes_secrets, **values))
        )
