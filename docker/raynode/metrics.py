"""Tell CloudWatch once a minute what the cluster has and what it needs, from a thread of the head.

It does so where CLOUDWATCH_NAMESPACE names a namespace, which is one stack's alone, so that no metric has a dimension.
The stack starts and stops workers by it. Whatever goes wrong here is a line in the log and does no harm to the head.
"""

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

from raynode import address, api, demand, health, ports

NAMESPACE = "CLOUDWATCH_NAMESPACE"
SECONDS_BETWEEN = 60.0
CONNECT_SECONDS, READ_SECONDS, ATTEMPTS = 5, 10, 2
LONGEST_CAUSE = 200

Datum = dict[str, Any]


def start() -> None:
    """Begin to publish, if there is a namespace to publish to; it ends with this process."""
    if namespace := os.environ.get(NAMESPACE):
        threading.Thread(target=repeat, args=(lambda: publish(namespace),), name="metrics", daemon=True).start()


def repeat(work: Callable[[], None]) -> None:
    """Do the work every minute, first in a minute, when Ray is up; say when it begins to fail and when it ends to."""
    due, failing = time.monotonic(), False
    while True:
        due += SECONDS_BETWEEN  # from beat to beat, not from end to beginning: no minute stays without a value
        time.sleep(max(0.0, due - time.monotonic()))
        cause = _failure(work)
        if cause and not failing:
            print(f"ray-head: metrics: not published ({cause})", file=sys.stderr, flush=True)
        if failing and not cause:
            print("ray-head: metrics: published again", file=sys.stderr, flush=True)
        failing = cause is not None


def publish(namespace: str) -> None:
    """Publish what holds now; raises whatever keeps it from that."""
    for url in health.urls("head"):  # a client of a GCS that is silent would wait for it and fill the log meanwhile
        api.get(url)
    found = demand.read(f"{address.own()}:{ports.GCS}")
    # What workers are started and stopped by goes first: it depends on nothing of what follows. The runs' progress is
    # theirs to tell; beside theirs this 0 means nothing, and without any it says so.
    counts = {"GPUs": found.gpus, "GPUsWanted": found.gpus_wanted, "RunProgress": 0}
    _put(namespace, [_datum(name, "Count", [value]) for name, value in counts.items()])
    _put(namespace, utilization(api.get(f"http://127.0.0.1:{ports.DASHBOARD}/nodes?view=summary")))


def utilization(nodes: Any) -> list[Datum]:
    """How busy and how full each GPU is, in whole percent, from the dashboard's summary of the nodes.

    The dashboard keeps dead nodes for a while, and has None or -1 where a GPU doesn't tell how busy it is.
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
    """A client that gives up soon: the next minute brings newer values."""
    import boto3
    from botocore.config import Config

    retries = {"total_max_attempts": ATTEMPTS}
    return boto3.client(
        "cloudwatch", config=Config(connect_timeout=CONNECT_SECONDS, read_timeout=READ_SECONDS, retries=retries)
    )


def _datum(name: str, unit: str, values: list[float]) -> Datum:
    """Values as CloudWatch takes them: each once, with how often it is there; it takes 150, and percents are 101."""
    counts = Counter(values)
    return {"MetricName": name, "Unit": unit, "Values": [*counts], "Counts": [*counts.values()]}


def _put(namespace: str, data: list[Datum]) -> None:
    if data:
        cloudwatch().put_metric_data(Namespace=namespace, MetricData=data)


def _failure(work: Callable[[], None]) -> str | None:
    """What kept the work from being done, on one line, or None."""
    try:
        work()
    except Exception as cause:
        return f"{type(cause).__name__}: {' '.join(str(cause).split())}"[:LONGEST_CAUSE]
    return None
