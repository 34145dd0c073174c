"""The scaler: which alarm rings when, and what number it sets."""

from __future__ import annotations

from typing import Any

import pulumi
import pytest

from infra.node_scaling import MAX_STEPS, NodeScaling, NodeScalingArgs, scaling_steps
from infra.references import Scale, ServiceRef
from tests.infra.fake_aws import Cloud, node_spec

ELASTIC = Scale(min_count=0, max_count=4, default_job_count=2, idle_minutes=0)
IDLE = Scale(min_count=2, max_count=2, default_job_count=2, idle_minutes=60)
BOTH = Scale(min_count=1, max_count=4, default_job_count=2, idle_minutes=60)
REPEAT = object()
KINDS = ["elastic", "idle", "both"]


def scaling(cloud: Cloud, workers: Scale, gpus: int = 1, kind: str = "workers", vcpus: int = 4) -> Cloud:
    """A scaler with valid defaults."""

    def program() -> None:
        cluster, name = (pulumi.Output.from_input(each) for each in ("ray", "ray-workers"))
        service = ServiceRef(cluster=cluster, name=name)
        args = NodeScalingArgs(
            service=service,
            group_name="workers-group",
            scale=workers,
            kind=kind,
            node=node_spec(vcpus=vcpus, gpus=gpus),
        )
        NodeScaling("scaling", args)

    cloud.run(program)
    return cloud


def value(cloud: Cloud, kind: str, **metrics: float | None) -> float | None:
    """What an alarm's expression is in a minute with these values, by CloudWatch's rules."""
    alarm = cloud.resources[f"scaling-{kind}-alarm"].inputs
    result = next(query for query in alarm["metricQueries"] if query.get("returnData"))
    functions = {
        "IF": lambda condition, yes, no: yes if condition else no,
        "FILL": lambda value, filling: value if value is not None or filling is REPEAT else filling,
        "REPEAT": REPEAT,  # without an earlier value
        "MAX": max,
    }
    used = {query["id"] for query in alarm["metricQueries"]} - {"result"}
    known = {**dict.fromkeys(used), **metrics}
    assert known.keys() == used, "the alarm looks at other metrics"
    expression = result["expression"].replace("&&", "and").replace("||", "or")
    try:
        return eval(expression, {"__builtins__": {}}, {**functions, **known})
    except TypeError:  # a metric without a value, which nothing fills
        return None


def rings(cloud: Cloud, kind: str, **metrics: float | None) -> bool:
    """Whether a minute with these values counts towards an alarm."""
    found = value(cloud, kind, **metrics)
    return found is not None and found > cloud.resources[f"scaling-{kind}-alarm"].inputs["threshold"]


def number(cloud: Cloud, kind: str, above_threshold: float) -> int:
    """The number of workers that a policy sets for a value so far above its alarm's threshold."""
    policy = cloud.resources[f"scaling-{kind}-policy"].inputs["stepScalingPolicyConfiguration"]
    assert policy["adjustmentType"] == "ExactCapacity", "the same number again changes nothing while instances start"
    steps = policy["stepAdjustments"]
    fits = [
        step["scalingAdjustment"]
        for step in steps
        if float(step.get("metricIntervalLowerBound", "-inf")) <= above_threshold
        and above_threshold < float(step.get("metricIntervalUpperBound", "inf"))
    ]
    assert len(fits) == 1, "AWS refuses steps that overlap or leave a gap"
    return int(fits[0])


@pytest.mark.parametrize(("workers", "bounds"), [(ELASTIC, (0, 4)), (IDLE, (0, 2)), (BOTH, (0, 4))], ids=KINDS)
def test_the_number_stays_within_its_bounds(cloud: Cloud, workers: Scale, bounds: tuple[int, int]) -> None:
    target = scaling(cloud, workers).resources["scaling-target"].inputs
    assert (target["minCapacity"], target["maxCapacity"]) == bounds, "an idle stop goes to 0 whatever minWorkers says"
    assert target["resourceId"] == "service/ray/ray-workers"


@pytest.mark.parametrize(
    ("workers", "alarms"),
    [(ELASTIC, {"short", "unused"}), (IDLE, {"short", "idle"}), (BOTH, {"short", "unused", "idle"})],
    ids=KINDS,
)
def test_each_alarm_is_there_only_where_it_has_something_to_do(cloud: Cloud, workers: Scale, alarms: set[str]) -> None:
    made = {each.name for each in scaling(cloud, workers).of_type("aws:cloudwatch/metricAlarm:MetricAlarm")}
    assert made == {f"scaling-{kind}-alarm" for kind in alarms}


def test_a_job_that_waits_gets_workers_and_one_that_runs_is_left_alone(cloud: Cloud) -> None:
    scaling(cloud, ELASTIC)
    assert rings(cloud, "short", requested=2, available=0, tasks=0), "a job's workers are started"
    assert rings(cloud, "short", requested=4, available=2, tasks=2), "a second job's, too"
    assert not rings(cloud, "short", requested=2, available=2, tasks=2), "what is there is enough"
    assert not rings(cloud, "short", requested=0, available=2, tasks=2), "it never takes any away"
    assert not rings(cloud, "short", requested=9, available=4, tasks=4), "there can't be more than maxWorkers"
    alarm = cloud.resources["scaling-short-alarm"].inputs
    assert alarm["evaluationPeriods"] == 1, "somebody waits"
    assert alarm["treatMissingData"] == "notBreaching", "a head that is gone wants none"


def test_a_smaller_wish_takes_no_running_worker_away(cloud: Cloud) -> None:
    scaling(cloud, Scale(min_count=0, max_count=8, default_job_count=2, idle_minutes=0), gpus=4)
    found = value(cloud, "short", requested=12, available=8, tasks=4)
    assert found is not None
    assert number(cloud, "short", found) == 4, "one of the four may be the one that works, and has joined a moment ago"
    assert value(cloud, "short", requested=12, available=0, tasks=0) == 12, "no instance is there yet"
    assert value(cloud, "short", available=8, tasks=4) is None, "a metric that is late decides nothing"


def test_from_zero_a_job_for_one_worker_gets_one(cloud: Cloud) -> None:
    scaling(cloud, ELASTIC)
    found = value(cloud, "short", requested=1, available=0)
    assert found is not None
    assert number(cloud, "short", found) == 1, "ECS has started two instances, and a second task would keep the other"


@pytest.mark.parametrize("gpus", [1, 4, 8])
@pytest.mark.parametrize(("fewest", "most"), [(0, 1), (0, 4), (2, 4), (0, 20), (3, 20)])
def test_as_many_workers_are_started_as_hold_the_gpus(cloud: Cloud, gpus: int, fewest: int, most: int) -> None:
    scaling(cloud, Scale(min_count=fewest, max_count=most, default_job_count=most, idle_minutes=0), gpus)
    for wanted in range(1, gpus * most + 5):
        needed = -(-wanted // gpus)
        assert number(cloud, "short", wanted) == min(max(needed, fewest), most), f"{wanted} GPUs"


@pytest.mark.parametrize("most", [21, 40, 64, 100])
def test_many_workers_share_the_steps_that_a_policy_may_have(most: int) -> None:
    steps = scaling_steps(units=8, min_count=0, max_count=most)
    assert len(steps) <= MAX_STEPS, "AWS refuses more"
    assert max(step.scaling_adjustment for step in steps) == most, "no more than maxWorkers"  # ty: ignore


def test_workers_that_nobody_wants_go_down_to_the_fewest(cloud: Cloud) -> None:
    scaling(cloud, BOTH)
    assert rings(cloud, "unused", requested=0, instances=3), "nobody wants them"
    assert rings(cloud, "unused", instances=3), "a head that is gone wants none"
    assert not rings(cloud, "unused", requested=2, instances=3), "a job runs on them"
    assert not rings(cloud, "unused", requested=0, instances=1), "the fewest stay, and the alarm is silent"
    assert not rings(cloud, "unused", requested=0), "there is no group"
    assert rings(cloud, "unused", requested=0, instances=0, wanted=2), "EC2 has none, and would start them later"
    assert number(cloud, "unused", 0.5) == 1
    assert cloud.resources["scaling-unused-alarm"].inputs["evaluationPeriods"] == 10, "the next run follows soon"


def test_workers_without_progress_are_stopped_whoever_is_alive(cloud: Cloud) -> None:
    scaling(cloud, BOTH)
    assert rings(cloud, "idle", instances=2), "the head is gone"
    assert rings(cloud, "idle", progress=0, requested=2, available=2, instances=2), (
        "a run hangs, or a job holds and idles"
    )
    assert rings(cloud, "idle", progress=0, requested=9, available=4, instances=4), "a job waits for what can't come"
    assert not rings(cloud, "idle", progress=40, requested=2, available=2, instances=2), "a run makes progress"
    assert not rings(cloud, "idle", progress=0, requested=2, available=0, instances=2), "its workers are starting"
    assert not rings(cloud, "idle", progress=0, requested=0, available=0, instances=0), "there is nothing to stop"
    assert number(cloud, "idle", 2) == 0, "all of them"
    assert cloud.resources["scaling-idle-alarm"].inputs["evaluationPeriods"] == 60, "idleTimeoutMinutes of it"


@pytest.mark.parametrize(
    ("kind", "name", "metric"),
    [("unused", "requested", "GPUsRequested"), ("idle", "progress", "RunProgress"), ("short", "available", "GPUs")],
)
def test_an_alarm_looks_at_the_stacks_own_metrics(cloud: Cloud, kind: str, name: str, metric: str) -> None:
    scaling(cloud, BOTH)
    queries = {query["id"]: query for query in cloud.resources[f"scaling-{kind}-alarm"].inputs["metricQueries"]}
    assert queries[name]["metric"] == {
        "namespace": "ray-on-ecs/ray",
        "metricName": metric,
        "stat": "Maximum",
        "period": 60.0,
        "dimensions": {},
    }


@pytest.mark.parametrize("kind", ["unused", "idle"])
def test_what_is_stopped_is_what_is_paid_for(cloud: Cloud, kind: str) -> None:
    scaling(cloud, BOTH)
    queries = {query["id"]: query for query in cloud.resources[f"scaling-{kind}-alarm"].inputs["metricQueries"]}
    instances: dict[str, Any] = queries["instances"]["metric"]
    assert (instances["namespace"], instances["metricName"]) == ("AWS/AutoScaling", "GroupInServiceInstances"), (
        "ECS counts no task where none comes to run, and the instances would stay"
    )
    assert instances["dimensions"] == {"AutoScalingGroupName": "workers-group"}, "by name, not by instance"


def test_each_alarm_moves_the_service_through_its_own_policy(cloud: Cloud) -> None:
    scaling(cloud, BOTH)
    for kind in ("short", "unused", "idle"):
        actions = cloud.resources[f"scaling-{kind}-alarm"].inputs["alarmActions"]
        assert [action.rpartition(":")[2] for action in actions] == [f"scaling-{kind}-policy"]
        assert "scaling-target" in cloud.needs(f"scaling-{kind}-policy"), "AWS refuses a policy without its target"


def test_helpers_go_by_cpus(cloud: Cloud) -> None:
    scaling(cloud, ELASTIC, gpus=0, kind="helpers", vcpus=8)
    alarm = cloud.resources["scaling-short-alarm"].inputs
    metrics = {query["id"]: query["metric"]["metricName"] for query in alarm["metricQueries"] if "metric" in query}
    assert (metrics["requested"], metrics["available"]) == ("CPUsRequested", "CPUs")
    assert alarm["alarmDescription"] == "Jobs of the Ray cluster wait for CPUs"
    found = value(cloud, "short", requested=9, available=0, tasks=0)
    assert found is not None
    assert number(cloud, "short", found) == 2, "the ninth CPU is on a second helper"
