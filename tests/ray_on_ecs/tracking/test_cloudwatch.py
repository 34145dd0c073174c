"""Metrics of a run in CloudWatch, on which the run does not depend."""

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import boto3
import pytest

from ray_on_ecs import aws
from ray_on_ecs.tracking import cloudwatch
from ray_on_ecs.tracking.cloudwatch import Publisher
from ray_on_ecs.tracking.run_monitor import RunMonitor
from tests.aws import MetricTotals, metric_totals
from tests.waiting import until

STEPS = 10
EPOCH = {"train_loss": 0.5, "test_loss": 0.75, "test_accuracy": 0.9, "samples_per_second": 1000.0}
Published = Callable[[], dict[str, MetricTotals]]


@pytest.fixture
def monitor(monkeypatch: pytest.MonkeyPatch, aws_variables: dict[str, str]) -> RunMonitor:
    """The driver's view of the run; the environment leads to the AWS of the tests."""
    for name, value in aws_variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # it would keep the credentials of another test
    return RunMonitor()


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> str:
    """One for each test: what CloudWatch holds stays until the tests end."""
    return request.node.name


@pytest.fixture
def publisher(monitor: RunMonitor, namespace: str) -> Publisher:
    return Publisher(monitor, namespace)


@pytest.fixture
def published(cloudwatch_client: Any, namespace: str) -> Published:
    return lambda: metric_totals(cloudwatch_client, namespace)


def finish(monitor: RunMonitor, epoch: int, **metrics: float) -> None:
    monitor.history.append({"epoch": epoch, **EPOCH, **metrics})
    monitor.steps_made += STEPS


def test_a_run_that_begins_is_progress(publisher: Publisher, published: Published) -> None:
    publisher.publish()
    assert published() == {"RunProgress": (1, 1, "Count")}


def test_the_steps_since_the_last_time_are_published(
    monitor: RunMonitor, publisher: Publisher, published: Published
) -> None:
    for monitor.steps_made in (3, 7):
        publisher.publish()
    assert published() == {"RunProgress": (2, 3 + 4, "Count")}


def test_run_between_steps_is_not_idle(monitor: RunMonitor, publisher: Publisher, published: Published) -> None:
    monitor.steps_made = 3
    for _ in range(3):
        publisher.publish()
    assert published() == {"RunProgress": (3, 3 + 1 + 1, "Count")}


def test_metrics_are_published_once(monitor: RunMonitor, publisher: Publisher, published: Published) -> None:
    for epoch in range(2):
        finish(monitor, epoch, test_accuracy=0.8 + epoch / 10)
        publisher.publish()
    assert published() == {
        "RunProgress": (2, 20, "Count"),
        "TrainLoss": (2, 1.0, "None"),
        "TestLoss": (2, 1.5, "None"),
        "TestAccuracy": (2, 0.8 + 0.9, "None"),
        "SamplesPerSecond": (2, 2000, "Count/Second"),
    }


def test_nan_loss_does_not_hide_other_metrics(monitor: RunMonitor, publisher: Publisher, published: Published) -> None:
    finish(monitor, 0, train_loss=math.nan, test_loss=math.inf)
    publisher.publish()
    assert set(published()) == {"RunProgress", "TestAccuracy", "SamplesPerSecond"}


def test_a_metric_may_be_missing(monitor: RunMonitor, publisher: Publisher, published: Published) -> None:
    monitor.history.append({"epoch": 0, "test_accuracy": 0.9, "train_loss": None})
    publisher.publish()
    assert set(published()) == {"RunProgress", "TestAccuracy"}


def test_metrics_are_published_at_start_and_end(monitor: RunMonitor, namespace: str, published: Published) -> None:
    monitor.steps_made = 1
    with cloudwatch.publish_metrics(monitor, namespace):
        until(lambda: bool(published()))
        monitor.steps_made = 9
    assert published() == {"RunProgress": (2, 1 + 8, "Count")}


def test_interrupt_does_not_wait_for_cloudwatch(monitor: RunMonitor, namespace: str, published: Published) -> None:
    def interrupt() -> None:
        with cloudwatch.publish_metrics(monitor, namespace):
            until(lambda: bool(published()))
            monitor.steps_made = 5
            raise SystemExit

    with pytest.raises(SystemExit):
        interrupt()
    assert published() == {"RunProgress": (1, 1, "Count")}


def test_a_run_that_fails_publishes_what_is_left(monitor: RunMonitor, namespace: str, published: Published) -> None:
    finish(monitor, 0)
    with (
        pytest.raises(RuntimeError),
        cloudwatch.publish_metrics(monitor, namespace),
    ):
        raise RuntimeError
    assert published()["TestAccuracy"].count == 1


def test_cloudwatch_outage_costs_one_line(
    monitor: RunMonitor,
    publisher: Publisher,
    published: Published,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    aws_server: str,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    for epoch in range(2):
        finish(monitor, epoch)
        publisher.publish()
    said = capsys.readouterr().out
    assert said.startswith("CloudWatch does not accept the run's metrics; training continues (EndpointConnectionError")
    assert said.count("\n") == 1
    monkeypatch.setenv("AWS_ENDPOINT_URL", aws_server)
    finish(monitor, 2)
    publisher.publish()
    assert published()["RunProgress"] == (1, 30, "Count")
    assert published()["TestAccuracy"].count == 3


def test_an_image_without_boto3_costs_a_line(
    monitor: RunMonitor, publisher: Publisher, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    for made in (aws._client, aws._session):
        made.cache_clear()
    finish(monitor, 0)
    publisher.publish()
    assert "training continues (ModuleNotFoundError" in capsys.readouterr().out


def test_without_a_namespace_boto3_is_not_imported() -> None:
    script = """if True:
        import sys, threading
        from ray_on_ecs.tracking import cloudwatch
        before = threading.active_count()
        with cloudwatch.publish_metrics(None, None):
            assert threading.active_count() == before
        sys.exit("boto3" in sys.modules)
    """
    assert subprocess.run([sys.executable, "-c", script], timeout=180, check=False).returncode == 0
