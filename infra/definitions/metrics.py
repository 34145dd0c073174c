"""CloudWatch metrics of the stack, for alarms and dashboard.

Metrics of ECS and EC2 Auto Scaling have the service or group as dimension. Metrics that the head and the training job
publish each minute are in one namespace per cluster, without dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# A string, or a Pulumi Output of one.
Name = Any

CONTAINER_INSIGHTS = "ECS/ContainerInsights"
ECS = "AWS/ECS"
AUTO_SCALING = "AWS/AutoScaling"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """CloudWatch metric with a statistic."""

    namespace: Name
    name: str
    stat: str
    dimensions: dict[str, Name] = field(default_factory=dict)

    def line(self, label: str) -> list[Any]:
        """Metric in the array form of a dashboard widget."""
        dimensions = [part for pair in self.dimensions.items() for part in pair]
        return [self.namespace, self.name, *dimensions, {"label": label, "stat": self.stat}]


def of_service(
    name: str,
    cluster: Name,
    service: Name,
    stat: str = "Average",
    namespace: str = CONTAINER_INSIGHTS,
) -> Metric:
    """ECS metric of one service; Container Insights publishes none without a running task."""
    dimensions = {"ClusterName": cluster, "ServiceName": service}
    return Metric(namespace=namespace, name=name, stat=stat, dimensions=dimensions)


def of_group(group: Name) -> dict[str, Metric]:
    """Numbers of running and of wanted instances of an Auto Scaling group, by their names in expressions."""
    names = {"instances": "GroupInServiceInstances", "wanted": "GroupDesiredCapacity"}
    dimensions = {"AutoScalingGroupName": group}
    return {
        key: Metric(namespace=AUTO_SCALING, name=name, stat="Maximum", dimensions=dimensions)
        for key, name in names.items()
    }
