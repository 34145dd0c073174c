"""CloudWatch metrics of the cluster's resources and demand, published once per minute by a thread of the head.

The thread runs if CLOUDWATCH_NAMESPACE is set. Each stack has a separate namespace, so the metrics of the default pool
and of the CPU workers don't need dimensions; those of other kinds of worker have KIND_DIMENSION. The stack scales the
workers by them, and stops a head that sleeps by its idle time. A failure costs one line in the log.
"""

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from ray_on_ecs.aws import client
from ray_on_ecs.cluster_info import read_cluster_info
from ray_on_ecs.contract import (
    CLOUDWATCH_NAMESPACE_VARIABLE,
    CPU_WORKERS,
    HEAD_IDLE,
    HEAD_REQUESTED,
    KIND_DIMENSION,
    WORKERS,
)
from ray_on_ecs.errors import one_line
from ray_on_ecs.jobs.documents import Wake
from ray_on_ecs.node import api, demand, numbers, ports
from ray_on_ecs.node.demand import Need
from ray_on_ecs.node.idle import Idle
from ray_on_ecs.node.outage import Outage

logger = logging.getLogger(__name__)

PUBLISH_SECONDS = 60.0  # the resolution of a standard metric
# Short, because the next minute brings newer values.
LIMITS = {"connect_seconds": 5, "read_seconds": 10, "attempts": 2}

Datum = dict[str, Any]


def start(idle: Idle | None = None) -> None:
    """Start the thread, if there is a namespace; it ends with this process. `idle` is of a head that sleeps."""
    namespace = os.environ.get(CLOUDWATCH_NAMESPACE_VARIABLE)
    if namespace:
        work = partial(publish, namespace, idle)
        threading.Thread(target=repeat, args=(work,), name="metrics", daemon=True).start()


def repeat(work: Callable[[], None]) -> None:
    """Call `work` every minute, starting after a minute, and print when it begins to fail and recovers."""
    outage, due = Outage("metrics: the publication", seconds=0), time.monotonic()
    while True:
        due += PUBLISH_SECONDS  # from start to start, so that every minute has a value
        time.sleep(max(0.0, due - time.monotonic()))
        outage.attempt(work, time.monotonic())


def publish(namespace: str, idle: Idle | None = None) -> None:
    """Publish the current values; any of urllib's, Ray's or boto's errors if one doesn't answer or refuses.

    A head that sleeps also publishes its idle time. If Ray or AWS does not answer, it is busy: a run may be under way.
    """
    cloudwatch = client("cloudwatch", **LIMITS)
    # The metrics that scale workers and head go first, so that they don't depend on the dashboard, which has the GPUs'
    # utilization.
    try:
        data = of_demand()
    except Exception as cause:
        if idle:
            idle.note("metrics", one_line(cause) or type(cause).__name__)
            cloudwatch.put_metric_data(Namespace=namespace, MetricData=of_idle(idle))
        raise
    cloudwatch.put_metric_data(Namespace=namespace, MetricData=[*data, *(of_idle(idle) if idle else [])])
    try:
        nodes = api.ask(f"http://127.0.0.1:{ports.DASHBOARD}/nodes?view=summary")
    except OSError as cause:
        raise OSError(f"only the GPU utilization: {cause}") from cause  # the other metrics are published
    if data := utilization(nodes):
        cloudwatch.put_metric_data(Namespace=namespace, MetricData=data)


def of_demand() -> list[Datum]:
    """Return the metrics of all kinds of worker; any of Ray's errors if it does not answer.

    OSError if AWS has not told the kinds yet. Their alarms keep all workers of a head that publishes nothing.
    """
    info = read_cluster_info()
    if info is None:
        raise OSError("the cluster info can't be read")
    needs = numbers.as_alarms_see(info, demand.read(ports.own_gcs(), info).needs)
    logger.debug(f"metrics: {needs}")
    return [each for kind, need in needs.items() for each in of_kind(kind, need, bool(info["groups"][kind]["gpu"]))]


def of_idle(idle: Idle) -> list[Datum]:
    """Return the head's idle time in minutes, which is not a unit of CloudWatch; a busy head also requests itself."""
    return [_datum(HEAD_IDLE, "None", [idle.minutes]), *([head_requested()] if idle.is_busy else [])]


def head_requested(value: float = 1) -> Datum:
    """Return the metric of a request for a head that sleeps, in the resolution that its alarm has: seconds.

    Without a time: CloudWatch takes the one at which it receives it, and the clocks of laptops may be wrong.
    """
    return {**_datum(HEAD_REQUESTED, "None", [value]), "StorageResolution": 1}


def request_head(wake: Wake) -> None:
    """Publish a request for the next head; any of boto's errors."""
    cloudwatch = client("cloudwatch", region_name=wake.region, **LIMITS)
    cloudwatch.put_metric_data(Namespace=wake.namespace, MetricData=[head_requested()])


def of_kind(kind: str, need: Need, with_gpus: bool) -> list[Datum]:
    """Return the metrics of one kind of worker.

    RunProgress=0 is a baseline: alarms take the maximum, so a run's value wins, and without a run the metric is 0
    instead of missing.
    """
    unit = "GPU" if with_gpus else "CPU"
    counts = {
        f"{unit}s": need.available,
        f"{unit}sRequested": need.requested,
        f"{unit}sUsed": need.used,
        f"{unit}NodesInUse": need.in_use,
        **({"RunProgress": 0} if with_gpus else {}),
    }
    dimensions = [] if kind in (WORKERS, CPU_WORKERS) else [{"Name": KIND_DIMENSION, "Value": kind}]
    return [{**_datum(name, "Count", [value]), "Dimensions": dimensions} for name, value in counts.items()]


def utilization(nodes: Any) -> list[Datum]:
    """Return each GPU's utilization and memory utilization, in whole percent, from the dashboard's summary of nodes.

    The dashboard keeps dead nodes for a while, and has None or -1 for a GPU that doesn't report its utilization.
    """
    busy_percent: list[float] = []
    memory_percent: list[float] = []
    for node in nodes["data"]["summary"]:
        if node["raylet"].get("state") != "ALIVE":
            continue
        for gpu in node.get("gpus", ()):
            if gpu["utilizationGpu"] is not None and gpu["utilizationGpu"] >= 0:
                busy_percent.append(gpu["utilizationGpu"])
            if gpu["memoryTotal"]:
                memory_percent.append(round(100 * gpu["memoryUsed"] / gpu["memoryTotal"]))
    percent = {"GPUUtilization": busy_percent, "GPUMemoryUtilization": memory_percent}
    return [_datum(name, "Percent", values) for name, values in percent.items() if values]


def _datum(name: str, unit: str, values: list[float]) -> Datum:
    """Return values with their counts. CloudWatch accepts up to 150 distinct ones, and there are 101 percentages."""
    counts = Counter(values)
    return {"MetricName": name, "Unit": unit, "Values": [*counts], "Counts": [*counts.values()]}
