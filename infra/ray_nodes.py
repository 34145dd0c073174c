"""What a head's task is and what a worker's is: the pure definitions, filled in with what the other components made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import pulumi

from infra.definitions import containers, policies
from infra.definitions.containers import ContainerDefaults
from infra.definitions.sizing import TaskSize
from infra.ray_task import RayTaskArgs
from infra.references import Location, ResourceRef
from infra.tags import metrics_namespace


@dataclass(frozen=True, kw_only=True)
class TaskDefaults:
    """What the tasks of all kinds have in common."""

    cluster: ResourceRef
    location: Location
    image_uri: pulumi.Input[str]
    logs: ResourceRef
    token_parameter_arn: pulumi.Input[str]
    bucket: ResourceRef
    data_buckets: Sequence[str] = ()

    def head(self, size: TaskSize, worker_price: ResourceRef) -> RayTaskArgs:
        """Inputs of the head's task; none tells how many workers there are, so that it survives a change to them."""
        namespace = metrics_namespace(self.cluster.name)
        known = pulumi.Output.all(
            common=self._common(size),
            bucket=self.bucket.name,
            metrics_namespace=namespace,
            price_parameter=worker_price.name,
        )
        return RayTaskArgs(
            container=known.apply(
                lambda values: json.dumps(
                    [
                        containers.head(
                            values["common"],
                            bucket=values["bucket"],
                            metrics_namespace=values["metrics_namespace"],
                            price_parameter=values["price_parameter"],
                        )
                    ]
                )
            ),
            size=size,
            task_trust=self._task_trust(),
            execution_policy=self._execution_policy(),
            task_policy=self._task_policy(metrics_namespace=namespace, price_arn=worker_price.arn),
            state_volume=containers.STATE_VOLUME,
        )

    def worker(self, size: TaskSize, head_host: pulumi.Input[str]) -> RayTaskArgs:
        """Inputs of a worker's task; `head_host` is the DNS name under which it finds the head."""
        known = pulumi.Output.all(common=self._common(size), head_host=head_host)
        return RayTaskArgs(
            container=known.apply(
                lambda values: json.dumps([containers.worker(values["common"], head_host=values["head_host"])])
            ),
            size=size,
            task_trust=self._task_trust(),
            execution_policy=self._execution_policy(),
            task_policy=self._task_policy(),
        )

    def _common(self, size: TaskSize) -> pulumi.Output[ContainerDefaults]:
        known = pulumi.Output.all(image=self.image_uri, log_group=self.logs.name, token_arn=self.token_parameter_arn)
        return known.apply(lambda values: ContainerDefaults(region=self.location.region, size=size, **values))

    def _execution_policy(self) -> pulumi.Output[str]:
        return pulumi.Output.all(
            image_uri=self.image_uri, log_group_arn=self.logs.arn, token_arn=self.token_parameter_arn
        ).apply(lambda inputs: json.dumps(policies.execution(partition=self.location.partition, **inputs)))

    def _task_trust(self) -> policies.Policy:
        place = self.location
        return policies.assumed_by_tasks(partition=place.partition, region=place.region, account=place.account)

    def _task_policy(self, **given: pulumi.Input[str]) -> pulumi.Output[str]:
        return pulumi.Output.all(bucket_arn=self.bucket.arn, **given).apply(
            lambda inputs: json.dumps(
                policies.training(partition=self.location.partition, data_buckets=self.data_buckets, **inputs)
            )
        )
