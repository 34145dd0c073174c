"""CloudWatch's metrics of the stack, and alarms on them, as data.

ECS's own metrics tell services apart by cluster and service. The stack's own ones, which the head and the training job
publish each minute, have a namespace for the stack and need no dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pulumi
import pulumi_aws as aws

from infra.handles import EcsService
from infra.tags import metrics_namespace

CONTAINER_INSIGHTS = "ECS/ContainerInsights"
ECS = "AWS/ECS"
PERIOD_SECONDS = 60


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric, and the statistic of it that is looked at."""

    namespace: str
    name: str
    stat: str
    dimensions: dict[str, pulumi.Input[str]] = field(default_factory=dict)

    def query(self, query_id: str, period: int = PERIOD_SECONDS) -> aws.cloudwatch.MetricAlarmMetricQueryArgs:
        """The metric as a variable of an alarm's expression."""
        return aws.cloudwatch.MetricAlarmMetricQueryArgs(
            id=query_id,
            metric=aws.cloudwatch.MetricAlarmMetricQueryMetricArgs(
                namespace=self.namespace,
                metric_name=self.name,
                stat=self.stat,
                period=period,
                dimensions=self.dimensions,
            ),
        )


def of_service(name: str, stat: str, service: EcsService) -> Metric:
    """A metric that Container Insights publishes for one service."""
    dimensions = {"ClusterName": service.cluster, "ServiceName": service.name}
    return Metric(namespace=CONTAINER_INSIGHTS, name=name, stat=stat, dimensions=dimensions)


def own(name: str, stat: str) -> Metric:
    """A metric that the head or the training job publishes."""
    return Metric(namespace=metrics_namespace(), name=name, stat=stat)
