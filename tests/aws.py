"""The bucket of the tests, and what their CloudWatch has been told."""

from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

BUCKET = "runs-of-the-tests"


class Told(NamedTuple):
    """All values of a metric."""

    count: float
    sum: float
    unit: str


def told(client: Any, namespace: str) -> dict[str, Told]:
    """The metrics of a namespace, by name."""
    return {
        each["MetricName"]: _sum(client, namespace, each["MetricName"])
        for each in client.list_metrics(Namespace=namespace)["Metrics"]
    }


def _sum(client: Any, namespace: str, name: str) -> Told:
    now, hour = datetime.now(UTC), timedelta(hours=1)
    [found] = client.get_metric_statistics(
        Namespace=namespace,
        MetricName=name,
        StartTime=now - hour,
        EndTime=now + hour,
        Period=86400,
        Statistics=["SampleCount", "Sum"],
    )["Datapoints"]
    return Told(found["SampleCount"], found["Sum"], found["Unit"])
