"""Metrics of a run in CloudWatch, on which the run does not depend."""

import inspect
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from ray_on_ecs import aws
from ray_on_ecs.node import metrics
from ray_on_ecs.node.demand import Need
from ray_on_ecs.tracking import cloudwatch
from ray_on_ecs.tracking.cloudwatch import Publisher
from ray_on_ecs.tracking.run_monitor import RunMonitor
from tests.aws import MetricTotals, metric_totals
from tests.log_lines import collect_lines
from tests.waiting import until

STEPS, KINDS = 10, ("workers",)
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
    return Publisher(monitor, namespace, lambda: KINDS)


@pytest.fixture
def published(cloudwatch_client: Any, namespace: str) -> Published:
    return lambda: metric_totals(cloudwatch_client, namespace)


def finish(monitor: RunMonitor, epoch: int, **metrics: float) -> None:
    monitor.history.append({"epoch": epoch, **EPOCH, **metrics})
    monitor.steps_made += STEPS


@pytest.mark.parametrize(
    "kinds", [("workers",), ("h100-workers",), ("workers-b", "h100-workers"), ("workers", "h100-workers")]
)
def test_progress_is_that_of_the_kind_of_node(
    monitor: RunMonitor, namespace: str, monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...]
) -> None:
    sent: list[Any] = []
    publisher = Publisher(monitor, namespace, lambda: kinds)
    monkeypatch.setattr(publisher, "_put", sent.append)
    finish(monitor, 0)
    publisher.publish()
    [progress, *others] = sent
    dimensions = [each.get("Dimensions", "the idle alarm of the kind `workers`") for each in progress]
    assert dimensions == [
        "the idle alarm of the kind `workers`" if kind == "workers" else [{"Name": "Workers", "Value": kind}]
        for kind in kinds
    ]
    assert {each["MetricName"] for each in progress} == {"RunProgress"}
    assert not any("Dimensions" in datum for data in others for datum in data)


def test_progress_is_the_new_steps_or_one(monitor: RunMonitor, publisher: Publisher, published: Published) -> None:
    for monitor.steps_made in (0, 3, 3, 3, 7):
        publisher.publish()
    assert published() == {"RunProgress": (5, 1 + 3 + 1 + 1 + 4, "Count")}


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


class Refusing:
    """A CloudWatch that refuses a whole call for one bad metric, as AWS's does.

    Attributes:
        bad: Names that it refuses.
        code: The code of its errors.
        calls: The names of each call.
        stored: The number of values by name that it has accepted.
    """

    def __init__(self, *bad: str, code: str = "InvalidParameterValue", status: int = 400) -> None:
        self.bad, self.code, self.status = bad, code, status
        self.calls: list[list[str]] = []
        self.stored: Counter[str] = Counter()

    def put_metric_data(self, Namespace: str, MetricData: list[dict[str, Any]]) -> None:
        self.calls.append([datum["MetricName"] for datum in MetricData])
        assert len(MetricData) <= 1000
        for datum in MetricData:
            if datum["MetricName"] in self.bad:
                error = {"Error": {"Code": self.code, "Message": "The value is invalid"}}
                raise ClientError({**error, "ResponseMetadata": {"HTTPStatusCode": self.status}}, "PutMetricData")
        for datum in MetricData:
            values = datum.get("Values", [datum.get("Value")])
            assert len(values) <= 150
            assert all(math.isfinite(value) and abs(value) <= 2.0**360 for value in values)
            assert all(value == 0 or abs(value) >= 2.0**-360 for value in values)
            assert re.fullmatch("[!-~][ -~]{0,254}", datum["MetricName"])
            self.stored[datum["MetricName"]] += sum(datum.get("Counts", [1]))


@pytest.fixture
def lines() -> list[str]:
    return collect_lines()


def publisher_to(cloud: Refusing, monkeypatch: pytest.MonkeyPatch) -> tuple[RunMonitor, Publisher]:
    monkeypatch.setattr(cloudwatch, "client", lambda *_, **__: cloud)
    monitor = RunMonitor()
    return monitor, Publisher(monitor, "namespace", lambda: KINDS)


VALUES: dict[str, tuple[Any, bool]] = {
    "none": (None, False),
    "largest": (2.0**360, True),
    "beyond the largest": (2.0**361, False),
    "below the least": (-(2.0**361), False),
    "least": (-(2.0**360), True),
    "tiny": (5e-324, True),
    "tiny and negative": (-1e-200, True),
    "zero": (0.0, True),
    "NaN": (math.nan, False),
    "infinite": (math.inf, False),
    "negative infinite": (-math.inf, False),
}


@pytest.mark.parametrize("value", VALUES)
def test_value_out_of_range_hides_no_other(value: str, monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    cloud = Refusing()
    monitor, publisher = publisher_to(cloud, monkeypatch)
    for _ in range(60):
        finish(monitor, 0, ppl=VALUES[value][0])
        publisher.publish()
    assert cloud.stored["RunProgress"] == cloud.stored["TrainLoss"] == 60
    assert cloud.stored["Ppl"] == (60 if VALUES[value][1] else 0)
    assert len(lines) == ("beyond" in value or "below" in value)


NAMES = {
    "x" * 255: True,
    "x" * 256: False,
    "pr\u00e9cision": False,
    "a b": True,
    ":lead": False,
    " ": False,
    " lead": False,
    "": False,
    "tab\tin it": False,
    "grad_norm/layers.0": True,
    "run_progress": False,
    "GPUs_requested": False,
    "GPUs": False,
}


@pytest.mark.parametrize("name", NAMES)
def test_name_that_cloudwatch_refuses_hides_no_other(
    name: str, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    cloud = Refusing()
    monitor, publisher = publisher_to(cloud, monkeypatch)
    for _ in range(3):
        finish(monitor, 0, **{name: 1e9})
        publisher.publish()
    assert cloud.stored["RunProgress"] == cloud.stored["TrainLoss"] == 3
    assert len(cloud.stored) == 5 + NAMES[name]
    assert len(lines) == (not NAMES[name])


def test_names_of_the_head_are_known() -> None:
    need = Need(requested=0, available=0, in_use=0)
    counts = [each for kind in ("workers", "cpu-workers") for each in metrics.of_kind(kind, need, kind == "workers")]
    of_gpus = re.findall(r'"(GPU\w+)": ', inspect.getsource(metrics))
    assert {count["MetricName"] for count in counts} | set(of_gpus) == cloudwatch.OF_HEAD


def test_refused_metric_is_dropped_once(monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    cloud = Refusing("Metric17", "Metric33")
    monitor, publisher = publisher_to(cloud, monkeypatch)
    for _ in range(5):
        monitor.history.append({f"metric{number}": float(number) for number in range(50)})
        publisher.publish()
    assert cloud.stored["RunProgress"] == 5
    assert {cloud.stored[f"Metric{number}"] for number in range(50) if number not in (17, 33)} == {5}
    [line] = lines
    assert line.startswith("CloudWatch refuses metric Metric17 (")
    assert all(call == ["RunProgress"] for call in cloud.calls if "RunProgress" in call)


@pytest.mark.parametrize(
    ("code", "status", "is_kept"),
    [
        ("InvalidParameterValue", 400, False),
        ("InvalidParameterCombination", 400, False),
        ("MissingParameter", 400, False),
        ("ValidationError", 400, False),
        ("RequestEntityTooLarge", 413, False),
        ("Something new", 400, False),
        ("Throttling", 400, True),
        ("LimitExceeded", 400, True),
        ("ExpiredToken", 400, True),
        ("RequestExpired", 400, True),
        ("AccessDenied", 403, True),
        ("InternalFailure", 500, True),
        ("ServiceUnavailable", 503, True),
    ],
)
def test_only_a_refusal_of_the_content_drops_metrics(
    code: str, status: int, is_kept: bool, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    cloud = Refusing("TrainLoss", code=code, status=status)
    monitor, publisher = publisher_to(cloud, monkeypatch)
    finish(monitor, 0)
    for _ in range(2):
        publisher.publish()
    cloud.bad = ()
    publisher.publish()
    assert cloud.stored["RunProgress"] == 3
    assert cloud.stored["TrainLoss"] == is_kept
    assert cloud.stored["TestLoss"] == 1
    assert len(lines) == 1


def test_many_values_are_few_calls(monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    cloud = Refusing()
    monitor, publisher = publisher_to(cloud, monkeypatch)
    monitor.history += [{f"metric{index}": step / 7 for index in range(10)} for step in range(6000)]
    publisher.publish()
    assert {cloud.stored[f"Metric{index}"] for index in range(10)} == {6000}
    assert len(cloud.calls) <= 1 + 10 * 6000 / 4500 + 1
    assert lines == []


def test_number_of_metrics_is_limited(monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    cloud = Refusing()
    monitor, publisher = publisher_to(cloud, monkeypatch)
    for _ in range(2):
        monitor.history.append({f"norm{layer}": 1.0 for layer in range(400)})
        publisher.publish()
    assert len(cloud.stored) == 1 + cloudwatch.MAX_NAMES
    [line] = lines
    assert line == ("CloudWatch gets the run's first 50 metrics, without norm50: each costs up to 0.30 USD a month")


def test_metrics_are_published_at_start_and_end(monitor: RunMonitor, namespace: str, published: Published) -> None:
    monitor.steps_made = 1
    with cloudwatch.publish_metrics(monitor, namespace, lambda: KINDS):
        until(lambda: bool(published()))
        monitor.steps_made = 9
    assert published() == {"RunProgress": (2, 1 + 8, "Count")}


def test_interrupt_does_not_wait_for_cloudwatch(monitor: RunMonitor, namespace: str, published: Published) -> None:
    def interrupt() -> None:
        with cloudwatch.publish_metrics(monitor, namespace, lambda: KINDS):
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
        cloudwatch.publish_metrics(monitor, namespace, lambda: KINDS),
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
    output = capsys.readouterr().out
    assert output.startswith(
        "CloudWatch does not accept the run's metrics; training continues (EndpointConnectionError"
    )
    assert output.count("\n") == 1
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
        with cloudwatch.publish_metrics(None, None, None):
            assert threading.active_count() == before
        sys.exit("boto3" in sys.modules)
    """
    assert subprocess.run([sys.executable, "-c", script], timeout=180, check=False).returncode == 0
