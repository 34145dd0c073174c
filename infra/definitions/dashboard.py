"""The body of the stack's CloudWatch dashboard, as data.

Graphs go by cluster, service and the stack's own namespace, never by instance: instances come and go.
https://docs.aws.amazon.com/AmazonCloudWatch/latest/APIReference/CloudWatch-Dashboard-Body-Structure.html
"""

from __future__ import annotations

from typing import Any

from infra.definitions.metrics import ECS, Metric, of_service

WIDTH, HEIGHT = 8, 6
COLUMNS = 3

Lines = list[list[Any]]


def body(*, region: str, namespace: str, cluster: str, services: dict[str, str]) -> dict[str, Any]:
    """The dashboard of one stack: a row for the job, one for the GPUs and one for ECS, and the CPU workers' CPUs.

    `services` are the names of the ECS services of "head", "workers" and, if there are any, "cpu-workers".
    """
    graphs = {**_of_the_job(namespace), **_of_the_gpus(namespace), **_of_ecs(cluster, services)}
    if "cpu-workers" in services:
        graphs |= _of_the_cpu_workers(namespace)
    return {"widgets": [_graph(index, title, lines, region) for index, (title, lines) in enumerate(graphs.items())]}


def _of_the_job(namespace: str) -> dict[str, Lines]:
    return {
        "Loss": [_own(namespace, "TrainLoss", "train"), _own(namespace, "TestLoss", "test")],
        "Test accuracy": [_own(namespace, "TestAccuracy", "test accuracy")],
        "Samples a second, all workers": [_own(namespace, "SamplesPerSecond", "samples/s")],
    }


def _of_the_gpus(namespace: str) -> dict[str, Lines]:
    return {
        "GPU use": [
            _own(namespace, "GPUUtilization", "mean"),
            _own(namespace, "GPUUtilization", "idlest", "Minimum"),
        ],
        "GPU memory": [
            _own(namespace, "GPUMemoryUtilization", "mean"),
            _own(namespace, "GPUMemoryUtilization", "fullest", "Maximum"),
        ],
        "GPUs": [
            _own(namespace, "GPUs", "in the cluster"),
            _own(namespace, "GPUsUsed", "used", "Maximum"),
            _own(namespace, "GPUsRequested", "requested by jobs", "Maximum"),
        ],
    }


def _of_the_cpu_workers(namespace: str) -> dict[str, Lines]:
    return {
        "CPUs of the CPU workers": [
            _own(namespace, "CPUs", "in the cluster"),
            _own(namespace, "CPUsRequested", "requested by jobs", "Maximum"),
        ],
    }


def _of_ecs(cluster: str, services: dict[str, str]) -> dict[str, Lines]:
    return {
        "Tasks": [
            of_service(f"{kind}TaskCount", cluster, service).line(f"{name}, {label}")
            for name, service in services.items()
            for kind, label in (("Running", "running"), ("Desired", "wanted"))
        ],
        "CPU and memory": [
            of_service(f"{kind}Utilization", cluster, service, namespace=ECS).line(f"{name}, {kind}")
            for name, service in services.items()
            for kind in ("CPU", "Memory")
        ],
        "Network of the workers": [
            of_service(f"Network{way}Bytes", cluster, services["workers"]).line(label)
            for way, label in (("Rx", "received"), ("Tx", "sent"))
        ],
    }


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
