"""Decisions on the numbers of workers, for each state of AWS's API, and the thread that carries them out."""

from __future__ import annotations

import itertools
import math
import threading
from dataclasses import replace
from typing import Any

import pytest
from botocore.session import get_session

from ray_on_ecs.cluster_info import NodeGroup
from ray_on_ecs.contract import CLUSTER_INFO_VARIABLE
from ray_on_ecs.errors import one_line
from ray_on_ecs.jobs.record import FAILED, RUNNING, STOPPED, SUCCEEDED, THEN_STOP, Job
from ray_on_ecs.node import numbers, scaling
from ray_on_ecs.node.demand import Need
from ray_on_ecs.node.numbers import End, Host, Member, Memory, Redeploy, SetCapacity, SetCount, View
from ray_on_ecs.node.scaling import Scaler, just_ended, view_of
from tests.aws import client
from tests.ray_on_ecs.node.conftest import GROUP
from tests.scaling_api import EPOCH, Api, Refused
from tests.scaling_simulator import Run, Simulator
from tests.worker_pools import cpu_group, node_group, workers

COMMAND_NAME = "ray-head"

NOW = 10_000.0
LIMITS = node_group(group=GROUP, provider="workers-provider")
NOTHING = Need(requested=0, available=0, in_use=0)


def states(service: str, shape: str) -> list[str]:
    """Return the values of an enumeration in AWS's API."""
    return list(get_session().get_service_model(service).shape_for(shape).enum)


def members(*names: str) -> tuple[Member, ...]:
    return tuple(Member(f"i-{number}", state) for number, state in enumerate(names))


def empty(*tasks: int, age: float = 600, status: str = "ACTIVE") -> dict[str, Host]:
    """Return ECS's hosts with so many tasks each."""
    return {f"i-{number}": Host(count, NOW - age, status) for number, count in enumerate(tasks)}


def seen(*instance_ids: str, seconds: float = 300) -> Memory:
    return Memory(dict.fromkeys(instance_ids, NOW - seconds))


def calls(view: View, need: Need = NOTHING, memory: Memory | None = None, **more: Any) -> list[Any]:
    limits = NodeGroup(**{**LIMITS, **more.pop("limits", {})})
    return numbers.decide(need, limits, view, memory or Memory(), NOW, **more)[0]


# Out


@pytest.mark.parametrize(
    ("need", "limits", "number"),
    [
        (NOTHING, {}, 0),
        (Need(requested=1, available=0, in_use=0), {}, 1),
        (Need(requested=9, available=0, in_use=0), {}, 4),
        (Need(requested=5, available=0, in_use=0), {"units": 4}, 2),
        (Need(requested=2, available=2, in_use=1), {}, 1),
        (Need(requested=2, available=4, in_use=2), {}, 2),
        (Need(requested=1, available=0, in_use=0), {"min": 2}, 2),
        (Need(requested=9, available=4, in_use=4), {}, 4),
        (Need(requested=6, available=0, in_use=0), {"max": 64}, 8),
        (Need(requested=64, available=0, in_use=0), {"max": 64}, 64),
    ],
)
def test_the_number_to_scale_out_to(need: Need, limits: Any, number: int) -> None:
    assert numbers.wanted(need, NodeGroup(**{**LIMITS, **limits})) == number


def test_capacity_comes_first_and_the_count_follows_what_is_in_service() -> None:
    need = Need(requested=3, available=0, in_use=0)
    assert calls(View(count=0, capacity=0, most=4), need) == [SetCapacity(3)]
    view = View(count=0, capacity=3, most=4, members=members("Pending", "Pending", "InService"))
    assert calls(view, need) == [SetCount(1)]
    assert calls(replace(view, count=1), need) == []
    assert calls(replace(view, count=1, members=members(*3 * ["InService"])), need) == [SetCount(3)]


def test_numbers_are_never_lowered_by_demand() -> None:
    need = Need(requested=3, available=1, in_use=1)
    view = View(count=4, capacity=4, most=4, members=members(*4 * ["InService"]))
    assert calls(view, need) == []


def test_the_capacity_follows_a_count_that_someone_else_has_set() -> None:
    assert calls(View(count=2, capacity=1, most=4, members=members("InService"))) == [SetCapacity(2)]
    assert calls(View(count=6, capacity=1, most=3, members=members("InService"))) == [SetCapacity(3)]


def test_more_nodes_in_use_than_the_count_raise_it() -> None:
    view = View(count=1, capacity=2, most=4, members=members(*2 * ["InService"]))
    assert calls(view, Need(requested=2, available=2, in_use=2)) == [SetCount(2)]


@pytest.mark.parametrize("state", [*states("ecs", "DeploymentRolloutState"), "A NEW STATE"])
def test_each_rollout_state(state: str) -> None:
    need = Need(requested=2, available=0, in_use=0)
    starts = calls(View(count=0, capacity=0, most=4, rollout=state, failed_at=NOW - 60), need)
    assert starts == ([] if state == "FAILED" else [SetCapacity(2)])
    view = View(count=0, capacity=1, most=4, rollout=state, members=members("InService"), hosts=empty(0))
    assert calls(view, memory=seen("i-0")) == ([End("i-0")] if state == "COMPLETED" else [])


@pytest.mark.parametrize("state", ["COMPLETED", "IN_PROGRESS", "FAILED"])
@pytest.mark.parametrize(
    ("instance_type", "hosts", "memory", "known", "is_ended"),
    [
        ("p3.2xlarge", empty(0, 1), seen("i-0"), 300, True),
        ("p3.2xlarge", empty(0, 1), seen("i-0", seconds=30), 300, False),
        ("p3.2xlarge", empty(0, 1, age=90), seen("i-0"), 60, False),
        ("p3.2xlarge", empty(0, 1), seen("i-0"), 900, False),  # it has come since
        ("p3.2xlarge", empty(1, 1), seen("i-0"), 300, False),  # it runs a task
        ("p3.2xlarge", empty(0, 1, status="DRAINING"), seen("i-0"), 300, False),
        ("p3.2xlarge", None, seen("i-0"), 300, False),
        (LIMITS["types"][0], empty(0, 1), seen("i-0"), 300, False),
        ("", empty(0, 1), seen("i-0"), 300, False),  # AWS does not name it
    ],
)
def test_an_empty_instance_of_a_former_type_ends(
    state: str, instance_type: str, hosts: dict[str, Host] | None, memory: Memory, known: float, is_ended: bool
) -> None:
    memory = replace(memory, types=LIMITS["types"], types_since=NOW - known)
    others = (Member("i-0", instance_type=instance_type), Member("i-1", instance_type=LIMITS["types"][0]))
    view = View(count=2, capacity=2, most=4, rollout=state, failed_at=NOW - 60, members=others, hosts=hosts)
    need = Need(requested=2, available=1, in_use=1)
    made, after = numbers.decide(need, NodeGroup(**LIMITS), view, memory, NOW)
    assert made == ([End("i-0")] if is_ended else [])
    if is_ended and state != "FAILED":
        ended = replace(view, capacity=1, members=others[1:])
        assert numbers.decide(need, NodeGroup(**LIMITS), ended, after, NOW + 10)[0] == [SetCapacity(2)]


@pytest.mark.parametrize(
    ("need", "failed", "redeployed", "is_due"),
    [
        (Need(requested=2, available=0, in_use=0), 600, math.inf, True),
        (Need(requested=2, available=0, in_use=0), 599, math.inf, False),
        (Need(requested=2, available=0, in_use=0), NOW, math.inf, True),  # AWS gives no time
        (Need(requested=2, available=0, in_use=0), 3600, 599, False),  # the answer is old
        (Need(requested=2, available=0, in_use=0), 3600, 600, True),
        (Need(requested=2, available=1, in_use=1), 3600, math.inf, True),
        (Need(requested=9, available=4, in_use=4), 3600, math.inf, False),  # all of the maximum are up
        (Need(requested=2, available=2, in_use=2), 3600, math.inf, False),
        (NOTHING, 3600, math.inf, False),
    ],
)
def test_a_failed_deployment_is_repeated_for_programs_that_wait(
    need: Need, failed: float, redeployed: float, is_due: bool
) -> None:
    view = View(count=2, capacity=2, most=4, rollout="FAILED", failed_at=NOW - failed)
    limits = NodeGroup(**LIMITS)
    memory = Memory(redeployed_at=NOW - redeployed)
    made, after = numbers.decide(need, limits, view, memory, NOW)
    assert made == ([Redeploy()] if is_due else [])
    assert not is_due or numbers.decide(need, limits, view, after, NOW + 10)[0] == []


@pytest.mark.parametrize(
    "process",
    [
        *("Launch", "Terminate", "AddToLoadBalancer", "AlarmNotification", "AZRebalance", "HealthCheck"),
        *("InstanceRefresh", "ReplaceUnhealthy", "ScheduledActions"),
    ],
)
def test_each_suspended_process(process: str) -> None:
    suspended = frozenset([process])
    need = Need(requested=2, available=0, in_use=0)
    view = View(count=0, capacity=0, most=4, suspended=suspended)
    assert calls(view, need) == ([] if process == "Launch" else [SetCapacity(2)])
    view = View(count=0, capacity=1, most=4, suspended=suspended, members=members("InService"), hosts=empty(0))
    assert calls(view, memory=seen("i-0")) == ([] if process == "Terminate" else [End("i-0")])


# In


# States of instances in the group's desired capacity.
COUNTED = ("Pending", "InService", "Replacing", "RootVolume", "A new")


@pytest.mark.parametrize("state", [*states("autoscaling", "LifecycleState"), "A new state"])
def test_each_lifecycle_state(state: str) -> None:
    view = View(count=1, capacity=2, most=4, members=members("InService", state), hosts=empty(1, 0))
    is_counted = len(numbers.counted(view, Memory())) == 2
    assert is_counted == state.startswith(COUNTED)
    assert calls(view, memory=seen("i-1")) == ([End("i-1")] if state == "InService" else [])


@pytest.mark.parametrize("status", [*states("ecs", "ContainerInstanceStatus"), "INACTIVE", "A NEW STATUS"])
def test_each_status_of_a_container_instance(status: str) -> None:
    view = View(count=0, capacity=1, most=4, members=members("InService"), hosts=empty(0, status=status))
    assert calls(view, memory=seen("i-0")) == ([End("i-0")] if status == "ACTIVE" else [])


EMPTY = View(count=1, capacity=3, most=4, members=members(*3 * ["InService"]), hosts=empty(1, 0, 0))


@pytest.mark.parametrize(
    ("view", "need", "limits", "ended"),
    [
        (EMPTY, NOTHING, {}, ["i-1", "i-2"]),
        (EMPTY, Need(requested=2, available=2, in_use=1), {}, ["i-1"]),
        (EMPTY, Need(requested=3, available=3, in_use=1), {}, []),
        (EMPTY, Need(requested=1, available=1, in_use=3), {}, []),
        (EMPTY, NOTHING, {"min": 2}, ["i-1"]),
        (replace(EMPTY, least=3), NOTHING, {}, []),
        (replace(EMPTY, count=2), NOTHING, {}, []),
        (replace(EMPTY, count=3), NOTHING, {}, []),
        (replace(EMPTY, hosts=empty(1, 1, 0)), NOTHING, {}, ["i-2"]),
        (replace(EMPTY, hosts=empty(1, 0, 0, age=100)), NOTHING, {}, []),
        (replace(EMPTY, capacity=2), NOTHING, {}, []),
        (replace(EMPTY, hosts=None), NOTHING, {}, []),
        (replace(EMPTY, members=(EMPTY.members[0], Member("i-1", is_protected=False), Member("i-2"))), NOTHING, {},
         ["i-2"]),
        (replace(EMPTY, members=(EMPTY.members[0], Member("i-1", is_healthy=False), Member("i-2"))), NOTHING, {},
         ["i-2"]),
    ],
    ids=["two are empty", "one is requested", "two are requested", "all are in use", "the stack's minimum",
         "the group's minimum", "a task is about to be placed", "the count", "one got a task", "just registered",
         "the capacity has been lowered", "ECS was not asked", "ECS is about to end one", "one is replaced"],
)  # fmt: skip
def test_instances_that_nothing_needs_end(view: View, need: Need, limits: Any, ended: list[str]) -> None:
    changes = calls(view, need, seen("i-1", "i-2"), limits=limits)
    assert [call for call in changes if isinstance(call, End)] == [End(each) for each in ended]


def test_an_instance_is_watched_before_it_ends() -> None:
    memory, ends = Memory(), []
    for now in range(int(NOW), int(NOW) + 200, 10):
        made, memory = numbers.decide(NOTHING, LIMITS, EMPTY, memory, now)
        ends += [(now - NOW, call) for call in made]
    assert ends == [(60, End("i-1")), (60, End("i-2"))], "once, though AWS's answer is old"


def test_an_instance_that_gets_a_task_is_watched_again() -> None:
    _, memory = numbers.decide(NOTHING, LIMITS, EMPTY, Memory(), NOW - 50)
    _, memory = numbers.decide(NOTHING, LIMITS, replace(EMPTY, hosts=empty(1, 1, 0)), memory, NOW - 40)
    assert memory.empty_since == {"i-2": NOW - 50}


def test_an_instance_that_never_registers_ends_later() -> None:
    view = View(count=0, capacity=1, most=4, members=members("InService"), hosts={})
    assert calls(view, memory=seen("i-0", seconds=300)) == []
    assert calls(view, memory=seen("i-0", seconds=700)) == [End("i-0")]


def test_a_lost_end_is_repeated_after_the_answers_are_new() -> None:
    memory = Memory({}, {"i-1": NOW - 130, "i-2": NOW - 110})
    _, memory = numbers.decide(NOTHING, LIMITS, EMPTY, memory, NOW)
    assert memory.ended.keys() == {"i-2"}


def test_a_request_that_nothing_needs_is_withdrawn() -> None:
    view = View(count=1, capacity=4, most=4, members=members("InService", "Pending"))
    assert calls(view, memory=Memory(open_since=NOW - 60)) == [SetCapacity(2)]
    assert calls(view, memory=Memory(open_since=NOW - 50)) == []
    assert calls(view, Need(requested=4, available=1, in_use=1), Memory(open_since=NOW - 60)) == []
    assert calls(replace(view, count=4), memory=Memory(open_since=NOW - 60)) == []


@pytest.mark.parametrize(
    ("need", "left", "made"),
    [
        (NOTHING, 0, [SetCount(0)]),
        (Need(requested=1, available=4, in_use=1), 0, [SetCount(1)]),
        (Need(requested=3, available=4, in_use=0), 0, [SetCount(3)]),
        (NOTHING, 2, [SetCount(2)]),
        (NOTHING, 4, []),
        (NOTHING, None, []),
    ],
)
def test_the_count_after_a_run_that_stops_its_workers(need: Need, left: int | None, made: list[Any]) -> None:
    view = View(count=4, capacity=4, most=4, members=members(*4 * ["InService"]))
    assert calls(view, need, left=left) == made


@pytest.mark.parametrize(
    ("idle", "in_use", "left"),
    [((), 0, 0), ((20, 20), 0, 0), ((20, 900), 0, 1), ((20, 900), 1, 2), ((500, 700), 0, 1), ((20,), 2, 2)],
)
def test_what_was_idle_before_a_run_stays(idle: tuple[float, ...], in_use: int, left: int) -> None:
    need = Need(requested=in_use, available=in_use + len(idle), in_use=in_use, idle_seconds=idle)
    assert numbers.left_by(need, LIMITS, NOW - 600, NOW) == left


# Runs


def job(
    status: str = SUCCEEDED, ended: float | None = 100, name: str = "a", then_stop: bool = True, **more: Any
) -> Job:
    metadata = {"run_name": name, "storage_path": "s3://b", **({THEN_STOP: "true"} if then_stop else {})}
    return {
        "submission_id": name,
        "metadata": {**metadata, **more.pop("metadata", {})},
        "status": status,
        "start_time": 0,
        "end_time": None if ended is None else int(1000 * (NOW - ended)),
        "driver_exit_code": {SUCCEEDED: 0, FAILED: 1}.get(status),
        "is_interrupted": False,
        **more,
    }


ACTIVE = job(RUNNING, None, "b", then_stop=False)
GOES_ON = {"max_resubmissions": "3"}


@pytest.mark.parametrize(
    ("jobs", "names"),
    [
        ([job()], ["a"]),
        ([job(FAILED)], ["a"]),
        ([job(STOPPED)], ["a"]),
        ([job(then_stop=False)], []),
        ([job(RUNNING, None)], []),
        ([job(ended=5)], []),
        ([job(ended=20)], ["a"]),
        ([job(ended=20), ACTIVE], []),
        ([job(ended=70), ACTIVE], ["a"]),
        ([job(ended=400)], []),
        ([job(FAILED, driver_exit_code=None, metadata={"max_resubmissions": "3"})], []),
        ([job(FAILED, driver_exit_code=None, metadata={"max_resubmissions": "3", "resubmissions": "3"})], ["a"]),
        ([job(), job(RUNNING, None, start_time=1)], []),
        ([job(ended=20), job(FAILED, 30, "b", then_stop=False, driver_exit_code=None, metadata=GOES_ON)], []),
    ],
    ids=["finished", "failed", "stopped", "without the flag", "runs", "just now", "freed", "another one begins",
         "another one has begun", "long ago", "lost, and submitted again", "lost for good", "resumed",
         "another one is about to be submitted again"],
)  # fmt: skip
def test_runs_that_have_just_ended(jobs: list[Job], names: list[str]) -> None:
    assert [each["submission_id"] for each in just_ended(jobs, NOW)] == names


# AWS


def test_a_refused_call_costs_one_line_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    def on_call(name: str) -> None:
        if name == "SetCapacity":
            raise Refused("AccessDenied")

    simulator = Simulator(4, [Run(2, 600, requested_at=25)], on_call=on_call).stay(1200)
    assert simulator.runs[0].began_at
    [line] = [line for line in capsys.readouterr().err.splitlines() if "SetCapacity" in line]
    line = line.removeprefix("ray-head: scaling: SetCapacity of the workers has failed for 60 s ")
    assert line == "(Refused: AccessDenied); trying again"


def test_one_kind_of_worker_does_not_hold_up_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def scale(scaler: Scaler, cluster: str, kind: str, *_: Any) -> None:
        made.append(kind)
        if kind == "workers":
            raise KeyError("registeredAt")

    monkeypatch.setattr(Scaler, "_scale", scale)
    monkeypatch.setattr(Scaler, "_read_services", lambda self, cluster, limits: {kind: {} for kind in limits})
    monkeypatch.setattr(Scaler, "_read_groups", lambda self, limits: {kind: {} for kind in limits})
    info = workers(workers=LIMITS, cpu_workers=cpu_group())
    need = Need(available=0, requested=4, in_use=0)
    Scaler(list, connect=lambda service: None).look(info, dict.fromkeys(info["groups"], need))
    assert made == ["workers", "cpu-workers"]


def test_answers_are_asked_seldom_while_nothing_is_to_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    simulator = Simulator(4, [Run(2, 6000, requested_at=25)]).stay(900)
    describe = Api.describe_services
    monkeypatch.setattr(
        Api, "describe_services", lambda api, **given: (asked.append(simulator.now), describe(api, **given))[1]
    )
    simulator.stay(600)
    assert len(asked) == 10


def test_a_service_without_workers_or_of_an_earlier_stack_is_left_alone() -> None:
    simulator = Simulator(4, [Run(2, 600, requested_at=0)])
    described = simulator._service()
    for service in ({**described, "status": "INACTIVE"}, {**described, "capacityProviderStrategy": []}):
        simulator._service = lambda service=service: service
        simulator.stay(120)
    assert simulator.calls == []


def test_a_group_that_is_being_deleted_is_left_alone() -> None:
    simulator = Simulator(4, [Run(2, 600, requested_at=0)])
    described = simulator._group()
    simulator._group = lambda: {**described, "Status": "Delete in progress"}
    simulator.stay(120)
    assert simulator.calls == []


@pytest.mark.parametrize(
    ("deployments", "rollout"),
    [
        ([("PRIMARY", "COMPLETED")], "COMPLETED"),
        ([("PRIMARY", "IN_PROGRESS")], "IN_PROGRESS"),
        ([("PRIMARY", "FAILED")], "FAILED"),
        ([("PRIMARY", "IN_PROGRESS"), ("ACTIVE", "COMPLETED")], "IN_PROGRESS"),
        ([("PRIMARY", "COMPLETED"), ("ACTIVE", "FAILED")], "IN_PROGRESS"),
        ([("PRIMARY", None)], "COMPLETED"),
        ([], "COMPLETED"),
    ],
)
def test_deployments_of_a_service(deployments: list[tuple[str, str | None]], rollout: str) -> None:
    listed = [{"status": status, **({"rolloutState": state} if state else {})} for status, state in deployments]
    group = {"DesiredCapacity": 0, "MinSize": 0, "MaxSize": 4, "Instances": []}
    assert view_of({"desiredCount": 0, "deployments": listed}, group).rollout == rollout


def test_a_group_and_a_service_of_aws_get_their_numbers(aws_server: str, autoscaling: Any) -> None:
    ecs = client("ecs", aws_server)
    ecs.create_cluster(clusterName="scaled")
    ecs.register_task_definition(family="scaled", containerDefinitions=[{"name": "ray", "image": "ray", "memory": 64}])
    strategy: Any = {"capacityProviderStrategy": [{"capacityProvider": LIMITS["provider"], "weight": 1, "base": 0}]}
    ecs.create_service(
        cluster="scaled", serviceName="scaled-workers", taskDefinition="scaled", desiredCount=0, **strategy
    )
    info: Any = {**Simulator(4, []).info(), "cluster": "scaled"}
    scaler = Scaler(list)
    # moto does not keep the strategy of a service
    scaler._services = {LIMITS["provider"]: "scaled-workers"}
    scaler._read_services = lambda cluster, limits: {
        "workers": ecs.describe_services(cluster=cluster, services=["scaled-workers"])["services"][0]
    }
    needs = {"workers": Need(requested=3, available=0, in_use=0)}
    for _ in range(2):  # the capacity, and then the count
        scaler.look(info, needs)
    [found] = autoscaling.describe_auto_scaling_groups(AutoScalingGroupNames=[GROUP])["AutoScalingGroups"]
    assert (found["DesiredCapacity"], len(found["Instances"])) == (3, 3)
    [service] = ecs.describe_services(cluster="scaled", services=["scaled-workers"])["services"]
    assert service["desiredCount"] == 3
    scaler._make(End(found["Instances"][0]["InstanceId"]), "scaled", service, found)
    [found] = autoscaling.describe_auto_scaling_groups(AutoScalingGroupNames=[GROUP])["AutoScalingGroups"]
    assert found["DesiredCapacity"] == 2
    [first] = service["deployments"]
    scaler._make(Redeploy(), "scaled", service, found)
    [service] = ecs.describe_services(cluster="scaled", services=["scaled-workers"])["services"]
    assert (service["desiredCount"], service["deployments"][0]["id"] != first["id"]) == (3, True)


@pytest.mark.parametrize(("variable", "threads"), [("info", 1), ("", 0)], ids=["a stack", "elsewhere"])
def test_only_the_head_of_a_stack_scales(monkeypatch: pytest.MonkeyPatch, variable: str, threads: int) -> None:
    begun: list[object] = []
    monkeypatch.setenv(CLUSTER_INFO_VARIABLE, variable)
    monkeypatch.setattr(scaling.threading.Thread, "start", lambda thread: begun.append(thread))
    scaling.start(list, threading.Event())
    assert len(begun) == threads


def test_a_silent_ray_scales_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling.ports, "own_gcs", lambda: "127.0.0.1:9")
    monkeypatch.setattr(scaling, "read_cluster_info", lambda: {"cluster": "ray"})
    times = itertools.count(NOW, 30)
    scaler = Scaler(list, connect=lambda service: pytest.fail(f"{service} was asked"), now=lambda: next(times))
    for _ in range(4):
        assert not scaler.try_to("read demand and numbers", scaler.look_at_ray)
    [line] = capsys.readouterr().err.splitlines()
    assert one_line(line).startswith("ray-head: scaling: read demand and numbers has failed for 60 s (")


def test_the_simulator_has_unix_time() -> None:
    [described] = Api(Simulator(2, [], warm=1)).describe_container_instances("ray", ["i-0"])["containerInstances"]
    assert described["registeredAt"].timestamp() < EPOCH
