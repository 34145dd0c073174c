"""Tell CloudWatch how far the run is: that it makes progress, and what each epoch came to.

Only where there is a namespace, and in a thread beside the training, which goes on whatever goes wrong here.
"""

import math
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape

from training.errors import one_line
from training.monitoring.run_state import read_run_state

LOOK_SECONDS = 5.0
SECONDS_BETWEEN = 60.0
CONNECT_SECONDS, READ_SECONDS, ATTEMPTS = 5, 10, 2
MOST_AT_ONCE = 1000  # https://docs.aws.amazon.com/AmazonCloudWatch/latest/APIReference/API_PutMetricData.html
LONGEST_WAIT = 2.0 * ATTEMPTS * (CONNECT_SECONDS + READ_SECONDS)

Datum = dict[str, Any]

EPOCH_METRICS = (
    ("TrainLoss", "None", "train_loss"),
    ("TestLoss", "None", "test_loss"),
    ("TestAccuracy", "None", "test_accuracy"),
    ("SamplesPerSecond", "Count/Second", "samples_per_second"),
)


def publish_metrics(run_state: Any, namespace: str | None, console: Console) -> AbstractContextManager[object]:
    """A context in which the run_state's progress is published; one that does nothing without a namespace."""
    return Publisher(run_state, namespace, console) if namespace else nullcontext()


class Publisher:
    """Publishes what is new on the run_state: the first at once, then every minute, and what is left at the end.

    A stack that stops what idles goes by RunProgress: 1 when a run begins, and then the steps that it has made.
    """

    def __init__(self, run_state: Any, namespace: str, console: Console) -> None:
        self._run_state, self._namespace, self._console = run_state, namespace, console
        self._begun, self._steps, self._epochs = False, 0, 0
        self._due, self._warned = 0.0, False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Publisher":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if error is None or isinstance(error, Exception):  # whoever interrupts a run doesn't wait for CloudWatch
            self._thread.join(LONGEST_WAIT)
            self._publish()

    def _watch(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            if time.monotonic() >= self._due:
                self._publish()

    def _publish(self) -> None:
        """Publish what is new; whatever goes wrong is said once, and tried again with what comes next."""
        try:
            self._publish_new()
        except Exception as cause:
            self._warn(one_line(f"{type(cause).__name__}: {cause}"))

    def _publish_new(self) -> None:
        if (state := read_run_state(self._run_state)) is None:
            return
        steps, epochs = state.steps_completed - self._steps, state.finished[self._epochs :]
        if data := [
            *_progress(steps if self._begun else steps + 1),
            *(datum for metrics in epochs for datum in _epoch(metrics)),
        ]:
            self._due = time.monotonic() + SECONDS_BETWEEN
            for first in range(0, len(data), MOST_AT_ONCE):
                part = data[first : first + MOST_AT_ONCE]
                self._client.put_metric_data(Namespace=self._namespace, MetricData=part)
            self._begun, self._steps, self._epochs = True, self._steps + steps, self._epochs + len(epochs)

    @cached_property
    def _client(self) -> Any:
        import boto3
        from botocore.config import Config

        retries = {"total_max_attempts": ATTEMPTS}
        return boto3.client(
            "cloudwatch", config=Config(connect_timeout=CONNECT_SECONDS, read_timeout=READ_SECONDS, retries=retries)
        )

    def _warn(self, cause: str) -> None:
        """Say it once: the training matters more."""
        if not self._warned:
            line = f"CloudWatch doesn't take the run's progress; the training goes on ({escape(cause)})"
            self._console.print(line, highlight=False, soft_wrap=True)
        self._warned = True


def _progress(steps_completed: int) -> list[Datum]:
    return [{"MetricName": "RunProgress", "Unit": "Count", "Value": steps_completed}] if steps_completed else []


def _epoch(metrics: dict[str, Any]) -> list[Datum]:
    """What an epoch came to, over all ranks; CloudWatch takes no loss that is infinite or not a number."""
    return [
        {"MetricName": name, "Unit": unit, "Value": metrics[key]}
        for name, unit, key in EPOCH_METRICS
        if isinstance(metrics.get(key), float) and math.isfinite(metrics[key])
    ]
