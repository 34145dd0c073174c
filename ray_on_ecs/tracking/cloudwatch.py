"""CloudWatch metrics of a run: that it is alive, and what its script logs.

They are published only if there is a namespace, from a thread of its own: training continues whatever goes wrong here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from rich.console import Console
from rich.markup import escape

from ray_on_ecs.errors import one_line
from ray_on_ecs.periodic import run_every
from ray_on_ecs.tracking.run_monitor import RunMonitor

POLL_SECONDS = 5.0
PUBLISH_SECONDS = 60.0
CONNECT_SECONDS = 5
READ_SECONDS = 10
ATTEMPTS = 2
MAX_DATA_PER_CALL = 1000  # https://docs.aws.amazon.com/AmazonCloudWatch/latest/APIReference/API_PutMetricData.html

UNITS = {"SamplesPerSecond": "Count/Second"}

Datum = dict[str, Any]


@contextmanager
def publish_metrics(monitor: RunMonitor, namespace: str | None, console: Console) -> Generator[None]:
    """Publish the run's metrics until the block ends, and what is left then, unless the user interrupts the run.

    Does nothing without a namespace.
    """
    if namespace is None:
        yield
        return
    publisher = Publisher(monitor, namespace, console)
    with run_every(POLL_SECONDS, publisher.publish_if_due, "cloudwatch"):
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:
            publisher.publish()
            raise
    publisher.publish()


class Publisher:
    """Publishes what is new: the first metrics at once, later ones once a minute; `train_loss` is named TrainLoss.

    An idle stop goes by RunProgress: the steps made since the last time, and 1 if there are none. A run that loads its
    data, tests or compiles is not idle; one that hangs is ended, and publishes nothing from then on.

    Args:
        monitor: Knows the run.
        namespace: CloudWatch's namespace.
        console: Shows a failure, once.
    """

    def __init__(self, monitor: RunMonitor, namespace: str, console: Console) -> None:
        self._monitor = monitor
        self._namespace = namespace
        self._console = console
        self._published_steps = 0
        self._published = 0
        self._next_publish_at = 0.0
        self._warned = False

    def publish_if_due(self) -> None:
        """Publish if the last time is a minute ago."""
        if time.monotonic() >= self._next_publish_at:
            self.publish()

    def publish(self) -> None:
        """Publish what is new. A failure is shown once; its metrics are published with the next ones."""
        self._next_publish_at = time.monotonic() + PUBLISH_SECONDS
        try:
            self._publish_new()
        except Exception as cause:
            self._warn(one_line(f"{type(cause).__name__}: {cause}"))

    def _publish_new(self) -> None:
        steps_made = self._monitor.steps_made
        new = self._monitor.history[self._published :]
        steps = max(steps_made - self._published_steps, 1)
        data: list[Datum] = [{"MetricName": "RunProgress", "Unit": "Count", "Value": steps}]
        for metrics in new:
            data += self._data(metrics)
        for first in range(0, len(data), MAX_DATA_PER_CALL):
            part = data[first : first + MAX_DATA_PER_CALL]
            self._client.put_metric_data(Namespace=self._namespace, MetricData=part)
        self._published_steps = steps_made
        self._published += len(new)

    def _data(self, metrics: Any) -> list[Datum]:
        """Return the data of some metrics; CloudWatch takes no infinities and nothing that is not a number."""
        names = {_camel_case(key): value for key, value in metrics.items()}
        return [
            {"MetricName": name, "Unit": UNITS.get(name, "None"), "Value": value}
            for name, value in names.items()
            if isinstance(value, float) and math.isfinite(value)
        ]

    @cached_property
    def _client(self) -> Any:
        import boto3
        from botocore.config import Config

        retries = {"total_max_attempts": ATTEMPTS}
        return boto3.client(
            "cloudwatch", config=Config(connect_timeout=CONNECT_SECONDS, read_timeout=READ_SECONDS, retries=retries)
        )

    def _warn(self, cause: str) -> None:
        if not self._warned:
            line = f"CloudWatch does not accept the run's metrics; training continues ({escape(cause)})"
            self._console.print(line, highlight=False, soft_wrap=True)
        self._warned = True


def _camel_case(name: str) -> str:
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))
