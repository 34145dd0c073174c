"""CloudWatch dashboard body.

Its metrics have the dimensions cluster and service or the cluster's namespace, and not instance IDs, which change.
https://docs.aws.amazon.com/AmazonCloudWatch/latest/APIReference/CloudWatch-Dashboard-Body-Structure.html
"""

from __future__ import annotations

from typing import Any

from infra.definitions.metrics import ECS, Metric, of_service
from ray_on_ecs.contract import CPU_WORKERS, KIND_DIMENSION, WORKERS

WIDTH, HEIGHT = 8, 6
COLUMNS = 3

Lines = list[list[Any]]


def body(*, region: str, namespace: str, cluster: str, services: dict[str, str]) -> dict[str, Any]:
    """Dashboard with a row each for training, GPUs and ECS, and with graphs of the CPU workers and other node groups.

    `services` has the names of the ECS services by kind, e.g. "head", "workers", "cpu-workers" and "h100-workers".
    """
    others = services.keys() - {"head", WORKERS, CPU_WORKERS}
    gpus = _gpus(namespace, f"GPUs of {WORKERS}" if others else "GPUs")
    graphs: dict[str, Lines] = {
        "Loss": [_own(namespace, "TrainLoss", "train"), _own(namespace, "TestLoss", "test")],
        "Test accuracy": [_own(namespace, "TestAccuracy", "test accuracy")],
        "Samples a second, all workers": [_own(namespace, "SamplesPerSecond", "samples/s")],
        **gpus,
        **_ecs(cluster, services),
    }
    if CPU_WORKERS in services:
        graphs["CPUs of the CPU workers"] = [
            _own(namespace, "CPUs", "in the cluster"),
            _own(namespace, "CPUsRequested", "requested by jobs", "Maximum"),
        ]
    if others:
        graphs["GPUs and CPUs of the other node groups"] = [_of_others(namespace)]
    return {"widgets": [_graph(index, title, lines, region) for index, (title, lines) in enumerate(graphs.items())]}


def _gpus(namespace: str, title: str) -> dict[str, Lines]:
    return {
        "GPU use": [
            _own(namespace, "GPUUtilization", "mean"),
            _own(namespace, "GPUUtilization", "idlest", "Minimum"),
        ],
        "GPU memory": [
            _own(namespace, "GPUMemoryUtilization", "mean"),
            _own(namespace, "GPUMemoryUtilization", "fullest", "Maximum"),
        ],
        title: [
            _own(namespace, "GPUs", "in the cluster"),
            _own(namespace, "GPUsUsed", "used", "Maximum"),
            _own(namespace, "GPUsRequested", "requested by jobs", "Maximum"),
        ],
    }


def _ecs(cluster: str, services: dict[str, str]) -> dict[str, Lines]:
    tasks, utilization = [], []
    for name, service in services.items():
        for kind, label in (("Running", "running"), ("Desired", "wanted")):
            tasks.append(of_service(f"{kind}TaskCount", cluster, service).line(f"{name}, {label}"))
        for kind in ("CPU", "Memory"):
            metric = of_service(f"{kind}Utilization", cluster, service, namespace=ECS)
            utilization.append(metric.line(f"{name}, {kind}"))
    network = [
        of_service(f"Network{way}Bytes", cluster, service).line(label if kind == WORKERS else f"{kind}, {label}")
        for kind, service in services.items()
        if kind not in ("head", CPU_WORKERS)
        for way, label in (("Rx", "received"), ("Tx", "sent"))
    ]
    return {"Tasks": tasks, "CPU and memory": utilization, "Network of the workers": network}


def _of_others(namespace: str) -> list[Any]:
    """Search for the metrics of all kinds that have the dimension, in place of lines for each of them."""
    names = " OR ".join(f'"{resource}{suffix}"' for resource in ("GPUs", "CPUs") for suffix in ("", "Requested"))
    search = f"SEARCH('{{\"{namespace}\",{KIND_DIMENSION}}} MetricName=({names})', 'Maximum')"
    return [{"expression": search, "label": f"${{PROP('Dim.{KIND_DIMENSION}')}}, ${{PROP('MetricName')}}"}]


def _own(namespace: str, name: str, label: str, stat: str = "Average") -> list[Any]:
    return Metric(namespace=namespace, name=name, stat=stat).line(label)


def _graph(index: int, title: str, lines: Lines, region: str) -> dict[str, Any]:
    row, column = divmod(index, COLUMNS)
    return {
        "type": "metric",
        "x": column * WIDTH,
        "y": row * HEIGHT,
        "width": WIDTH,
        "height": HEIGHT,
        "properties": {"title": title, "region": region, "period": 60, "view": "timeSeries", "metrics": lines},
    }
