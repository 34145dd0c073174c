"""The request for a head that sleeps: every way in which the call can fail, the lines, and the workers of the run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from ray_on_ecs.aws import Refused
from ray_on_ecs.cluster import aws, aws_status, wake
from ray_on_ecs.cluster.wake import Denied, Waker, workers_of_run
from ray_on_ecs.config import RunConfig
from ray_on_ecs.contract import HEAD_REQUESTED
from ray_on_ecs.errors import StackNotFound, TrainingError, UsageError
from ray_on_ecs.jobs.documents import HeadState, Wake
from tests.aws import REGION, environment, metric_totals
from tests.aws import client as aws_client
from tests.front import Front
from tests.refusals import NO_CAPACITY
from tests.serving import serving
from tests.worker_pools import cpu_group, node_group, workers

NAMESPACE = "ray-on-ecs/c"
ASLEEP = HeadState(wake=Wake(NAMESPACE, REGION, 60), idle_minutes=61.5)
LOST = HeadState(wake=Wake(NAMESPACE, REGION, 60), idle_minutes=3)
NEVER = HeadState(idle_minutes=500)
HOUR = 3600.0


@pytest.fixture
def front(aws_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Front]:
    with serving(Front(aws_server)) as front:
        for name, value in environment(front.url).items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("AWS_PROFILE", raising=False)
        yield front


def refuse(code: str) -> Callable[[Front, pytest.MonkeyPatch], None]:
    return lambda front, patch: front.codes.update(PutMetricData=code)


def lose_answers(front: Front, patch: pytest.MonkeyPatch) -> None:
    front.is_silent = True
    patch.setattr(wake, "LIMITS", {"connect_seconds": 1, "read_seconds": 0.5, "attempts": 1})


def show_a_portal(front: Front, patch: pytest.MonkeyPatch) -> None:
    front.page = 200, {}, b"<html>log in</html>"


def break_aws(front: Front, patch: pytest.MonkeyPatch) -> None:
    front.page = 500, {}, b"{}"


def unplug(front: Front, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")


def log_out(front: Front, patch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        patch.delenv(name)
    patch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/missing")


def break_configuration(front: Front, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("AWS_PROFILE", "missing")
    patch.setenv("AWS_CONFIG_FILE", "/missing")


# Each fault with the error of a cluster that is asleep; None if the command goes on and tries again.
FAULTS: dict[str, tuple[Callable[[Front, pytest.MonkeyPatch], None], type[TrainingError] | None]] = {
    "denied": (refuse("AccessDenied"), Denied),
    "denied by an organization": (refuse("AccessDeniedException"), Denied),
    "an emulator without it": (refuse("UnknownOperationException"), Denied),
    "expired": (refuse("ExpiredToken"), UsageError),
    "of another account": (refuse("InvalidClientTokenId"), UsageError),
    "a region that is not enabled": (refuse("UnrecognizedClientException"), UsageError),
    "a wrong clock": (refuse("RequestTimeTooSkewed"), UsageError),
    "logged out": (log_out, UsageError),
    "a missing profile": (break_configuration, UsageError),
    "throttled": (refuse("ThrottlingException"), None),
    "busy": (refuse("InternalServiceFault"), None),
    "refused for another reason": (refuse("InvalidParameterValue"), None),
    "broken": (break_aws, None),
    "the answer is lost": (lose_answers, None),
    "a portal": (show_a_portal, None),
    "no network": (unplug, None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_of_the_call_ends_a_command_only_if_it_stays(
    front: Front, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    begin, error = FAULTS[fault]
    begin(front, monkeypatch)
    lines: list[str] = []
    waker = Waker(lines.append)
    for state, age in ((NEVER, HOUR), (ASLEEP, 5), (LOST, 5), (LOST, HOUR)):
        waker.ask(state, age)
    assert not lines, "it may be up, or start without a request"
    if error:
        with pytest.raises(error, match="the cluster is asleep, and can't be woken: "):
            waker.ask(ASLEEP, HOUR)
        assert not lines
    else:
        waker.ask(ASLEEP, HOUR)
        waker.ask(ASLEEP, HOUR)
        [line] = lines
        assert line.startswith("the request for the head is not published yet, and is tried again (")
        assert len(line) < 500
    waker.wait(ASLEEP, HOUR)  # the wait goes on in any case


def test_denial_names_the_action_and_the_way_out(front: Front) -> None:
    front.refused = {"PutMetricData"}
    with pytest.raises(Denied) as caught:
        Waker(print).ask(ASLEEP, HOUR)
    for part in ("cloudwatch:PutMetricData", f"namespace {NAMESPACE}", "docs/accounts.md"):
        assert part in str(caught.value)
    assert caught.value.exit_status == 3


def test_region_of_the_cluster_is_used(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_REGION")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    wake.publish(Wake("ray-on-ecs/region", REGION, 60), [wake.head_requested()])
    assert metric_totals(aws_client("cloudwatch", front.url), "ray-on-ecs/region") == {HEAD_REQUESTED: (1, 1, "None")}


@pytest.mark.parametrize(
    "broken",
    [
        None,
        {},
        [],
        "ray-on-ecs/c",
        {"namespace": "AWS/EC2"},
        {"namespace": "ray-on-ecs/../x"},
        {"namespace": 1},
        {"region": "us-east-1.example.com/"},
        {"region": ""},
        {"region": None},
        {"region": "-"},
        {"region": "-a"},
        {"region": "us-east"},
        {"region": "US-EAST-1"},
        {"region": "us-east-1\n"},
        {"region": "us-east-\u0661"},
        {"region": "a" * 70},
        {"region": "us-" + "a" * 70 + "-1"},
        {"after_minutes": "60"},
        {"after_minutes": float("nan")},
        {"after_minutes": None},
        {"after_minutes": 0},
        {"after_minutes": -3},
        {"after_minutes": 10**400},
    ],
)
def test_broken_means_to_wake_a_head_are_ignored(broken: Any) -> None:
    from ray_on_ecs.jobs.documents import _head_state

    whole = {"namespace": NAMESPACE, "region": REGION, "after_minutes": 60}
    assert _head_state({"wake": whole}).wake == ASLEEP.wake
    changed = whole | broken if isinstance(broken, dict) and broken else broken
    for minutes in ("x", 10**400):
        assert _head_state({"wake": changed, "idle_minutes": minutes}) == HeadState()


@pytest.mark.parametrize(
    "region", ["ap-southeast-5", "us-gov-west-1", "eusc-de-east-1", "cn-northwest-1", "us-isob-east-1"]
)
def test_region_of_each_partition_can_be_woken(region: str) -> None:
    from ray_on_ecs.jobs.documents import _head_state

    wake = Wake(NAMESPACE, region, 60)
    assert _head_state(json.loads(HeadState(wake=wake).to_json())).wake == wake


# Lines


class Clock:
    """Monotonic time."""

    now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(wake, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> list[float]:
    """The times of the requests."""
    times: list[float] = []
    monkeypatch.setattr(wake, "publish", lambda wake, data: times.append(clock.now))
    return times


def wait(clock: Clock, waker: Waker, seconds: float, state: HeadState = ASLEEP, age: float = HOUR) -> None:
    for _ in range(round(seconds * 2)):
        waker.wait(state, age + clock.now)
        clock.now += 0.5


def test_request_is_published_each_minute_until_the_answer(clock: Clock, published: list[float]) -> None:
    waker = Waker(lambda line: None)
    waker.ask(ASLEEP, HOUR)
    wait(clock, waker, 200)
    wait(clock, waker, 100, age=-clock.now)  # the head is up, and has not answered
    assert published == [0, 60, 120, 180, 240]


def test_request_that_fails_is_published_again_sooner(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[float] = []

    def fail(wake: object, data: object) -> None:
        times.append(clock.now)
        if len(times) < 4:
            raise Refused("ThrottlingException", "rate exceeded")

    monkeypatch.setattr(wake, "publish", fail)
    lines: list[str] = []
    wait(clock, Waker(lines.append), 120)
    assert times == [0, 10, 20, 30, 90]
    assert sum("rate exceeded" in line for line in lines) == 1


def test_request_that_fails_is_left_to_a_head_that_is_up(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[float] = []

    def fail(wake: object, data: object) -> None:
        times.append(clock.now)
        raise Refused("ThrottlingException", "rate exceeded")

    monkeypatch.setattr(wake, "publish", fail)
    waker = Waker(lambda line: None)
    waker.ask(ASLEEP, 5)
    wait(clock, waker, 30, age=0)
    assert times == [0]
    wait(clock, waker, 15)  # it is gone
    assert times == [0, 30, 40]


def test_user_with_the_bucket_alone_sees_the_parts_and_the_minutes(clock: Clock, published: list[float]) -> None:
    lines: list[str] = []
    wait(clock, Waker(lines.append), 150)
    first, *rest = lines
    assert first.startswith("asleep since ")
    assert first.endswith(f"wakes in {wake.TIME} ({wake.PARTS})")
    assert rest == ["waiting for the head: 1 minute so far", "waiting for the head: 2 minutes so far"]


@pytest.mark.parametrize(("age", "is_warm"), [(60, True), (890, True), (910, False), (200_000, False)])
def test_head_that_has_just_gone_to_sleep_wakes_sooner(
    clock: Clock, published: list[float], age: float, is_warm: bool
) -> None:
    lines: list[str] = []
    wait(clock, Waker(lines.append), 1, age=age)
    [line] = lines
    assert (wake.WARM_TIME in line) == is_warm
    assert ("-" in line.partition(" since ")[2][:10]) == (age == 200_000), "the day"


def test_stack_shows_its_phases_as_they_change(clock: Clock, published: list[float]) -> None:
    lines: list[str] = []
    phases = {0: "alarm", 30: "EC2", 90: "image", 200: ""}
    waker = Waker(lines.append, lambda: [text for second, text in phases.items() if second <= clock.now][-1])
    wait(clock, waker, 261)
    assert lines[0].endswith(f"wakes in {wake.TIME}")
    assert lines[1:] == [
        "waiting for the head: alarm",
        "waiting for the head: EC2",
        "waiting for the head: image",
        "waiting for the head: 2 minutes so far; image",
        "waiting for the head: 3 minutes so far",
    ]


@pytest.mark.parametrize(
    ("state", "age", "tells"),
    [(ASLEEP, HOUR, True), (LOST, HOUR, True), (ASLEEP, 5, False), (LOST, 5, False), (NEVER, HOUR, False)],
)
def test_lines_are_only_of_a_head_that_can_be_woken(
    clock: Clock, published: list[float], state: HeadState, age: float, tells: bool
) -> None:
    lines: list[str] = []
    assert Waker(lines.append).wait(state, age) == tells
    assert bool(lines) == tells
    assert bool(published) == (state is not NEVER)
    assert not tells or ("asleep" in lines[0]) == (state is ASLEEP)


# The workers

POOLS = workers(
    workers=node_group(),
    workers_b=node_group(zone="us-west-2b"),
    cpu_workers=cpu_group(),
    h100_workers=node_group("h100", "p5.48xlarge", units=8, max=2, default_nodes=2),
    big_workers=node_group("big", "g5.48xlarge", units=8, max=1),
)
ONLY_H100 = workers(h100_workers=node_group("h100", "p5.48xlarge", units=8, max=2, default_nodes=2))
NOT_DEFAULT = {
    **POOLS,
    "groups": {kind: group for kind, group in POOLS["groups"].items() if group["pool"] != "default"},
}


@pytest.mark.parametrize(
    ("settings", "info", "need"),
    [
        ({}, POOLS, ("workers", 1)),
        ({"num_workers": 3}, POOLS, ("workers", 3)),
        ({"num_workers": "2:4"}, POOLS, ("workers", 2)),
        ({"num_workers": 6, "gpu": "H100"}, POOLS, ("h100-workers", 6)),
        ({"gpu": "H100"}, POOLS, ("h100-workers", 16)),
        ({"pool": "big,default", "num_workers": 8}, POOLS, ("big-workers", 8)),
        ({"gpu": "A10G", "num_workers": 4}, POOLS, ("workers", 4)),
        ({"device": "cpu", "num_workers": 12}, POOLS, ("cpu-workers", 12)),
        ({"device": "cpu", "num_workers": 12, "pool": "h100"}, POOLS, ("h100-workers", 1)),
        ({"num_workers": "1:40"}, POOLS, ("workers", 1)),
        ({}, ONLY_H100, ("h100-workers", 16)),
        # The cheapest of these pools is not known, and no pool can hold the last two.
        ({"num_workers": 8}, NOT_DEFAULT, None),
        ({"num_workers": 8}, {**NOT_DEFAULT, "prices": {"p5.48xlarge": 55.0, "g5.48xlarge": 16.0}}, ("big-workers", 8)),
        ({"num_workers": 17, "gpu": "H100"}, POOLS, None),
        ({"gpu": "B300"}, POOLS, None),
        ({"driver": True}, POOLS, None),
        ({}, None, None),
    ],
)
def test_workers_of_a_run_are_requested_with_the_head(
    settings: dict[str, Any], info: Any, need: tuple[str, int] | None
) -> None:
    from ray_on_ecs.run.pool_choice import first_need

    config = RunConfig(command=("train.py",), **settings)
    assert (first_need(config, info) if info else None) == need
    state = HeadState(ray={"groups": info["groups"]} if info else {})
    data = {metric["MetricName"]: metric for metric in workers_of_run(config, state)}
    if info and info["prices"]:
        return
    assert bool(data) == bool(need)
    if need:
        unit = "CPU" if need[0] == "cpu-workers" else "GPU"
        values = {name: metric["Values"] for name, metric in data.items()}
        assert values == {f"{unit}s": [0], f"{unit}sRequested": [need[1]]}
        own = [] if need[0] in ("workers", "cpu-workers") else [{"Name": "Workers", "Value": need[0]}]
        assert all(metric["Dimensions"] == own for metric in data.values())


def test_workers_are_requested_only_while_the_head_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(wake, "publish", lambda wake, data: sent.append(len(data)))
    waker = Waker(print, workers=lambda state: [{}, {}])
    for state, age in ((ASLEEP, HOUR), (ASLEEP, 5), (LOST, HOUR), (LOST, 5)):
        waker.ask(state, age)
    assert sent == [3, 1, 1, 1]


# The phases of a stack

SERVICE: dict[str, Any] = {"serviceName": "head", "status": "ACTIVE", "desiredCount": 1, "runningCount": 0}
SERVICE["capacityProviderStrategy"] = [{"capacityProvider": "of-head"}]
GROUP = {"AutoScalingGroupName": "head-group", "DesiredCapacity": 1, "MaxSize": 1, "Instances": []}
RUNS = {"InstanceId": "i-1", "LifecycleState": "InService", "HealthStatus": "Healthy"}
FAILED = {"Description": "Launching a new EC2 instance", "StatusCode": "Failed"}  # at the time of the question
INSTANCE = {"ec2InstanceId": "i-1", "capacityProviderName": "of-head", "status": "ACTIVE", "agentConnected": True}
ARN = "arn:aws:autoscaling:us-west-2:1:autoScalingGroup:9f:autoScalingGroupName/head-group"


class Cloud:
    """AWS with the head of a stack that sleeps."""

    def __init__(self, **changed: Any) -> None:
        self.answers: dict[str, Any] = {
            "describe_services": {"services": [SERVICE]},
            "describe_capacity_providers": {
                "capacityProviders": [{"autoScalingGroupProvider": {"autoScalingGroupArn": ARN}}]
            },
            "describe_auto_scaling_groups": {"AutoScalingGroups": [GROUP]},
            "describe_scaling_activities": {"Activities": []},
            "list_tasks": {"taskArns": []},
            "list_container_instances": {"containerInstanceArns": []},
            **changed,
        }

    def call(self, service: str, stack: object, method: str, **arguments: Any) -> Any:
        answer = self.answers[method]
        if isinstance(answer, Exception):
            raise answer
        if method == "describe_scaling_activities":
            return {"Activities": [{"StartTime": datetime.now(UTC), **activity} for activity in answer["Activities"]]}
        return answer


def services(**changed: Any) -> dict[str, Any]:
    return {"describe_services": {"services": [{**SERVICE, **changed}]}}


REGISTERED = {
    "list_container_instances": {"containerInstanceArns": ["arn"]},
    "describe_container_instances": {"containerInstances": [INSTANCE]},
    "describe_auto_scaling_groups": {"AutoScalingGroups": [{**GROUP, "Instances": [RUNS]}]},
}
DENIED = Refused("AccessDeniedException", "denied")


@pytest.mark.parametrize(
    ("changed", "phase"),
    [
        (services(desiredCount=0), "the alarm has not acted yet"),
        ({}, "EC2 starts its instance"),
        (REGISTERED, "its instance pulls the image"),
        (services(runningCount=1), "its container runs, and Ray starts"),
        ({"describe_scaling_activities": {"Activities": [{**FAILED, "StatusMessage": NO_CAPACITY}]}}, "EC2 has no "),
        ({"describe_services": DENIED}, ""),
        ({"describe_services": {"services": []}}, ""),
        (services(status="INACTIVE"), ""),
        *(({operation: DENIED}, "") for operation in ("describe_capacity_providers", "describe_auto_scaling_groups")),
        *(
            ({operation: DENIED}, "")
            for operation in ("describe_scaling_activities", "list_container_instances", "list_tasks")
        ),
        ({"describe_services": Refused("ClusterNotFoundException", "no cluster")}, StackNotFound),
    ],
)
def test_phase_of_a_head_that_starts(monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], phase: Any) -> None:
    monkeypatch.setattr(aws, "call", Cloud(**changed).call)
    stack: Any = SimpleNamespace(name="dev", region=REGION, cluster_name="ray", services={"head": "head"})
    if phase is StackNotFound:
        with pytest.raises(StackNotFound):
            aws_status.head_phase(stack)
    else:
        assert aws_status.head_phase(stack).startswith(phase)
        assert bool(aws_status.head_phase(stack)) == bool(phase)
