"""CloudWatch metrics of a run: a heartbeat, and the metrics that its script logs.

A separate thread publishes them if the stack has a namespace. Training continues whatever goes wrong here.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from ray_on_ecs.aws import client
from ray_on_ecs.errors import one_line
from ray_on_ecs.periodic import run_every
from ray_on_ecs.tracking.run_monitor import RunMonitor

logger = logging.getLogger(__name__)

PUBLISH_SECONDS = 60.0  # the resolution of a standard metric
LIMITS: dict[str, Any] = {"connect_seconds": 5, "read_seconds": 10, "attempts": 2}
MAX_DATA_PER_CALL = 1000  # https://docs.aws.amazon.com/AmazonCloudWatch/latest/APIReference/API_PutMetricData.html


@contextmanager
def publish_metrics(monitor: RunMonitor, namespace: str | None) -> Generator[None]:
    """Publish the run's metrics until the block ends, and the remaining ones then unless the user interrupts the run.

    Does nothing without a namespace.
    """
    if namespace is None:
        yield
        return
    publisher = Publisher(monitor, namespace)
    try:
        with run_every(PUBLISH_SECONDS, publisher.publish, "cloudwatch", at_once=True):
            yield
    finally:
        if not isinstance(sys.exception(), KeyboardInterrupt | SystemExit):
            publisher.publish()


class Publisher:
    """Publishes new metrics; `train_loss` becomes TrainLoss.

    The idle alarm watches RunProgress: the steps since the last publication, and 1 if there were none. So a run that
    loads its data, validates or compiles is not idle. A run that hangs is ended, and publishes nothing afterwards.
    """

    def __init__(self, monitor: RunMonitor, namespace: str) -> None:
        self._monitor = monitor
        self._namespace = namespace
        self._published_steps = 0
        self._published = 0
        self._warned = False

    def publish(self) -> None:
        """Publish new metrics. Only the first failure is shown; its metrics are published with the next ones."""
        try:
            self._publish_new()
        except Exception as cause:
            level = logging.DEBUG if self._warned else logging.WARNING
            reason = one_line(f"{type(cause).__name__}: {cause}")
            logger.log(level, f"CloudWatch does not accept the run's metrics; training continues ({reason})")
            self._warned = True

    def _publish_new(self) -> None:
        steps_made = self._monitor.steps_made
        new = self._monitor.history[self._published :]
        steps = max(steps_made - self._published_steps, 1)
        data: list[dict[str, Any]] = [{"MetricName": "RunProgress", "Unit": "Count", "Value": steps}]
        for metrics in new:
            for key, value in metrics.items():
                if isinstance(value, float) and math.isfinite(value):  # CloudWatch rejects infinities and NaN
                    name = "".join(word[:1].upper() + word[1:] for word in key.split("_"))
                    unit = "Count/Second" if name == "SamplesPerSecond" else "None"
                    data.append({"MetricName": name, "Unit": unit, "Value": value})
        cloudwatch = client("cloudwatch", **LIMITS)
        for start in range(0, len(data), MAX_DATA_PER_CALL):
            chunk = data[start : start + MAX_DATA_PER_CALL]
            cloudwatch.put_metric_data(Namespace=self._namespace, MetricData=chunk)
        self._published_steps = steps_made
        self._published += len(new)
