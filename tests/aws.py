"""The AWS of the tests: a moto server, its bucket, and the metrics that its CloudWatch has received."""

import logging
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, NamedTuple

import boto3

BUCKET = "runs-of-the-tests"
REGION = "us-east-1"


@contextmanager
def moto_server() -> Generator[str]:
    """Run moto in a thread and yield its URL."""
    from moto.server import ThreadedMotoServer  # which takes a second

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # it would log every request
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def environment(url: str) -> dict[str, str]:
    """Return the environment variables that lead AWS clients to this URL."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": REGION,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@cache  # a test creates many, in a tenth of a second each
def client(service: str, url: str) -> Any:
    """Return a boto3 client of a service behind this URL, cached."""
    return boto3.client(
        service, endpoint_url=url, region_name=REGION, aws_access_key_id="test", aws_secret_access_key="test"
    )


class MetricTotals(NamedTuple):
    """The number, sum and unit of all values of a metric."""

    count: float
    sum: float
    unit: str


def metric_totals(client: Any, namespace: str) -> dict[str, MetricTotals]:
    """Return the totals of each metric of a CloudWatch namespace, by name."""
    return {
        metric["MetricName"]: _totals(client, namespace, metric["MetricName"])
        for metric in client.list_metrics(Namespace=namespace)["Metrics"]
    }


def _totals(client: Any, namespace: str, name: str) -> MetricTotals:
    now, hour = datetime.now(UTC), timedelta(hours=1)
    [found] = client.get_metric_statistics(
        Namespace=namespace,
        MetricName=name,
        StartTime=now - hour,
        EndTime=now + hour,
        Period=86400,
        Statistics=["SampleCount", "Sum"],
    )["Datapoints"]
    return MetricTotals(found["SampleCount"], found["Sum"], found["Unit"])
