"""CloudWatch metrics of a run: a heartbeat, and the metrics that its script logs.

A separate thread publishes them if the stack has a namespace. Training continues whatever goes wrong here.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ray_on_ecs.aws import BAD_CREDENTIALS, DENIED, SKEWED, client
from ray_on_ecs.contract import KIND_DIMENSION, WORKERS
from ray_on_ecs.errors import one_line
from ray_on_ecs.periodic import run_every
from ray_on_ecs.tracking.run_monitor import RunMonitor

logger = logging.getLogger(__name__)

PUBLISH_SECONDS = 60.0  # the resolution of a standard metric
LIMITS: dict[str, Any] = {"connect_seconds": 5, "read_seconds": 10, "attempts": 2}
# Of a call: metrics, and distinct values of each. All values of a call, so that it is below 1 MB with 130 bytes each.
# https://docs.aws.amazon.com/AmazonCloudWatch/latest/APIReference/API_PutMetricData.html
MAX_DATA, MAX_VALUES, MAX_VALUES_PER_CALL = 1000, 150, 5000
# The range of values. Between the smallest ones and 0 CloudWatch's documents differ.
# https://docs.aws.amazon.com/AmazonCloudWatch/latest/APIReference/API_MetricDatum.html
LARGEST, SMALLEST = 2.0**360, 2.0**-360
NAME = re.compile(r"[!-9;-~][ -~]{0,254}")
# Names of a run's metrics, and the price of each: https://aws.amazon.com/cloudwatch/pricing/
MAX_NAMES, METRIC_USD = 50, 0.30
MAX_CALLS = 200  # of a publication
PROGRESS = "RunProgress"
# Metrics of the cluster, by which the stack scales (ray_on_ecs/node/metrics.py).
OF_HEAD = {
    *("GPUs", "GPUsRequested", "GPUsUsed", "GPUNodesInUse", "GPUUtilization", "GPUMemoryUtilization", PROGRESS),
    *("CPUs", "CPUsRequested", "CPUsUsed", "CPUNodesInUse"),
}
Datum = dict[str, Any]


@contextmanager
def publish_metrics(
    monitor: RunMonitor, namespace: str | None, kinds: Callable[[], Collection[str]]
) -> Generator[None]:
    """Publish the run's metrics until the block ends, and the remaining ones then unless the user interrupts the run.

    Does nothing without a namespace. `kinds` returns the kinds of the nodes where the run trains.
    """
    if namespace is None:
        yield
        return
    publisher = Publisher(monitor, namespace, kinds)
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
    RunProgress is sent first and alone, so no other metric holds it up. Its dimension is the kind of node, as each
    kind has its own alarm; that of WORKERS has none.
    """

    def __init__(self, monitor: RunMonitor, namespace: str, kinds: Callable[[], Collection[str]]) -> None:
        self._monitor = monitor
        self._namespace = namespace
        self._kinds = kinds
        self._published_steps = 0
        self._taken = 0  # records of the history
        self._waiting: list[Datum] = []  # that CloudWatch has neither accepted nor refused
        self._names: set[str] = set()
        self._said: set[str] = set()

    def publish(self) -> None:
        """Publish new metrics. Only the first failure is shown; its metrics are published with the next ones."""
        try:
            self._publish_progress()
            self._publish_metrics()
        except Exception as cause:
            reason = one_line(f"{type(cause).__name__}: {cause}")
            self._say_once("failure", f"CloudWatch does not accept the run's metrics; training continues ({reason})")

    def _publish_progress(self) -> None:
        steps_made = self._monitor.steps_made
        steps = max(steps_made - self._published_steps, 1)
        datum: Datum = {"MetricName": PROGRESS, "Unit": "Count", "Value": steps}
        of_kind = {kind: {"Dimensions": [{"Name": KIND_DIMENSION, "Value": kind}]} for kind in self._kinds()}
        self._put([datum if kind == WORKERS else datum | more for kind, more in of_kind.items()])
        self._published_steps = steps_made

    def _publish_metrics(self) -> None:
        new = self._monitor.history[self._taken :]
        self._waiting += self._data(new)
        self._taken += len(new)
        size = MAX_DATA
        for _ in range(MAX_CALLS):
            if not self._waiting:
                return
            batch = self._waiting[: min(size, _fitting(self._waiting))]
            try:
                self._put(batch)
            except Exception as cause:
                if not _is_refusal(cause):
                    raise
                # CloudWatch refuses a whole call for one of its values: look for it.
                size = len(batch) // 2
                if size:
                    continue
                self._say_once("refusal", f"CloudWatch refuses metric {batch[0]['MetricName']} ({one_line(cause)})")
            del self._waiting[: len(batch)]
            size = MAX_DATA

    def _put(self, data: list[Datum]) -> None:
        client("cloudwatch", **LIMITS).put_metric_data(Namespace=self._namespace, MetricData=data)

    def _data(self, records: Iterable[dict[str, Any]]) -> Iterator[Datum]:
        """Yield the values that CloudWatch accepts, by metric."""
        values: defaultdict[str, Counter[float]] = defaultdict(Counter)
        for record in records:
            for key, value in record.items():
                name = "".join(word[:1].upper() + word[1:] for word in key.split("_"))
                if not isinstance(value, float) or not math.isfinite(value) or not self._takes(key, name):
                    continue
                if abs(value) > LARGEST:
                    self._say_once("value", f"CloudWatch takes no value beyond 2^360, such as {key}={value:g}")
                    continue
                values[name][value if abs(value) >= SMALLEST else 0.0] += 1
        for name, counts in values.items():
            unit = "Count/Second" if name == "SamplesPerSecond" else "None"
            distinct = list(counts.items())
            for start in range(0, len(distinct), MAX_VALUES):
                part = dict(distinct[start : start + MAX_VALUES])
                yield {"MetricName": name, "Unit": unit, "Values": [*part], "Counts": [*part.values()]}

    def _takes(self, key: str, name: str) -> bool:
        """Return whether a metric is published; say once why one is not."""
        if name in self._names:
            return True
        if name in OF_HEAD:
            self._say_once("head", f"metric {key} is not published to CloudWatch, where the head has one of its name")
        elif not NAME.fullmatch(name):
            self._say_once(
                "name", f"metric {one_line(key)} is not published: CloudWatch takes names in ASCII up to 255"
            )
        elif len(self._names) >= MAX_NAMES:
            cost = f"each costs up to {METRIC_USD:.2f} USD a month"
            self._say_once("names", f"CloudWatch gets the run's first {MAX_NAMES} metrics, without {key}: {cost}")
        else:
            self._names.add(name)
            return True
        return False

    def _say_once(self, kind: str, line: str) -> None:
        level = logging.DEBUG if kind in self._said else logging.WARNING
        logger.log(level, line)
        self._said.add(kind)


def _fitting(data: Sequence[Datum]) -> int:
    """Return how many of these fit into a call; at least one does."""
    totals = itertools.accumulate(len(datum["Values"]) for datum in data[:MAX_DATA])
    return max(1, sum(total <= MAX_VALUES_PER_CALL for total in totals))


def _is_refusal(cause: Exception) -> bool:
    """Return whether CloudWatch refuses a call for what is in it: the same call would be refused again."""
    from botocore.exceptions import ClientError, ParamValidationError

    if not isinstance(cause, ClientError):
        return isinstance(cause, ParamValidationError)
    status = cause.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    code = cause.response.get("Error", {}).get("Code", "")
    is_other = code in BAD_CREDENTIALS | SKEWED | DENIED or "Throttl" in code or "LimitExceeded" in code
    return 400 <= status < 500 and status not in (401, 403, 404, 407, 408, 429) and not is_other
