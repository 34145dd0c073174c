"""Publish to CloudWatch once per minute what the cluster has and what it needs, from a thread of the head.

The thread runs if CLOUDWATCH_NAMESPACE names a namespace. Each stack has its own namespace, so no metric has a
dimension. The stack starts and stops GPU and CPU workers by these metrics. A failure is a line in the log and does not
harm the head.
"""

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

from ray_on_ecs.contract import CLOUDWATCH_NAMESPACE_VARIABLE, CPU_WORKERS_VARIABLE
from ray_on_ecs.node import api, demand, gcs, ports

PUBLISH_SECONDS = 60.0
CONNECT_SECONDS = 5
READ_SECONDS = 10
ATTEMPTS = 2
LONGEST_CAUSE = 200

Datum = dict[str, Any]


def start() -> None:
    """Start the thread that publishes, if there is a namespace to publish to; it ends with this process."""
    if namespace := os.environ.get(CLOUDWATCH_NAMESPACE_VARIABLE):
        threading.Thread(target=repeat, args=(lambda: publish(namespace),), name="metrics", daemon=True).start()


def repeat(work: Callable[[], None]) -> None:
    """Call `work` every minute, for the first time after a minute, and print when it starts failing and recovers."""
    due = time.monotonic()
    failing = False
    while True:
        due += PUBLISH_SECONDS  # counted from start to start, so that every minute has a value
        time.sleep(max(0.0, due - time.monotonic()))
        cause = _failure(work)
        if cause and not failing:
            print(f"ray-head: metrics: not published ({cause})", file=sys.stderr, flush=True)
        if failing and not cause:
            print("ray-head: metrics: published again", file=sys.stderr, flush=True)
        failing = cause is not None


def publish(namespace: str) -> None:
    """Publish the present values.

    Raises:
        Exception: Ray didn't answer, or CloudWatch refused the values; any of urllib's, Ray's or boto's errors.
    """
    own = gcs.own_address()
    gcs.check(own)  # a GCS client would wait for an unresponsive GCS and fill the log meanwhile
    found = demand.read(own, has_cpu_workers=os.environ.get(CPU_WORKERS_VARIABLE) == "true")
    # The metrics that scale GPU and CPU workers go first, so that they don't depend on those of the GPUs, which the
    # dashboard knows. RunProgress=0 is a baseline: alarms take the maximum, so a run's own value wins; without a run
    # the metric reads 0 instead of being missing.
    counts = {
        "GPUs": found.gpus,
        "GPUsRequested": found.gpus_needed,
        "GPUsUsed": found.gpus_in_use,
        "GPUNodesInUse": found.workers_in_use,
        "RunProgress": 0,
    }
    if found.has_cpu_workers:
        counts |= {
            "CPUs": found.cpu_worker_cpus,
            "CPUsRequested": found.cpu_worker_cpus_needed,
            "CPUsUsed": found.cpu_worker_cpus_used,
            "CPUNodesInUse": found.cpu_workers_in_use,
        }
    _put(namespace, [_datum(name, "Count", [value]) for name, value in counts.items()])
    try:
        nodes = api.get(f"http://127.0.0.1:{ports.DASHBOARD}/nodes?view=summary")
    except OSError as cause:
        raise OSError(f"only the GPU utilization: {cause}") from cause
    _put(namespace, utilization(nodes))


def utilization(nodes: Any) -> list[Datum]:
    """Return each GPU's utilization and memory utilization, in whole percent, from the dashboard's summary of nodes.

    The dashboard keeps dead nodes for a while, and has None or -1 for a GPU that doesn't report its utilization.
    """
    alive = [node for node in nodes["data"]["summary"] if node["raylet"].get("state") == "ALIVE"]
    gpus = [gpu for node in alive for gpu in node.get("gpus", ())]
    percent = {
        "GPUUtilization": [busy for gpu in gpus if (busy := gpu["utilizationGpu"]) is not None and busy >= 0],
        "GPUMemoryUtilization": [
            round(100 * gpu["memoryUsed"] / total) for gpu in gpus if (total := gpu["memoryTotal"])
        ],
    }
    return [_datum(name, "Percent", values) for name, values in percent.items() if values]


@cache
def cloudwatch() -> Any:
    """Create a client that gives up soon, because the next minute brings newer values."""
    import boto3
    from botocore.config import Config

    retries = {"total_max_attempts": ATTEMPTS}
    return boto3.client(
        "cloudwatch", config=Config(connect_timeout=CONNECT_SECONDS, read_timeout=READ_SECONDS, retries=retries)
    )


def _datum(name: str, unit: str, values: list[float]) -> Datum:
    """Return values as CloudWatch takes them: up to 150 distinct ones with their counts; there are 101 percents."""
    counts = Counter(values)
    return {"MetricName": name, "Unit": unit, "Values": [*counts], "Counts": [*counts.values()]}


def _put(namespace: str, data: list[Datum]) -> None:
    if data:
        cloudwatch().put_metric_data(Namespace=namespace, MetricData=data)


def _failure(work: Callable[[], None]) -> str | None:
    """Call `work`; return why it failed, on one line, or None."""
    try:
        work()
    except Exception as cause:
        return f"{type(cause).__name__}: {' '.join(str(cause).split())}"[:LONGEST_CAUSE]
    return None
