"""Scaling alarms and policies."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from infra.node_scaling import MAX_STEPS, NodeScaling, NodeScalingArgs, scale_in_steps, scale_out_steps
from infra.types import ResourceRef, Scale, ServiceRef
from ray_on_ecs.contract import KIND_DIMENSION
from ray_on_ecs.node import numbers
from ray_on_ecs.node.demand import Need
from tests.infra.fake_aws import Cloud, later, node_spec
from tests.metric_math import evaluate

CLUSTER = "arn:aws:ecs:us-west-2:123456789012:cluster/ray"
GROUP = "arn:aws:autoscaling:us-west-2:123456789012:autoScalingGroup:1:autoScalingGroupName/workers-group"


def scale(initial: int = 2, fewest: int = 0, most: int = 4, idle: int = 30) -> Scale:
    """A scale with valid defaults."""
    return Scale(initial_count=initial, min_count=fewest, max_count=most, default_job_count=2, idle_minutes=idle)


@cache
def scaling(count: Scale, gpus: int = 1, kind: str = "workers", vcpus: int = 4) -> Cloud:
    """An account with a scaler with valid defaults, one for all tests that look at it."""
    cloud = Cloud()

    def program() -> None:
        cluster = later("ray")
        head, workers = (ServiceRef(cluster=cluster, name=later(name)) for name in ("ray-head", "ray-workers"))
        args = NodeScalingArgs(
            cluster=ResourceRef(name=cluster, arn=later(CLUSTER)),
            service=workers,
            head=head,
            head_role="head-role",
            group=ResourceRef(name=later("workers-group"), arn=later(GROUP)),
            scale=count,
            kind=kind,
            node=node_spec(vcpus=vcpus, gpus=gpus),
        )
        NodeScaling("scaling", args)

    cloud.run(program)
    return cloud


def value(cloud: Cloud, kind: str, **metrics: float | None) -> float | None:
    """The value of an alarm's expression in a minute with these values, by CloudWatch's rules."""
    alarm = cloud.resources[f"scaling-{kind}-alarm"].inputs
    result = next(query for query in alarm["metricQueries"] if query.get("returnData"))
    used = {query["id"] for query in alarm["metricQueries"]} - {"result"}
    assert metrics.keys() <= used
    return evaluate(result["expression"], {**dict.fromkeys(used), **metrics})


def rings(cloud: Cloud, kind: str, **metrics: float | None) -> bool:
    """True if a minute with these values breaches an alarm's threshold."""
    result = value(cloud, kind, **metrics)
    return result is not None and result > cloud.resources[f"scaling-{kind}-alarm"].inputs["threshold"]


def number(cloud: Cloud, kind: str, above_threshold: float) -> int:
    """The number of workers that a policy sets for a value so far above its alarm's threshold."""
    policy = cloud.resources[f"scaling-{kind}-policy"].inputs["stepScalingPolicyConfiguration"]
    assert policy["adjustmentType"] == "ExactCapacity"
    steps = policy["stepAdjustments"]
    fits = [
        step["scalingAdjustment"]
        for step in steps
        if float(step.get("metricIntervalLowerBound", "-inf")) <= above_threshold
        and above_threshold < float(step.get("metricIntervalUpperBound", "inf"))
    ]
    assert len(fits) == 1
    return int(fits[0])


@pytest.mark.parametrize(("count", "bounds"), [(scale(), (0, 4)), (scale(fewest=1), (1, 4))])
def test_the_number_stays_within_its_bounds(count: Scale, bounds: tuple[int, int]) -> None:
    target = scaling(count).resources["scaling-target"].inputs
    assert (target["minCapacity"], target["maxCapacity"]) == bounds
    assert target["resourceId"] == "service/ray/ray-workers"


@pytest.mark.parametrize(
    ("count", "alarms"),
    [
        (scale(), {"short", "idle"}),
        (scale(idle=0), {"short"}),
        (scale(fewest=2, most=2), {"short"}),
    ],
    ids=["default", "never stops", "all stay"],
)
def test_one_alarm_scales_out_and_one_in(count: Scale, alarms: set[str]) -> None:
    resources = scaling(count).of_type("aws:cloudwatch/metricAlarm:MetricAlarm")
    assert {resource.name for resource in resources} == {f"scaling-{kind}-alarm" for kind in alarms}
    assert {resource.inputs["name"] for resource in resources} == {f"ray-workers-{kind}" for kind in alarms}


def test_scale_out_only_for_waiting_jobs() -> None:
    cloud = scaling(scale())
    assert rings(cloud, "short", requested=2, available=0, tasks=0)
    assert rings(cloud, "short", requested=4, available=2, tasks=2)
    assert not rings(cloud, "short", requested=2, available=2, tasks=2)
    assert not rings(cloud, "short", requested=0, available=2, tasks=2)
    assert not rings(cloud, "short", requested=9, available=4, tasks=4)
    alarm = cloud.resources["scaling-short-alarm"].inputs
    assert alarm["evaluationPeriods"] == 1
    assert alarm["treatMissingData"] == "notBreaching"


def test_smaller_request_keeps_running_workers() -> None:
    cloud = scaling(scale(most=8), gpus=4)
    result = value(cloud, "short", requested=12, available=8, tasks=4)
    assert result is not None
    assert number(cloud, "short", result) == 4
    assert value(cloud, "short", requested=12, available=0, tasks=0) == 12
    assert value(cloud, "short", available=8, tasks=4) is None


def test_scale_out_from_zero_starts_one_worker() -> None:
    cloud = scaling(scale())
    result = value(cloud, "short", requested=1, available=0)
    assert result is not None
    assert number(cloud, "short", result) == 1


@pytest.mark.parametrize("gpus", [1, 4, 8])
@pytest.mark.parametrize(("fewest", "most"), [(0, 1), (0, 4), (2, 4), (0, 20), (3, 20)])
def test_requested_gpus_round_up_to_nodes(gpus: int, fewest: int, most: int) -> None:
    cloud = scaling(scale(fewest, fewest, most), gpus)
    for wanted in range(1, gpus * most + 5):
        needed = -(-wanted // gpus)
        assert number(cloud, "short", wanted) == min(max(needed, fewest), most), f"{wanted} GPUs"


@pytest.mark.parametrize("gpus", [1, 4])
@pytest.mark.parametrize(("fewest", "most"), [(0, 1), (0, 4), (2, 4), (0, 20), (0, 64), (3, 100)])
def test_the_head_scales_out_to_the_alarms_number(gpus: int, fewest: int, most: int) -> None:
    cloud = scaling(scale(fewest, fewest, most), gpus)
    limits: Any = {"min": fewest, "max": most, "units": gpus}
    for nodes in {0, 1, most // 2, most}:
        for wanted in {nodes * gpus + more for more in (0, 1, gpus, 3 * gpus, most * gpus)}:
            minute = {"requested": wanted, "available": nodes * gpus, "tasks": nodes, "nodes": 0, "desired": nodes}
            result = value(cloud, "short", **minute)
            need = Need(requested=wanted, available=nodes * gpus, in_use=0)
            by_alarm = number(cloud, "short", result) if result else 0
            assert by_alarm == (max(numbers.wanted(need, limits), nodes) if numbers.is_short(need, limits) else 0)


@pytest.mark.parametrize("most", [21, 40, 64, 100])
def test_policies_have_at_most_twenty_steps(most: int) -> None:
    for steps in (
        scale_out_steps(units=8, min_count=0, max_count=most),
        scale_in_steps(min_count=0, max_count=most)[1],
    ):
        assert len(steps) <= MAX_STEPS
        assert max(step.scaling_adjustment for step in steps) == most  # ty: ignore


ALIVE = {"head": 1, "used": 0, "nodes": 0, "requested": 0, "available": 2, "instances": 2}
BUSY = {**ALIVE, "used": 1, "nodes": 1, "requested": 1}


def idle_number(cloud: Cloud, minute: Mapping[str, float | None]) -> int | None:
    """The number of workers that the idle alarm sets in such a minute, or None where it is silent."""
    if not rings(cloud, "idle", **minute):
        return None
    result = value(cloud, "idle", **minute)
    assert result is not None
    return number(cloud, "idle", result)


@pytest.mark.parametrize(
    ("minute", "left"),
    [
        (ALIVE, 0),
        ({**ALIVE, "progress": 0}, 0),
        ({**ALIVE, "available": 0}, 0),
        ({**ALIVE, "instances": 0}, None),
        ({**ALIVE, "instances": 0, "wanted": 2}, 0),
        ({**ALIVE, "instances": None}, None),
        (BUSY, 1),
        ({**BUSY, "progress": 40}, 1),
        ({**BUSY, "nodes": 2}, None),
        ({**BUSY, "requested": 2}, None),
        ({**ALIVE, "requested": 1, "available": 0}, 1),
        ({**ALIVE, "requested": 2}, None),
        ({**ALIVE, "requested": 9, "available": 2}, None),
        ({**ALIVE, "requested": 9, "available": 4, "instances": 4}, 0),
        ({**BUSY, "requested": 9, "available": 4, "instances": 4}, None),
        ({**BUSY, "nodes": None}, 1),
        ({**ALIVE, "used": 1, "requested": 2}, None),
        ({**ALIVE, "progress": 40}, None),
        ({"head": 1, "progress": 40, "instances": 2}, None),
        ({"progress": 40, "instances": 2}, None),
        ({"head": 1, "instances": 2}, None),
        ({"head": 0, "instances": 2}, 0),
        ({"instances": 2}, 0),
    ],
    ids=[
        "after up without a run",
        "after a run",
        "workers that never joined Ray",
        "no instances",
        "EC2 has none yet",
        "no group",
        "one of two is in use",
        "a run on one of two makes progress",
        "both are in use, one by its CPUs",
        "a Ray program that wants more",
        "two from zero, and one requested",
        "requested and there",
        "more than maxWorkers, and some are missing",
        "more than maxWorkers, and all are there",
        "in use, and more than maxWorkers requested",
        "the metric of the nodes is missing",
        "a head of before, whose request has all nodes in it",
        "a run makes progress between two attempts",
        "a run without the head's metrics",
        "a run without Container Insights",
        "a silent head that runs",
        "a dead head",
        "a dead head without Container Insights",
    ],
)
def test_only_idle_workers_count_as_idle(minute: dict[str, float | None], left: int | None) -> None:
    cloud = scaling(scale())
    assert idle_number(cloud, minute) == left


@pytest.mark.parametrize(
    ("nodes", "requested", "left"), [(2, 2, None), (2, 8, None), (1, 1, 1), (1, 4, 1), (1, 5, None), (0, 5, None)]
)
def test_nodes_in_part_use_stay(nodes: int, requested: int, left: int | None) -> None:
    cloud = scaling(scale(), gpus=4)
    minute = {**BUSY, "nodes": nodes, "used": requested * bool(nodes), "requested": requested, "available": 8}
    assert idle_number(cloud, minute) == left


@pytest.mark.parametrize(("fewest", "most"), [(0, 1), (0, 4), (2, 4), (0, 19), (0, 20), (3, 64), (0, 100)])
def test_scale_in_keeps_needed_nodes_and_starts_none(fewest: int, most: int) -> None:
    cloud = scaling(scale(fewest, fewest, most))
    stride = scale_in_steps(min_count=fewest, max_count=most)[0]
    for instances in {*range(0, most, -(-most // 8)), most, most + 2}:  # `up` may have lowered maxWorkers a moment ago
        for nodes in {*range(0, instances, -(-most // 12)), instances}:
            minute = {**BUSY, "nodes": nodes, "requested": nodes, "available": instances, "instances": instances}
            left = idle_number(cloud, minute)
            if left is not None:
                assert min(max(nodes, fewest), most) <= left <= max(nodes, fewest) + stride - 1
                assert left < instances
            else:
                assert instances < max(nodes, fewest) + stride


def test_expressions_are_of_a_length_that_cloudwatch_takes() -> None:
    cloud = scaling(scale(fewest=100, most=1000), gpus=8)
    for kind in ("short", "idle"):
        queries = cloud.resources[f"scaling-{kind}-alarm"].inputs["metricQueries"]
        assert len(queries) <= 10
        assert all(len(query.get("expression", "")) <= 2048 for query in queries)


def test_scale_in_keeps_nodes_that_became_busy() -> None:
    cloud = scaling(scale(), gpus=4)
    minute = {"requested": 8, "available": 8, "tasks": 2, "nodes": 2}
    result = value(cloud, "short", **minute, desired=1)
    assert result is not None
    assert number(cloud, "short", result) == 2
    assert not rings(cloud, "short", **minute, desired=2)
    assert not rings(cloud, "short", **minute)
    assert rings(cloud, "short", requested=12, available=8, tasks=2)


def test_the_idle_time_is_that_of_the_setting() -> None:
    cloud = scaling(scale(fewest=1, idle=45))
    alarm = cloud.resources["scaling-idle-alarm"].inputs
    assert (alarm["evaluationPeriods"], alarm["metricQueries"][1]["metric"]["period"]) == (45, 60)
    assert "datapointsToAlarm" not in alarm
    assert number(cloud, "idle", 1) == 1
    assert not rings(cloud, "idle", **{**ALIVE, "instances": 1})


@pytest.mark.parametrize(
    ("kind", "name", "metric"),
    [
        ("idle", "nodes", "GPUNodesInUse"),
        ("idle", "requested", "GPUsRequested"),
        ("idle", "used", "GPUsUsed"),
        ("idle", "progress", "RunProgress"),
        ("short", "available", "GPUs"),
    ],
)
def test_an_alarm_looks_at_the_stacks_own_metrics(kind: str, name: str, metric: str) -> None:
    cloud = scaling(scale())
    queries = {query["id"]: query for query in cloud.resources[f"scaling-{kind}-alarm"].inputs["metricQueries"]}
    assert queries[name]["metric"] == {
        "namespace": "ray-on-ecs/ray",
        "metricName": metric,
        "stat": "Maximum",
        "period": 60.0,
        "dimensions": {},
    }


def test_the_idle_alarm_counts_what_is_billed() -> None:
    cloud = scaling(scale())
    queries = {query["id"]: query for query in cloud.resources["scaling-idle-alarm"].inputs["metricQueries"]}
    instances: dict[str, Any] = queries["instances"]["metric"]
    assert (instances["namespace"], instances["metricName"]) == ("AWS/AutoScaling", "GroupInServiceInstances")
    assert instances["dimensions"] == {"AutoScalingGroupName": "workers-group"}
    head: dict[str, Any] = queries["head"]["metric"]
    assert (head["metricName"], head["dimensions"]["ServiceName"]) == ("RunningTaskCount", "ray-head")


def test_each_alarm_triggers_its_policy() -> None:
    cloud = scaling(scale(fewest=1))
    for kind in ("short", "idle"):
        actions = cloud.resources[f"scaling-{kind}-alarm"].inputs["alarmActions"]
        assert [action.rpartition(":")[2] for action in actions] == [f"scaling-{kind}-policy"]
        assert "scaling-target" in cloud.needs(f"scaling-{kind}-policy")


def test_cpu_workers_go_by_cpus() -> None:
    cloud = scaling(scale(), gpus=0, kind="cpu-workers", vcpus=8)
    alarm = cloud.resources["scaling-short-alarm"].inputs
    metrics = {query["id"]: query["metric"]["metricName"] for query in alarm["metricQueries"] if "metric" in query}
    assert (metrics["requested"], metrics["available"]) == ("CPUsRequested", "CPUs")
    assert metrics["nodes"] == "CPUNodesInUse"
    assert alarm["alarmDescription"] == "Ray jobs wait for CPUs (scale out)"
    result = value(cloud, "short", requested=9, available=0, tasks=0)
    assert result is not None
    assert number(cloud, "short", result) == 2


def test_idle_cpu_workers_stop_during_gpu_run() -> None:
    cloud = scaling(scale(), gpus=0, kind="cpu-workers", vcpus=8)
    assert rings(cloud, "idle", **ALIVE)
    assert idle_number(cloud, {**BUSY, "requested": 8}) == 1
    assert idle_number(cloud, {**BUSY, "requested": 9}) is None
    assert not rings(cloud, "idle", head=1, instances=2)
    alarm = cloud.resources["scaling-idle-alarm"].inputs
    assert "progress" not in {query["id"] for query in alarm["metricQueries"]}


# Kinds of a stack with several pools, as `scaling` takes them: a pool in two zones, CPU workers, GPUs by eight, and
# another pool without GPUs.
KINDS: dict[str, dict[str, Any]] = {
    "workers": {"count": scale()},
    "workers-b": {"count": scale(initial=0)},
    "cpu-workers": {"count": scale(), "gpus": 0, "vcpus": 8},
    "h100-workers": {"count": scale(initial=0, fewest=1), "gpus": 8, "vcpus": 192},
    "h100-workers-c": {"count": scale(initial=0), "gpus": 8, "vcpus": 192},
    "prep-workers": {"count": scale(initial=0), "gpus": 0, "vcpus": 32},
}
Published = dict[tuple[str, str], float]


def of_kind(kind: str) -> Cloud:
    return scaling(kind=kind, **KINDS[kind])


def publish(kind: str, *, requested: int = 0, nodes: int = 0, up: int = 0, progress: float | None = None) -> Published:
    """The head's metrics of a kind by name and dimension: nodes requested, in use and up, and its run's progress."""
    gpus, units = KINDS[kind].get("gpus", 1), KINDS[kind].get("gpus", 1) or KINDS[kind]["vcpus"]
    resource, dimension = "GPUs" if gpus else "CPUs", "" if kind in ("workers", "cpu-workers") else kind
    numbers = {"": up, "Requested": requested, "Used": nodes}
    found = {(f"{resource}{suffix}", dimension): number * units for suffix, number in numbers.items()}
    found[f"{resource[:3]}NodesInUse", dimension] = nodes
    return found | ({} if progress is None else {("RunProgress", dimension): progress})


def set_by(kind: str, alarm: str, published: Published, **own: float) -> int | None:
    """The number that a kind's alarm sets in a minute with these metrics of the head and of its service and group."""
    cloud = of_kind(kind)
    metrics = cloud.resources[f"scaling-{alarm}-alarm"].inputs["metricQueries"][1:]
    minute: dict[str, float | None] = {"head": 1, "wanted": own.get("instances", 0), **own}
    for query in metrics:
        metric = query["metric"]
        if metric["namespace"] == "ray-on-ecs/ray":
            assert metric["dimensions"].keys() <= {KIND_DIMENSION}
            dimension = metric["dimensions"].get(KIND_DIMENSION, "")
            minute[query["id"]] = published.get((metric["metricName"], dimension))
    asked = {query["id"]: minute.get(query["id"]) for query in metrics}
    result = value(cloud, alarm, **asked)
    return number(cloud, alarm, result) if result else None


@pytest.mark.parametrize("wanting", KINDS)
def test_each_pool_scales_from_zero_by_its_own_demand(wanting: str) -> None:
    published: Published = {}
    for kind in KINDS:
        published |= publish(kind, requested=3 if kind == wanting else 0)
    numbers = {kind: set_by(kind, "short", published, tasks=0, desired=0) for kind in KINDS}
    assert numbers == {**dict.fromkeys(KINDS), wanting: 3}


@pytest.mark.parametrize("busy", KINDS)
def test_use_of_one_pool_keeps_no_node_of_another(busy: str) -> None:
    published: Published = {}
    for kind in KINDS:
        in_use = 2 if kind == busy else 0
        # Without GPUs no alarm looks at a run's progress, and the head publishes none.
        progress = 7 if kind == busy and KINDS[kind].get("gpus", 1) else None
        published |= publish(kind, requested=in_use, nodes=in_use, up=2, progress=progress)
    numbers = {kind: set_by(kind, "idle", published, instances=2) for kind in KINDS}
    assert numbers == {**{kind: KINDS[kind]["count"].min_count for kind in KINDS}, busy: None}


@pytest.mark.parametrize("restarting", [kind for kind in KINDS if KINDS[kind].get("gpus", 1)])
def test_run_between_two_starts_keeps_nodes_of_its_kind_alone(restarting: str) -> None:
    published: Published = {}
    for kind in KINDS:
        published |= publish(kind, up=2, progress=7 if kind == restarting else None)
    numbers = {kind: set_by(kind, "idle", published, instances=2) for kind in KINDS}
    assert numbers == {**{kind: KINDS[kind]["count"].min_count for kind in KINDS}, restarting: None}


@pytest.mark.parametrize("kind", KINDS)
def test_silent_head_stops_no_node_of_any_pool(kind: str) -> None:
    assert set_by(kind, "idle", {}, instances=2) is None
    assert set_by(kind, "idle", {}, instances=2, head=0) == KINDS[kind]["count"].min_count


@pytest.mark.parametrize("kind", KINDS)
def test_nodes_that_became_busy_are_protected_in_each_pool(kind: str) -> None:
    published = publish(kind, requested=3, nodes=3, up=3)
    assert set_by(kind, "short", published, tasks=3, desired=1) == 3


class Clock:
    """A service under its alarms, minute by minute; instances follow its desired count after three minutes.

    A worker joins Ray five minutes after its instance. `used` and `requested` are what programs hold and request.
    """

    def __init__(self, cloud: Cloud, desired: int) -> None:
        self.cloud = cloud
        self.desired = desired
        self.minute = 0
        self._counts = [0] * 8
        self._breaches = {"short": 0, "idle": 0}

    def run(self, minutes: int, *, used: int = 0, requested: int = 0, silent: bool = False, **more: float) -> int:
        """Let minutes pass; return the desired count after them."""
        for _ in range(minutes):
            self.minute += 1
            self._counts.append(self.desired)
            instances, workers = self._counts[-4], min(self._counts[-9:])
            published = {"used": used, "nodes": used, "requested": requested, "available": workers}
            counted = {"instances": instances, "wanted": self.desired, "tasks": workers, "head": 1}
            counted["desired"] = self.desired
            self._apply({**counted, **({} if silent else published), **more})
        return self.desired

    def _apply(self, metrics: dict[str, float | None]) -> None:
        chosen = []
        for kind in self._breaches:
            alarm = self.cloud.resources[f"scaling-{kind}-alarm"].inputs
            used = {query["id"] for query in alarm["metricQueries"]}
            now = {name: item for name, item in metrics.items() if name in used}
            result = value(self.cloud, kind, **now)
            self._breaches[kind] = self._breaches[kind] + 1 if rings(self.cloud, kind, **now) else 0
            if result is not None and self._breaches[kind] >= alarm["evaluationPeriods"]:
                chosen.append(number(self.cloud, kind, result - alarm["threshold"]))
        self.desired = max(chosen, default=self.desired)


def test_workers_follow_their_use() -> None:
    clock = Clock(scaling(scale(initial=2)), desired=2)
    assert clock.run(29) == 2
    assert clock.run(5) == 0
    assert clock.run(60) == 0
    assert clock.run(2, requested=1) == 1
    assert clock.run(8, requested=1) == 1
    assert clock.run(300, used=1, requested=1) == 1
    assert clock.run(29) == 1
    assert clock.run(5) == 0


def test_a_run_outlives_its_heads_metrics() -> None:
    clock = Clock(scaling(scale(initial=2)), desired=2)
    clock.run(20, used=2, requested=2, progress=1)
    assert clock.run(300, silent=True, progress=1) == 2
    assert clock.run(300, silent=True) == 2
    assert clock.run(300, silent=True, progress=1, head=0) == 2
    assert clock.run(40, silent=True, head=0) == 0


def test_a_gang_gets_its_last_instance() -> None:
    clock = Clock(scaling(scale(initial=3, most=4)), desired=3)
    clock.run(20)
    assert clock.run(10, requested=4) == 4
    assert clock.run(60, used=4, requested=4) == 4


def test_small_run_after_large_keeps_one_worker() -> None:
    clock = Clock(scaling(scale(initial=4)), desired=4)
    assert clock.run(60, used=4, requested=4, progress=1) == 4
    assert clock.run(29, used=1, requested=1, progress=1) == 4
    assert clock.run(5, used=1, requested=1, progress=1) == 1
    assert clock.run(60, used=1, requested=1, progress=1) == 1
    assert clock.run(5, used=1, requested=3, progress=1) == 3
    assert clock.run(5, used=3, requested=3, progress=1) == 3


def test_run_during_scale_in_restores_workers() -> None:
    clock = Clock(scaling(scale(initial=4)), desired=4)
    assert clock.run(31, used=1, requested=1) == 1
    # Of the three that were to be stopped, all protect their tasks.
    assert clock.run(1, used=4, requested=4, available=4, tasks=4) == 4
    assert clock.run(60, used=4, requested=4, available=4, tasks=4) == 4


def test_run_that_restarts_its_workers_keeps_them() -> None:
    clock = Clock(scaling(scale(initial=3, most=4)), desired=3)
    assert clock.run(40, used=2, requested=2, progress=1) == 2
    for _ in range(10):
        assert clock.run(1, progress=1) == 2
        assert clock.run(2, requested=2) == 2
        assert clock.run(2, used=2, requested=2, progress=1) == 2


def test_minimum_workers_stay() -> None:
    clock = Clock(scaling(scale(initial=2, fewest=1)), desired=2)
    assert clock.run(40) == 1
    assert clock.run(600) == 1
