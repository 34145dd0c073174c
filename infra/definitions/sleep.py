"""Sleep and wake of the head: the metrics, the expression and the periods of the two alarms.

The head publishes its idle time each minute, and 0 while it is busy. So one data point is enough to sleep, and a lost
one only delays it. Users who need the head publish a request, again each minute until the head has accepted it, and so
does a busy head: a request suppresses the sleep of its minute, also where CloudWatch evaluates earlier data points
again because newer ones are missing. Silence neither wakes nor stops anything.
https://docs.aws.amazon.com/AmazonCloudWatch/latest/monitoring/alarms-and-missing-data.html
"""

from __future__ import annotations

from infra.definitions.metrics import Metric, Name
from ray_on_ecs.contract import HEAD_IDLE, HEAD_REQUESTED

# The request is a high-resolution metric, whose alarm acts within seconds: 0.30 instead of 0.10 USD a month.
SLEEP_PERIOD_SECONDS, WAKE_PERIOD_SECONDS = 60, 10
# One request in so many periods, ten minutes, keeps the wake alarm active, and its action is repeated each minute. A
# sleep may act minutes after the idle time that it is for, and undoes a wake that came before it.
WAKE_POINTS = 60
# Metric math for the idle time in minutes, 0 in a minute with a request. MAX skips missing values, also of a metric
# that never had one, so each of the two alone gives the minute a value.
IDLE_MINUTES = "IF(MAX([requested, idle * 0]) > 0, 0, MAX([idle, requested * 0]))"


def metrics(namespace: Name) -> dict[str, Metric]:
    """CloudWatch metrics by their name in the expression. Of two heads in one minute the busy one counts."""
    return {
        "idle": Metric(namespace=namespace, name=HEAD_IDLE, stat="Minimum"),
        "requested": Metric(namespace=namespace, name=HEAD_REQUESTED, stat="Maximum"),
    }
