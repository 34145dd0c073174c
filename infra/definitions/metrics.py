"""CloudWatch's metrics of the stack, as alarms and graphs take them.

ECS's and EC2's own go by the names of service and group. The stack's own, which the head and the training job publish
each minute, have a namespace for each cluster and need no dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# A name, or Pulumi's promise of one.
Name = Any

CONTAINER_INSIGHTS = "ECS/ContainerInsights"
ECS = "AWS/ECS"
AUTO_SCALING = "AWS/AutoScaling"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric, and the statistic of it that is looked at."""

    namespace: Name
    name: str
    stat: str
    dimensions: dict[str, Name] = field(default_factory=dict)

    def line(self, label: str) -> list[Any]:
        """The metric as a dashboard's graph takes it."""
        dimensions = [part for pair in self.dimensions.items() for part in pair]
        return [self.namespace, self.name, *dimensions, {"label": label, "stat": self.stat}]


def of_service(
    name: str,
    cluster: Name,
    service: Name,
    stat: str = "Average",
    namespace: str = CONTAINER_INSIGHTS,
) -> Metric:
    """A metric that ECS publishes for one service; none of Container Insights' is there without a running task."""
    dimensions = {"ClusterName": cluster, "ServiceName": service}
    return Metric(namespace=namespace, name=name, stat=stat, dimensions=dimensions)
