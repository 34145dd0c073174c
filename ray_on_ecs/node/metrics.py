"""CloudWatch metrics of the cluster's resources and demand, published once per minute by a thread of the head.

The thread runs if CLOUDWATCH_NAMESPACE is set. Each stack has a separate namespace, so the metrics don't need
dimensions. The stack scales GPU and CPU workers by them. A failure costs one line in the log.
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
from ray_on_ecs.contract import CLOUDWATCH_NAMESPACE_VARIABLE, CPU_WORKERS_VARIABLE
from ray_on_ecs.errors import failure_of
from ray_on_ecs.node import api, demand, ports

logger = logging.getLogger(__name__)

PUBLISH_SECONDS = 60.0  # the resolution of a standard metric
# Short, because the next minute brings newer values.
LIMITS = {"connect_seconds": 5, "read_seconds": 10, "attempts": 2}

Datum = dict[str, Any]


def start() -> None:
    """Start the thread, if there is a namespace; it ends with this process."""
    namespace = os.environ.get(CLOUDWATCH_NAMESPACE_VARIABLE)
    if namespace:
        threading.Thread(target=repeat, args=(partial(publish, namespace),), name="metrics", daemon=True).start()


def repeat(work: Callable[[], None]) -> None:
    """Call `work` every minute, starting after a minute, and print when it begins to fail and recovers."""
    due = time.monotonic()
    failing = False
    while True:
        due += PUBLISH_SECONDS  # from start to start, so that every minute has a value
        time.sleep(max(0.0, due - time.monotonic()))
        cause = failure_of(work)
        if cause and not failing:
            logger.warning(f"metrics: not published ({cause})")
        if failing and not cause:
            logger.warning("metrics: published again")  # the level, and so the stream, of its begin
        failing = cause is not None


def publish(namespace: str) -> None:
    """Publish the current values; any of urllib's, Ray's or boto's errors if one doesn't answer or refuses."""
    own_address = ports.own_gcs()
    api.check_gcs(own_address)  # a GCS client would wait for an unresponsive GCS and fill the log meanwhile
    current = demand.read(own_address, has_cpu_workers=os.environ.get(CPU_WORKERS_VARIABLE) == "true")
    # The metrics that scale the workers go first, so that they don't depend on the dashboard, which has the GPUs'
    # utilization. RunProgress=0 is a baseline: alarms take the maximum, so a run's value wins, and without a run the
    # metric is 0 instead of missing.
    counts = {
        "GPUs": current.gpus,
        "GPUsRequested": current.gpus_needed,
        "GPUsUsed": current.gpus_in_use,
        "GPUNodesInUse": current.workers_in_use,
        "RunProgress": 0,
    }
    if current.has_cpu_workers:
        counts |= {
            "CPUs": current.cpu_worker_cpus,
            "CPUsRequested": current.cpu_worker_cpus_needed,
            "CPUsUsed": current.cpu_worker_cpus_used,
            "CPUNodesInUse": current.cpu_workers_in_use,
        }
    logger.debug(f"metrics: {counts}")
    cloudwatch = client("cloudwatch", **LIMITS)
    data = [_datum(name, "Count", [value]) for name, value in counts.items()]
    cloudwatch.put_metric_data(Namespace=namespace, MetricData=data)
    try:
        nodes = api.get(f"http://127.0.0.1:{ports.DASHBOARD}/nodes?view=summary")
    except OSError as cause:
        raise OSError(f"only the GPU utilization: {cause}") from cause  # the other metrics are published
    if data := utilization(nodes):
        cloudwatch.put_metric_data(Namespace=namespace, MetricData=data)


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
