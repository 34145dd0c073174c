"""The body of the stack's CloudWatch dashboard, as data.

Graphs go by cluster, service and the stack's own namespace, never by instance: instances come and go.
https://docs.aws.amazon.com/AmazonCloudWatch/latest/APIReference/CloudWatch-Dashboard-Body-Structure.html
"""

from __future__ import annotations

from typing import Any

from infra.alarms import CONTAINER_INSIGHTS, ECS

WIDTH, HEIGHT = 8, 6
COLUMNS = 3

Line = list[Any]


def body(*, region: str, namespace: str, cluster: str, head: str, workers: str) -> dict[str, Any]:
    """The dashboard of one stack, a row for the job, one for the GPUs and one for ECS."""
    own = Own(namespace)
    both = {"head": Service(cluster, head), "workers": Service(cluster, workers)}
    graphs = {
        "Loss": [own.line("TrainLoss", "train"), own.line("TestLoss", "test")],
        "Test accuracy": [own.line("TestAccuracy", "test accuracy")],
        "Samples a second, all workers": [own.line("SamplesPerSecond", "samples/s")],
        "GPU use": [own.line("GPUUtilization", "mean"), own.line("GPUUtilization", "idlest", "Minimum")],
        "GPU memory": [
            own.line("GPUMemoryUtilization", "mean"),
            own.line("GPUMemoryUtilization", "fullest", "Maximum"),
        ],
        "GPUs": [own.line("GPUs", "in the cluster"), own.line("GPUsWanted", "wanted by jobs", "Maximum")],
        "Tasks": [
            line
            for name, service in both.items()
            for line in (
                service.line(CONTAINER_INSIGHTS, "RunningTaskCount", f"{name}, running"),
                service.line(CONTAINER_INSIGHTS, "DesiredTaskCount", f"{name}, wanted"),
            )
        ],
        "CPU and memory": [
            service.line(ECS, f"{kind}Utilization", f"{name}, {kind}")
            for name, service in both.items()
            for kind in ("CPU", "Memory")
        ],
        "Network of the workers": [
            both["workers"].line(CONTAINER_INSIGHTS, f"Network{way}Bytes", label)
            for way, label in (("Rx", "received"), ("Tx", "sent"))
        ],
    }
    return {"widgets": [_graph(index, title, lines, region) for index, (title, lines) in enumerate(graphs.items())]}


class Own:
    """Lines from the stack's own metrics, which have no dimension beside their namespace."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def line(self, metric: str, label: str, stat: str = "Average") -> Line:
        """A metric as a graph takes it."""
        return [self._namespace, metric, {"label": label, "stat": stat}]


class Service:
    """Lines from the metrics that ECS publishes for one service."""

    def __init__(self, cluster: str, service: str) -> None:
        self._dimensions = ["ClusterName", cluster, "ServiceName", service]

    def line(self, namespace: str, metric: str, label: str) -> Line:
        """A metric as a graph takes it."""
        return [namespace, metric, *self._dimensions, {"label": label, "stat": "Average"}]


def _graph(index: int, title: str, lines: list[Line], region: str) -> dict[str, Any]:
    row, column = divmod(index, COLUMNS)
    return {
        "type": "metric",
        "x": column * WIDTH,
        "y": row * HEIGHT,
        "width": WIDTH,
        "height": HEIGHT,
        "properties": {"title": title, "region": region, "period": 60, "view": "timeSeries", "metrics": lines},
    }
