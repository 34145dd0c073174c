"""Alarms and policies between a head that sleeps and one that runs."""

from __future__ import annotations

from typing import Any

import pytest

from infra.definitions.sleep import IDLE_MINUTES
from infra.head_sleep import HeadSleep, HeadSleepArgs
from infra.types import ResourceRef, ServiceRef
from tests.infra.fake_aws import Cloud, later


def deployed(cloud: Cloud, minutes: int = 60) -> Cloud:
    """An account with the sleep of a head."""

    def program() -> None:
        service = ServiceRef(cluster=later("ray"), name=later("ray-head"))
        group = ResourceRef(name=later("head-group"), arn=later("arn:group"))
        HeadSleep("sleep", HeadSleepArgs(service=service, group=group, after_minutes=minutes))

    cloud.run(program)
    return cloud


def actions(cloud: Cloud, alarm: str) -> list[tuple[str, dict[str, Any]]]:
    """What an alarm sets, each with the inputs of its policy."""
    names = [arn.rpartition(":")[2] for arn in cloud.resources[alarm].inputs["alarmActions"]]
    return [(name, cloud.resources[name].inputs) for name in names]


def test_cluster_and_head_are_in_the_alarms_names(cloud: Cloud) -> None:
    names = {alarm.inputs["name"] for alarm in deployed(cloud).of_type("aws:cloudwatch/metricAlarm:MetricAlarm")}
    assert names == {"ray-head-sleep", "ray-head-wake"}


@pytest.mark.parametrize("minutes", [15, 60, 1440])
def test_idle_time_reaches_the_sleep_alarm_at_once(cloud: Cloud, minutes: int) -> None:
    alarm = deployed(cloud, minutes).resources["sleep-sleep-alarm"].inputs
    assert (alarm["comparisonOperator"], alarm["threshold"]) == ("GreaterThanOrEqualToThreshold", minutes)
    assert (alarm["evaluationPeriods"], alarm["treatMissingData"]) == (1, "notBreaching")
    result, *metrics = alarm["metricQueries"]
    assert (result["expression"], result["returnData"]) == (IDLE_MINUTES, True)
    watched = {
        metric["id"]: (metric["metric"]["metricName"], metric["metric"]["stat"], metric["metric"]["period"])
        for metric in metrics
    }
    assert watched == {"idle": ("HeadIdleMinutes", "Minimum", 60), "requested": ("HeadRequested", "Maximum", 60)}
    assert {metric["metric"]["namespace"] for metric in metrics} == {"ray-on-ecs/ray"}


def test_request_wakes_within_ten_seconds(cloud: Cloud) -> None:
    alarm = deployed(cloud).resources["sleep-wake-alarm"].inputs
    assert (alarm["namespace"], alarm["metricName"], alarm["statistic"]) == (
        "ray-on-ecs/ray",
        "HeadRequested",
        "Maximum",
    )
    assert (alarm["comparisonOperator"], alarm["threshold"]) == ("GreaterThanOrEqualToThreshold", 1)
    points = alarm["datapointsToAlarm"], alarm["evaluationPeriods"]
    assert (alarm["period"], points, alarm["treatMissingData"]) == (10, (1, 60), "notBreaching")


def test_sleep_ends_the_task_and_leaves_the_instance(cloud: Cloud) -> None:
    [(_, policy)] = actions(deployed(cloud), "sleep-sleep-alarm")
    assert policy["resourceId"] == "service/ray/ray-head"
    steps = policy["stepScalingPolicyConfiguration"]
    assert steps["adjustmentType"] == "ExactCapacity"
    assert steps["stepAdjustments"] == [{"metricIntervalLowerBound": "0", "scalingAdjustment": 0}]


def test_wake_starts_task_and_instance(cloud: Cloud) -> None:
    [(_, task), (_, instance)] = actions(deployed(cloud), "sleep-wake-alarm")
    assert task["resourceId"] == "service/ray/ray-head"
    assert instance["autoscalingGroupName"] == "head-group"
    for policy in (task["stepScalingPolicyConfiguration"], instance):
        assert policy["adjustmentType"] == "ExactCapacity"
        assert policy["stepAdjustments"] == [{"metricIntervalLowerBound": "0", "scalingAdjustment": 1}]
    assert instance["policyType"] == "StepScaling"


def test_head_is_at_most_one(cloud: Cloud) -> None:
    target = deployed(cloud).resources["sleep-target"].inputs
    assert (target["minCapacity"], target["maxCapacity"]) == (0, 1)
