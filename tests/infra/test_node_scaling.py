"""The scaler: which alarm rings when, and what number it sets."""

from __future__ import annotations

from typing import Any

import pulumi
import pytest

from infra.node_scaling import MAX_STEPS, NodeScaling, NodeScalingArgs, scaling_steps
from infra.references import Scale, ServiceRef
from tests.infra.fake_aws import Cloud, node_spec

REPEAT = object()


def scale(initial: int = 2, fewest: int = 0, most: int = 4, idle: int = 30) -> Scale:
    """A scale with valid defaults."""
    return Scale(initial_count=initial, min_count=fewest, max_count=most, default_job_count=2, idle_minutes=idle)


def scaling(cloud: Cloud, count: Scale, gpus: int = 1, kind: str = "workers", vcpus: int = 4) -> Cloud:
    """A scaler with valid defaults."""

    def program() -> None:
        cluster = pulumi.Output.from_input("ray")
        head, workers = (
            ServiceRef(cluster=cluster, name=pulumi.Output.from_input(name)) for name in ("ray-head", "ray-workers")
        )
        args = NodeScalingArgs(
            service=workers,
            head=head,
            group_name="workers-group",
            scale=count,
            kind=kind,
            node=node_spec(vcpus=vcpus, gpus=gpus),
        )
        NodeScaling("scaling", args)

    cloud.run(program)
    return cloud


class Missing:
    """A metric without a value in a minute."""

    def __add__(self, other: object) -> Missing:
        return self

    __mul__ = __add__


def value(cloud: Cloud, kind: str, **metrics: float | None) -> float | None:
    """The value of an alarm's expression in a minute with these values, by CloudWatch's rules."""
    alarm = cloud.resources[f"scaling-{kind}-alarm"].inputs
    result = next(query for query in alarm["metricQueries"] if query.get("returnData"))

    def largest(values: list[Any]) -> Any:
        return max((each for each in values if not isinstance(each, Missing)), default=Missing())

    functions = {
        "IF": lambda condition, yes, no: yes if condition else no,
        "FILL": lambda value, filling: filling if isinstance(value, Missing) and filling is not REPEAT else value,
        "REPEAT": REPEAT,  # without an earlier value
        "MAX": largest,
    }
    used = {query["id"] for query in alarm["metricQueries"]} - {"result"}
    assert metrics.keys() <= used, "the alarm looks at other metrics"
    known = {name: Missing() if metrics.get(name) is None else metrics[name] for name in used}
    expression = result["expression"].replace("&&", "and").replace("||", "or")
    try:
        found = eval(expression, {"__builtins__": {}}, {**functions, **known})
    except TypeError:  # a missing value is compared
        return None
    return None if isinstance(found, Missing) else found


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


@pytest.mark.parametrize(("count", "bounds"), [(scale(), (0, 4)), (scale(fewest=1), (1, 4))])
def test_the_number_stays_within_its_bounds(cloud: Cloud, count: Scale, bounds: tuple[int, int]) -> None:
    target = scaling(cloud, count).resources["scaling-target"].inputs
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
def test_one_alarm_scales_out_and_one_in(cloud: Cloud, count: Scale, alarms: set[str]) -> None:
    made = scaling(cloud, count).of_type("aws:cloudwatch/metricAlarm:MetricAlarm")
    assert {each.name for each in made} == {f"scaling-{kind}-alarm" for kind in alarms}
    assert {each.inputs["name"] for each in made} == {f"ray-workers-{kind}" for kind in alarms}, "status finds them"


def test_a_job_that_waits_gets_workers_and_one_that_runs_is_left_alone(cloud: Cloud) -> None:
    scaling(cloud, scale())
    assert rings(cloud, "short", requested=2, available=0, tasks=0), "a job's workers are started"
    assert rings(cloud, "short", requested=4, available=2, tasks=2), "a second job's, too"
    assert not rings(cloud, "short", requested=2, available=2, tasks=2), "what is there is enough"
    assert not rings(cloud, "short", requested=0, available=2, tasks=2), "it never takes any away"
    assert not rings(cloud, "short", requested=9, available=4, tasks=4), "there can't be more than maxWorkers"
    alarm = cloud.resources["scaling-short-alarm"].inputs
    assert alarm["evaluationPeriods"] == 1, "somebody waits"
    assert alarm["treatMissingData"] == "notBreaching", "a head that is gone wants none"


def test_a_smaller_wish_takes_no_running_worker_away(cloud: Cloud) -> None:
    scaling(cloud, scale(most=8), gpus=4)
    found = value(cloud, "short", requested=12, available=8, tasks=4)
    assert found is not None
    assert number(cloud, "short", found) == 4, "one of the four may be the one that works, and has joined a moment ago"
    assert value(cloud, "short", requested=12, available=0, tasks=0) == 12, "no instance is there yet"
    assert value(cloud, "short", available=8, tasks=4) is None, "a metric that is late decides nothing"


def test_from_zero_a_job_for_one_worker_gets_one(cloud: Cloud) -> None:
    scaling(cloud, scale())
    found = value(cloud, "short", requested=1, available=0)
    assert found is not None
    assert number(cloud, "short", found) == 1, "ECS has started two instances, and a second task would keep the other"


@pytest.mark.parametrize("gpus", [1, 4, 8])
@pytest.mark.parametrize(("fewest", "most"), [(0, 1), (0, 4), (2, 4), (0, 20), (3, 20)])
def test_as_many_workers_are_started_as_hold_the_gpus(cloud: Cloud, gpus: int, fewest: int, most: int) -> None:
    scaling(cloud, scale(fewest, fewest, most), gpus)
    for wanted in range(1, gpus * most + 5):
        needed = -(-wanted // gpus)
        assert number(cloud, "short", wanted) == min(max(needed, fewest), most), f"{wanted} GPUs"


@pytest.mark.parametrize("most", [21, 40, 64, 100])
def test_many_workers_share_the_steps_that_a_policy_may_have(most: int) -> None:
    steps = scaling_steps(units=8, min_count=0, max_count=most)
    assert len(steps) <= MAX_STEPS, "AWS refuses more"
    assert max(step.scaling_adjustment for step in steps) == most, "no more than maxWorkers"  # ty: ignore


ALIVE = {"head": 1, "used": 0, "requested": 0, "available": 2, "instances": 2}


@pytest.mark.parametrize(
    ("minute", "idle"),
    [
        (ALIVE, True),
        ({**ALIVE, "progress": 0}, True),
        ({**ALIVE, "available": 0}, True),
        ({**ALIVE, "instances": 0}, False),
        ({**ALIVE, "instances": 0, "wanted": 2}, True),
        ({**ALIVE, "instances": None}, False),
        ({**ALIVE, "used": 1}, False),
        ({**ALIVE, "used": 1, "requested": 2}, False),
        ({**ALIVE, "requested": 1, "available": 0}, False),
        ({**ALIVE, "requested": 2}, False),
        ({**ALIVE, "requested": 9, "available": 2}, False),
        ({**ALIVE, "requested": 9, "available": 4, "instances": 4}, True),
        ({**ALIVE, "requested": 9, "used": 4, "available": 4, "instances": 4}, False),
        ({**ALIVE, "progress": 40}, False),
        ({"head": 1, "progress": 40, "instances": 2}, False),
        ({"progress": 40, "instances": 2}, False),
        ({"head": 1, "instances": 2}, False),
        ({"head": 0, "instances": 2}, True),
        ({"instances": 2}, True),
    ],
    ids=[
        "after up without a run",
        "after a run",
        "workers that never joined Ray",
        "no instances",
        "EC2 has none yet",
        "no group",
        "a Ray program without progress",
        "a Ray program that wants more",
        "one worker from zero",
        "requested and there",
        "more than maxWorkers, and some are missing",
        "more than maxWorkers, and all are there",
        "in use, and more than maxWorkers requested",
        "a run makes progress",
        "a run without the head's metrics",
        "a run without Container Insights",
        "a silent head that runs",
        "a dead head",
        "a dead head without Container Insights",
    ],
)
def test_only_idle_workers_count_as_idle(cloud: Cloud, minute: dict[str, float | None], idle: bool) -> None:
    scaling(cloud, scale())
    assert rings(cloud, "idle", **minute) == idle


def test_the_idle_time_is_that_of_the_setting(cloud: Cloud) -> None:
    scaling(cloud, scale(fewest=1, idle=45))
    alarm = cloud.resources["scaling-idle-alarm"].inputs
    assert (alarm["evaluationPeriods"], alarm["metricQueries"][1]["metric"]["period"]) == (45, 60)
    assert "datapointsToAlarm" not in alarm, "every one of these minutes has to be idle"
    assert number(cloud, "idle", 1) == 1, "minWorkers stay"
    assert not rings(cloud, "idle", **{**ALIVE, "instances": 1}), "and the alarm is silent"


@pytest.mark.parametrize(
    ("kind", "name", "metric"),
    [
        ("idle", "requested", "GPUsRequested"),
        ("idle", "used", "GPUsUsed"),
        ("idle", "progress", "RunProgress"),
        ("short", "available", "GPUs"),
    ],
)
def test_an_alarm_looks_at_the_stacks_own_metrics(cloud: Cloud, kind: str, name: str, metric: str) -> None:
    scaling(cloud, scale())
    queries = {query["id"]: query for query in cloud.resources[f"scaling-{kind}-alarm"].inputs["metricQueries"]}
    assert queries[name]["metric"] == {
        "namespace": "ray-on-ecs/ray",
        "metricName": metric,
        "stat": "Maximum",
        "period": 60.0,
        "dimensions": {},
    }


def test_the_idle_alarm_counts_what_is_billed(cloud: Cloud) -> None:
    scaling(cloud, scale())
    queries = {query["id"]: query for query in cloud.resources["scaling-idle-alarm"].inputs["metricQueries"]}
    instances: dict[str, Any] = queries["instances"]["metric"]
    assert (instances["namespace"], instances["metricName"]) == ("AWS/AutoScaling", "GroupInServiceInstances"), (
        "ECS counts no task where none comes to run, and the instances would stay"
    )
    assert instances["dimensions"] == {"AutoScalingGroupName": "workers-group"}, "by name, not by instance"
    head: dict[str, Any] = queries["head"]["metric"]
    assert (head["metricName"], head["dimensions"]["ServiceName"]) == ("RunningTaskCount", "ray-head")


def test_each_alarm_moves_the_service_through_its_own_policy(cloud: Cloud) -> None:
    scaling(cloud, scale(fewest=1))
    for kind in ("short", "idle"):
        actions = cloud.resources[f"scaling-{kind}-alarm"].inputs["alarmActions"]
        assert [action.rpartition(":")[2] for action in actions] == [f"scaling-{kind}-policy"]
        assert "scaling-target" in cloud.needs(f"scaling-{kind}-policy"), "AWS refuses a policy without its target"


def test_cpu_workers_go_by_cpus(cloud: Cloud) -> None:
    scaling(cloud, scale(), gpus=0, kind="cpu-workers", vcpus=8)
    alarm = cloud.resources["scaling-short-alarm"].inputs
    metrics = {query["id"]: query["metric"]["metricName"] for query in alarm["metricQueries"] if "metric" in query}
    assert (metrics["requested"], metrics["available"]) == ("CPUsRequested", "CPUs")
    assert alarm["alarmDescription"] == "Jobs of the Ray cluster wait for CPUs"
    found = value(cloud, "short", requested=9, available=0, tasks=0)
    assert found is not None
    assert number(cloud, "short", found) == 2, "the ninth CPU is on a second CPU worker"


def test_idle_cpu_workers_stop_during_a_run_on_gpus(cloud: Cloud) -> None:
    scaling(cloud, scale(), gpus=0, kind="cpu-workers", vcpus=8)
    assert rings(cloud, "idle", **ALIVE)
    assert not rings(cloud, "idle", **{**ALIVE, "used": 1})
    assert not rings(cloud, "idle", head=1, instances=2), "a silent head may have a run"
    alarm = cloud.resources["scaling-idle-alarm"].inputs
    assert "progress" not in {query["id"] for query in alarm["metricQueries"]}


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
            published = {} if silent else {"used": used, "requested": requested, "available": workers}
            counted = {"instances": instances, "wanted": self.desired, "tasks": workers, "head": 1}
            self._apply({**counted, **published, **more})
        return self.desired

    def _apply(self, metrics: dict[str, float | None]) -> None:
        chosen = []
        for kind in self._breaches:
            alarm = self.cloud.resources[f"scaling-{kind}-alarm"].inputs
            used = {query["id"] for query in alarm["metricQueries"]}
            now = {name: each for name, each in metrics.items() if name in used}
            found = value(self.cloud, kind, **now)
            self._breaches[kind] = self._breaches[kind] + 1 if rings(self.cloud, kind, **now) else 0
            if found is not None and self._breaches[kind] >= alarm["evaluationPeriods"]:
                chosen.append(number(self.cloud, kind, found - alarm["threshold"]))
        self.desired = max(chosen, default=self.desired)


def test_workers_follow_their_use(cloud: Cloud) -> None:
    clock = Clock(scaling(cloud, scale(initial=2)), desired=2)
    assert clock.run(29) == 2, "the stack begins with workerCount"
    assert clock.run(5) == 0, "after `up` without a run"
    assert clock.run(60) == 0
    assert clock.run(2, requested=1) == 1, "a pending placement group of one GPU starts one"
    assert clock.run(8, requested=1) == 1
    assert clock.run(300, used=1, requested=1) == 1, "a Ray program without progress is use"
    assert clock.run(29) == 1, "the next one often follows soon"
    assert clock.run(5) == 0


def test_a_run_outlives_its_heads_metrics(cloud: Cloud) -> None:
    clock = Clock(scaling(cloud, scale(initial=2)), desired=2)
    clock.run(20, used=2, requested=2, progress=1)
    assert clock.run(300, silent=True, progress=1) == 2
    assert clock.run(300, silent=True) == 2, "nor does CloudWatch get the run's own"
    assert clock.run(300, silent=True, progress=1, head=0) == 2
    assert clock.run(40, silent=True, head=0) == 0, "a dead head has no run"


def test_a_gang_gets_its_last_instance(cloud: Cloud) -> None:
    clock = Clock(scaling(cloud, scale(initial=3, most=4)), desired=3)
    clock.run(20)
    assert clock.run(10, requested=4) == 4, "3 of 4 are there"
    assert clock.run(60, used=4, requested=4) == 4


def test_minimum_workers_stay(cloud: Cloud) -> None:
    clock = Clock(scaling(cloud, scale(initial=2, fewest=1)), desired=2)
    assert clock.run(40) == 1
    assert clock.run(600) == 1
