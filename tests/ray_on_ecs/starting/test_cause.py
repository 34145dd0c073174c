"""Reason why nothing starts: every state of AWS's tables, alone and among healthy nodes."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import botocore.session
import pytest

from ray_on_ecs.starting import states
from ray_on_ecs.starting.cause import Nodes, explain
from ray_on_ecs.starting.launches import RECENT, SLOW, way_out, without_ids
from ray_on_ecs.starting.states import Phase

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
UNKNOWN = "AStateOfNextYear"
EXITED = "Essential container in task exited"
# AWS's own lists, which grow.
LISTS = {
    ("autoscaling", "ScalingActivityStatusCode"): states.ACTIVITIES,
    ("autoscaling", "LifecycleState"): states.LIFECYCLE,
    ("ecs", "ContainerInstanceStatus"): states.CONTAINER_INSTANCES,
    ("ecs", "TaskStopCode"): states.STOP_CODES,
    ("ecs", "DeploymentRolloutState"): states.ROLLOUTS,
}


@pytest.mark.parametrize("listed", LISTS)
def test_tables_have_all_states_of_aws(listed: tuple[str, str]) -> None:
    model = botocore.session.get_session().get_service_model(listed[0])
    assert set(model.shape_for(listed[1]).enum) <= LISTS[listed].keys()


def ago(minutes: float) -> datetime:
    return NOW - timedelta(minutes=minutes)


def launch(status: str = "Successful", minutes_ago: float = 10, message: str = "", name: str = "i-1") -> dict[str, Any]:
    return {
        "Description": f"Launching a new EC2 instance: {name}.  Status Reason: {message}",
        "Cause": "At 2026-03-01T11:50:00Z an instance was started in response to a difference of capacity.",
        "StartTime": ago(minutes_ago),
        "StatusCode": status,
        "StatusMessage": message,
        "Details": json.dumps({"Subnet ID": "subnet-1"}),
    } | ({"EndTime": ago(minutes_ago - 1)} if status in ("Successful", "Failed", "Cancelled") else {})


def member(name: str, state: str = "InService") -> dict[str, Any]:
    return {"InstanceId": name, "LifecycleState": state, "HealthStatus": "Healthy", "AvailabilityZone": "us-west-2a"}


def instance(name: str, **changed: Any) -> dict[str, Any]:
    gpus = {"name": "GPU", "type": "STRINGSET", "stringSetValue": ["GPU-1"]}
    cpus = {"name": "CPU", "type": "INTEGER", "integerValue": 4096}
    return {
        "ec2InstanceId": name,
        "status": "ACTIVE",
        "agentConnected": True,
        "registeredResources": [cpus, gpus],
        "runningTasksCount": 0,
        **changed,
    }


def stopped(
    minutes_ago: float = 1, reason: str = "Essential container in task exited", **changed: Any
) -> dict[str, Any]:
    return {"stoppedAt": ago(minutes_ago), "stoppedReason": reason, "stopCode": "EssentialContainerExited", **changed}


GROUP: dict[str, Any] = {
    "AutoScalingGroupName": "g",
    "DesiredCapacity": 2,
    "MaxSize": 2,
    "AvailabilityZones": ["us-west-2a"],
    "SuspendedProcesses": [],
    "Instances": [member("i-1"), member("i-2")],
}
SERVICE: dict[str, Any] = {
    "serviceName": "s",
    "runningCount": 2,
    "desiredCount": 2,
    "deployments": [{"status": "PRIMARY", "rolloutState": "COMPLETED", "runningCount": 2}],
    "events": [{"message": "(service s) has reached a steady state.", "createdAt": ago(60)}],
}
HEALTHY = Nodes(
    service=SERVICE,
    group=GROUP,
    activities=[launch(name="i-1"), launch(name="i-2")],
    instances=[instance("i-1"), instance("i-2")],
    stopped=[],
    types=["g5.xlarge"],
    gpus=1,
)
SHORT = {"runningCount": 1, "events": []}


def short_group(have: int, *activities: dict[str, Any]) -> Nodes:
    """Workers of which EC2 has not started all."""
    group = GROUP | {"Instances": GROUP["Instances"][:have]}
    healthy = [launch(name=f"i-{number + 1}", minutes_ago=30) for number in range(have)]
    service = SERVICE | SHORT | {"runningCount": have}
    instances = [instance(f"i-{number + 1}") for number in range(have)]
    return replace(HEALTHY, group=group, service=service, activities=[*activities, *healthy], instances=instances)


def short_tasks(**changed: Any) -> Nodes:
    """Workers with all instances and one task."""
    return replace(HEALTHY, **{"service": SERVICE | SHORT, **changed})


def diagnosis(nodes: Nodes, needed: int | None = None) -> str:
    line = explain(nodes, NOW, needed)
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    ("instance_type", "is_named"),
    [("g5.xlarge", False), ("", False), (None, False), ("g5.12xlarge", True), ("m5.large", True)],
)
def test_an_instance_of_another_type_is_named(instance_type: str | None, is_named: bool) -> None:
    group = GROUP | {"Instances": [{**member("i-1"), "InstanceType": instance_type}, member("i-2")]}
    line = diagnosis(short_tasks(group=group))
    told = f"i-1 is a {instance_type}, and pool default has g5.xlarge now: the head ends it when it is idle"
    assert line == (told if is_named else "")
    assert "Essential container" in diagnosis(short_tasks(group=group, stopped=[stopped()]))


def test_a_driver_is_not_blamed_for_the_gpus_of_a_former_type() -> None:
    members = [{**member("i-1"), "InstanceType": "g5.xlarge"}, {**member("i-2"), "InstanceType": "g5.12xlarge"}]
    four = {"name": "GPU", "type": "STRINGSET", "stringSetValue": [f"GPU-{number}" for number in range(4)]}
    instances = [instance("i-1"), instance("i-2", registeredResources=[four])]
    nodes = short_tasks(group=GROUP | {"Instances": members}, instances=instances, types=["g5.12xlarge"], gpus=4)
    assert diagnosis(nodes).startswith("i-1 is a g5.xlarge, and pool default has g5.12xlarge now")


def test_healthy_nodes_have_no_reason() -> None:
    assert diagnosis(HEALTHY) == diagnosis(HEALTHY, 2) == diagnosis(Nodes()) == ""
    assert diagnosis(replace(HEALTHY, service=None, instances=None, stopped=None)) == ""


@pytest.mark.parametrize("healthy", [0, 1])
@pytest.mark.parametrize("status", [*states.ACTIVITIES, UNKNOWN])
def test_activity_of_each_status(status: str, healthy: int) -> None:
    """A launch that has failed, or lasts too long, is named with AWS's words; one that has just begun is not."""
    phase = states.ACTIVITIES[status].phase if status in states.ACTIVITIES else Phase.STARTING
    young = diagnosis(short_group(healthy, launch(status, 1, "no luck")))
    old = diagnosis(short_group(healthy, launch(status, SLOW.seconds / 60, "no luck")))
    assert bool(young) is (phase is Phase.FAILED)
    assert bool(old) is (phase in (Phase.FAILED, Phase.STARTING))
    if old:
        assert "no luck" in old
    if phase is Phase.STARTING:
        assert status in old
        assert diagnosis(HEALTHY) == "", "a group with all its instances is not held up"


def test_ended_launch_of_unknown_status_is_shown_as_aws_wrote_it() -> None:
    ended = launch(UNKNOWN, 1, "no luck") | {"EndTime": ago(1)}
    assert diagnosis(short_group(1, ended)) == f"EC2 starts no g5.xlarge: {UNKNOWN}: no luck"


# Messages of AWS, from its documentation and from groups of others, by the kind of error.
MESSAGES = {
    "reservation": [
        "ReservationCapacityExceeded - The targeted Capacity Reservation does not enough available instance capacity.",
        "The capacity reservation cr-0123456789abcdef0 is not active",
        "InvalidCapacityReservationId.NotFound",
        "The Capacity Block cr-0123456789abcdef0 has not started",
    ],
    "capacity": [
        "Could not launch On-Demand Instances. InsufficientInstanceCapacity - We currently do not have sufficient",
        "InsufficientHostCapacity",
        "InsufficientReservedInstanceCapacity",
        "UnfulfillableCapacity - Unable to fulfill capacity due to your request configuration.",
        "There is no Spot capacity available that matches your request.",
        "Instance became unhealthy. Termination Reason: Server.InsufficientInstanceCapacity: Insufficient capacity",
        "Server.SpotInstanceTermination: Spot instance termination",
        "Server.SpotInstanceShutdown: Spot instance shutdown",
    ],
    "quota": [
        "VcpuLimitExceeded - You have requested more vCPU capacity than your current vCPU limit of 0 allows",
        "You have requested more vCPU capacity than your current vCPU limit of 0 allows",
        "MaxSpotInstanceCountExceeded - Max spot instance count exceeded",
        "InstanceLimitExceeded",
    ],
    "price": [
        "SpotMaxPriceTooLow",
        "Your Spot request price of 0.1 is lower than the minimum required Spot request fulfillment price of 0.4.",
    ],
    "storage quota": ["Client.VolumeLimitExceeded: Volume limit exceeded", "MaxIOPSLimitExceeded"],
    "verification": [
        "PendingVerification",
        "Your request for accessing resources in this region is being validated, and you will not be able to launch",
    ],
    "blocked": [
        "OptInRequired: You are not subscribed to this service",
        "This account is currently blocked and not recognized as a valid account.",
    ],
    "key": [
        "Instance became unhealthy while waiting for instance to be in InService state. Termination Reason: "
        "Client.InvalidKMSKey.InvalidState: The KMS key provided is in an incorrect state",
        "Client.InternalError: Client error on launch",
        "InvalidKMSKey.Disabled",
    ],
    "service-linked role": ["AuthFailure.ServiceLinkedRoleCreationNotPermitted"],
    "policy": [
        "You are not authorized to perform this operation. User: arn:aws:sts::1:assumed-role/AWSServiceRoleForAuto"
        "Scaling/AutoScaling is not authorized to perform: ec2:RunInstances with an explicit deny in a service control",
        "UnauthorizedOperation",
    ],
    "addresses": [
        "There are not enough free addresses in subnet 'subnet-1' to satisfy the requested number of instances.",
        "InsufficientFreeAddressesInSubnet",
    ],
    "network interfaces": ["NetworkInterfaceLimitExceeded"],
    "subnet": ["InvalidSubnetID.NotFound", "InvalidSubnet", "The subnet ID 'subnet-1' does not exist"],
    "image": ["InvalidAMIID.NotFound", "The AMI ID 'ami-1' does not exist", "Client.InvalidSnapshot.NotFound"],
    "type": [
        "Unsupported - Your requested instance type (p3.8xlarge) is not supported in your requested Availability Zone",
        "InvalidFleetConfiguration",
    ],
    "placement group": ["InvalidPlacementGroup.Unknown", "Placement group 'pg' does not exist"],
    "template": [
        "InvalidLaunchTemplateId.NotFound",
        "The security group 'sg-1' does not exist",
        "InvalidGroup.NotFound",
    ],
    "parameter": ["InvalidParameterValue", "InvalidBlockDeviceMapping"],
    "hook": ["Instance failed to complete user's Lifecycle Action: it was abandoned"],
    "shutdown": ["Client.InstanceInitiatedShutdown: Instance initiated shutdown", "Client.InstanceTerminated"],
    "person": ["Client.UserInitiatedShutdown: User initiated shutdown", "Client.UserInitiatedHibernate"],
    "AWS": [
        "Server.InternalError: Internal error on launch",
        "Server.ScheduledStop",
        "RequestLimitExceeded",
        "Unavailable",
    ],
    "health": ["Instance became unhealthy while waiting for instance to be in InService state."],
}


def test_messages_cover_the_table() -> None:
    assert MESSAGES.keys() == states.LAUNCH_ERRORS.keys()


@pytest.mark.parametrize("status", ["Failed", "Cancelled"])
@pytest.mark.parametrize("healthy", [0, 1])
@pytest.mark.parametrize(("kind", "message"), [(kind, message) for kind, some in MESSAGES.items() for message in some])
def test_launch_error_of_each_kind(kind: str, message: str, healthy: int, status: str) -> None:
    error = states.LAUNCH_ERRORS[kind]
    line = diagnosis(short_group(healthy, launch(status, 1, message)))
    assert states.launch_error(message) is error
    assert way_out(error, "default") in line
    if kind == "capacity":
        assert line.startswith(f"EC2 has {'only 1 of 2' if healthy else 'no'} g5.xlarge")
    elif kind != "quota":
        assert error.means in line
        assert message in line


def test_instances_that_end_at_once_are_a_failure() -> None:
    """EC2 starts and ends an instance again and again: Auto Scaling reports each launch as Cancelled."""
    ends = [launch("Cancelled", minutes, MESSAGES["key"][0], f"i-{minutes}") for minutes in (1, 3, 5)]
    assert diagnosis(short_group(0, *ends)).startswith("EC2 starts no g5.xlarge: Auto Scaling may not use the KMS key")


def test_launch_cancelled_by_a_scale_in_is_no_failure() -> None:
    assert diagnosis(short_group(1, launch("Cancelled", 1, "The desired capacity was lowered."))) == ""


@pytest.mark.parametrize("minutes_ago", [RECENT.seconds / 60 + 1, 24 * 60])
def test_old_failure_is_outdated(minutes_ago: float) -> None:
    assert diagnosis(short_group(1, launch("Failed", minutes_ago, MESSAGES["capacity"][0]))) == ""


def test_failure_of_a_complete_group_is_over() -> None:
    nodes = replace(HEALTHY, activities=[launch("Failed", 1, MESSAGES["capacity"][0]), *(HEALTHY.activities or ())])
    assert diagnosis(nodes) == ""
    assert diagnosis(nodes, 2) == ""


@pytest.mark.parametrize("state", [*states.LIFECYCLE, UNKNOWN])
def test_instance_of_each_lifecycle_state(state: str) -> None:
    group = GROUP | {"Instances": [member("i-1"), member("i-2", state)]}
    line = diagnosis(replace(HEALTHY, group=group, service=SERVICE | SHORT, instances=[instance("i-1")]))
    phase = states.LIFECYCLE.get(state, Phase.RUNNING)
    assert (f"a person has put 1 instance of the group into {state}; aws" in line) is (phase is Phase.PARKED)
    assert ("did not join ECS" in line) is (phase is Phase.RUNNING)


def test_instances_that_a_check_ends_soon_are_named() -> None:
    cause = (
        "At 2026-03-01T11:58:00Z an instance was taken out of service in response to an EC2 health check indicating it"
    )
    ends = [
        {
            "Description": f"Terminating EC2 instance: i-{n}",
            "Cause": cause,
            "StartTime": ago(n),
            "StatusCode": "Successful",
        }
        for n in (2, 5)
    ]
    starts = [launch(minutes_ago=n + 2, name=f"i-{n}") for n in (2, 5)]
    line = diagnosis(short_group(0, *ends, *starts))
    assert line.startswith(
        "instances end within 10 minutes of their start, again and again; aws ec2 get-console-output"
    )
    assert diagnosis(short_group(0, ends[0], *starts)) == "", "a single one may be broken"


def test_suspended_launches_are_named() -> None:
    suspended = [{"ProcessName": "Launch", "SuspensionReason": "User suspended at 2026"}]
    nodes = short_group(1)
    line = diagnosis(replace(nodes, group={**(nodes.group or {}), "SuspendedProcesses": suspended}))
    assert "Launch is suspended (User suspended at 2026); aws autoscaling resume-processes" in line


def test_run_beyond_the_maximum_is_named() -> None:
    assert diagnosis(HEALTHY, 3) == "the run needs 3 instances, and maxWorkers is 2; raise it, or ask for fewer workers"


def test_instances_that_nobody_requests_are_named() -> None:
    group = GROUP | {"DesiredCapacity": 0, "Instances": [], "MaxSize": 8}
    nodes = replace(HEALTHY, group=group, service=SERVICE | {"runningCount": 0, "desiredCount": 0}, instances=[])
    assert explain(nodes, NOW, 2, SLOW - timedelta(seconds=1)) == ""
    assert explain(nodes, NOW, 2, SLOW).startswith("the group is asked for 0 of 2 instances, 3 minutes after the run")
    assert explain(HEALTHY, NOW, 2, SLOW) == explain(nodes, NOW, None, SLOW) == ""


@pytest.mark.parametrize(
    ("elsewhere", "requested", "needed", "is_cause"),
    [(7, 0, 2, True), (8, 0, 1, True), (6, 1, 3, True), (6, 0, 2, False), (0, 0, 8, False), (7, 2, 2, False)],
)
def test_maximum_that_other_zones_use_is_named(elsewhere: int, requested: int, needed: int, is_cause: bool) -> None:
    group = GROUP | {"DesiredCapacity": requested, "Instances": [], "MaxSize": 8}
    nodes = replace(HEALTHY, group=group, service=None, instances=[], pool="h100", elsewhere=elsewhere)
    line = explain(nodes, NOW, needed, SLOW)
    advice = f"and other zones of pool h100 have {elsewhere} of its 8 (workerPools.h100.max); raise it, or wait"
    assert (advice in line) is is_cause


def test_instances_that_never_register_are_named() -> None:
    line = diagnosis(short_tasks(service=SERVICE | SHORT | {"runningCount": 0}, instances=[]))
    assert line.startswith("2 of 2 instances that EC2 runs and bills did not join ECS within 3 minutes: the AMI is not")
    young = [launch(minutes_ago=2, name="i-1"), launch(minutes_ago=3.5, name="i-2")]
    assert diagnosis(short_tasks(instances=[], activities=young)) == "", "they still boot"
    assert diagnosis(short_tasks(instances=[instance("i-1")])).startswith("1 of 2 instances that EC2 runs")


@pytest.mark.parametrize(("has", "gpus"), [(0, 1), (0, 4), (3, 4)])
def test_missing_gpus_are_named(has: int, gpus: int) -> None:
    resources = [{"name": "GPU", "stringSetValue": [f"GPU-{n}" for n in range(has)]}] if has else []
    line = diagnosis(
        short_tasks(gpus=gpus, instances=[instance("i-1", registeredResources=resources), instance("i-2")])
    )
    assert line.startswith(f"i-1 runs, and ECS has registered {has} of its {gpus} GPU")
    assert states.AMI in line


@pytest.mark.parametrize("status", [*states.CONTAINER_INSTANCES, UNKNOWN])
def test_container_instance_of_each_status(status: str) -> None:
    line = diagnosis(short_tasks(instances=[instance("i-1"), instance("i-2", status=status, statusReason="why")]))
    state = states.CONTAINER_INSTANCES.get(status)
    if status == "ACTIVE":
        assert line == ""
    else:
        assert line == f"i-2 {state.means if state else f'is {status}'}: why"


def test_lost_agent_is_named_unless_a_task_runs_there() -> None:
    lost = instance("i-2", agentConnected=False)
    assert diagnosis(short_tasks(instances=[instance("i-1"), lost])).startswith("ECS's agent on i-2 is not connected; ")
    assert diagnosis(short_tasks(instances=[instance("i-1"), lost | {"runningTasksCount": 1}])) == ""


@pytest.mark.parametrize("code", [*states.STOP_CODES, UNKNOWN, ""])
def test_task_of_each_stop_code(code: str) -> None:
    is_fault = states.STOP_CODES.get(code, "") is not None
    line = diagnosis(short_tasks(stopped=[stopped(reason="words of ECS", stopCode=code)]))
    assert ("words of ECS" in line) is is_fault
    unhealthy = diagnosis(short_tasks(stopped=[stopped(reason="Task failed container health checks", stopCode=code)]))
    assert "Task failed container health checks" in unhealthy
    scale_in = stopped(reason="Scaling activity initiated by (deployment 1)", stopCode=code)
    assert diagnosis(short_tasks(stopped=[scale_in])) == ""
    without_reason = diagnosis(short_tasks(stopped=[stopped(reason="", stopCode=code)]))
    assert without_reason.startswith("the last task") is is_fault


@pytest.mark.parametrize("where", ["container", "task"])
@pytest.mark.parametrize("name", states.ERRORS)
def test_error_of_each_name(name: str, where: str) -> None:
    reason = f"{name}: words of ECS"
    task = stopped(containers=[{"reason": reason}]) if where == "container" else stopped(reason=reason)
    line = diagnosis(short_tasks(stopped=[task]))
    meaning = states.ERRORS[name]
    assert line.startswith(f"the last task stopped: {meaning.means}; {meaning.way_out}".removesuffix("; "))
    assert reason in line


@pytest.mark.parametrize("code", [*states.EXIT_CODES, 77, -1])
def test_exit_status_of_each_number(code: int) -> None:
    line = diagnosis(short_tasks(stopped=[stopped(containers=[{"exitCode": code}])]))
    assert f"exit status {code}" in line
    if code in states.EXIT_CODES:
        assert line.startswith(f"the last task stopped: {states.EXIT_CODES[code].means}; ")


REASONS = {
    "driver": "CannotStartContainerError: Error response from daemon: could not select device driver with [[gpu]]",
    "lacks an EFA device": "CannotStartContainerError: Error response from daemon: error gathering device information "
    'while adding custom device "/dev/infiniband/uverbs0": no such file or directory',
    "disk is full": "CannotPullContainerError: write /var/lib/docker: no space left on device",
    "CPU architecture": "exec /usr/bin/ray-head: exec format error",
    "execution role may not read": "ResourceInitializationError: unable to pull secrets or registry auth: fetching "
    "secret data from SSM Parameter Store in us-west-2: AccessDeniedException: User is not authorized to perform: ssm:"
    "GetParameters",
    "can't read Ray's token": "fetching secret data from SSM Parameter Store in us-west-2: invalid ssm parameters",
    "limits the number of pulls": "CannotPullContainerError: toomanyrequests: You have reached your pull rate limit",
    "does not reach the image's registry": "CannotPullContainerError: Get https://1.dkr.ecr/v2/: dial tcp: i/o timeout",
    "does not have the image": "CannotPullContainerError: failed to resolve ref: not found",
    "refuses the execution role": "CannotPullContainerError: denied: requested access to the resource is denied",
    "lacks a command": 'CannotStartContainerError: exec: "ray-head": executable file not found in $PATH',
    "too little room": "RESOURCE:MEMORY",
    "no network interface": "Timeout waiting for network interface provisioning to complete.",
    "may not assume": "ECS was unable to assume the role 'arn:aws:iam::1:role/r' that was provided for this task.",
    "its instance was ended": "Host EC2 (instance i-0123) terminated.",
}


def test_reasons_cover_the_table() -> None:
    assert len(REASONS) == len(states.REASONS)


@pytest.mark.parametrize(("means", "reason"), REASONS.items(), ids=REASONS)
def test_detail_of_each_reason(means: str, reason: str) -> None:
    task = stopped(reason="Task failed to start", stopCode="TaskFailedToStart", containers=[{"reason": reason}])
    line = diagnosis(short_tasks(stopped=[task]))
    assert means in line.partition("(Task failed to start")[0]
    assert reason[:60] in line


def test_container_says_more_than_its_task() -> None:
    oom = {"name": "ray-worker", "exitCode": 137, "reason": "OutOfMemoryError: Container killed due to memory usage"}
    assert diagnosis(short_tasks(stopped=[stopped(containers=[oom])])) == (
        "the last task stopped: the task had no memory left; use an instance type with more memory, or less memory in "
        "the script (Essential container in task exited, exit status 137, OutOfMemoryError: Container killed due to "
        "memory usage)"
    )


def test_newest_fault_counts() -> None:
    scale_in = stopped(1, "Scaling activity initiated by (deployment 1)", stopCode="ServiceSchedulerInitiated")
    tasks = [stopped(30, containers=[{"exitCode": 139}]), scale_in, stopped(2, containers=[{"exitCode": 3}]), {}]
    assert "found no head" in diagnosis(short_tasks(stopped=tasks))


@pytest.mark.parametrize("state", [*states.ROLLOUTS, UNKNOWN])
def test_deployment_of_each_state(state: str) -> None:
    deployments = [{"status": "PRIMARY", "rolloutState": state, "rolloutStateReason": "tasks failed to start."}]
    failed = {"service": SERVICE | SHORT | {"deployments": deployments}}
    line = diagnosis(short_tasks(**failed, stopped=[stopped(containers=[{"exitCode": 127}])]))
    assert ("the last deployment failed" in line) is (state == "FAILED")
    assert "the image lacks its command" in line, "the circuit breaker's cause"
    complete = replace(HEALTHY, service=SERVICE | {"deployments": deployments})
    assert bool(diagnosis(complete)) is (state == "FAILED")
    assert diagnosis(complete, 2) == "", "a run waits for GPUs that others use"


EVENTS = {
    "(service s) was unable to place a task because no container instance met all of its requirements.": True,
    "(service s) is unable to consistently start tasks successfully.": True,
    "(service s) operations are being throttled on elb. Will try again later.": True,
    "(service s) words of next year": True,
    "(service s) has started 1 tasks: (task 1).": False,
    "(service s) has stopped 1 running tasks: (task 1).": False,
    "(service s) (deployment ecs-svc/1) deployment completed.": False,
    "(service s) registered 1 targets in (target-group t)": False,
}


@pytest.mark.parametrize("message", EVENTS)
def test_event_of_the_service(message: str) -> None:
    older = {"message": "(service s) has started 1 tasks: (task 1).", "createdAt": ago(5)}
    events = [{"message": message, "createdAt": ago(1)}, older]
    assert diagnosis(short_tasks(service=SERVICE | SHORT | {"events": events})) == (message if EVENTS[message] else "")
    events = [{"message": message, "createdAt": ago(60)}]
    assert diagnosis(short_tasks(service=SERVICE | SHORT | {"events": events})) == ""


def test_events_before_a_steady_state_are_over() -> None:
    events = [{"message": message, "createdAt": ago(1)} for message in ("has reached a steady state.", "unable to")]
    assert diagnosis(short_tasks(service=SERVICE | SHORT | {"events": events})) == ""


def test_denied_call_is_named_and_the_rest_is_shown() -> None:
    unknown = {"ecs:DescribeTasks": "is denied", "ecs:ListTasks": "failed (timed out)"}
    line = diagnosis(short_tasks(instances=[], unknown=unknown))
    hidden = "AWS does not tell more: ecs:DescribeTasks is denied; ecs:ListTasks failed (timed out)"
    assert line.startswith("2 of 2 instances that EC2 runs")
    assert line.endswith(f"; {hidden}")
    assert diagnosis(short_tasks(stopped=None, unknown=unknown)) == hidden


def test_any_part_may_be_missing() -> None:
    for name in ("service", "group", "activities", "instances", "stopped"):
        diagnosis(replace(short_tasks(), **{name: None}))
    empty: Any = {}
    for nodes in (
        Nodes(service=empty, group=empty, activities=[{}], instances=[{}], stopped=[{}]),
        Nodes(service={"desiredCount": 1, "deployments": [{}], "events": [{}]}, group={"Instances": [{}]}, gpus=4),
        Nodes(service={"desiredCount": 1}, stopped=[{"stoppedAt": NOW, "containers": [{}]}]),
        Nodes(activities=[launch() | {"Details": "no JSON", "StartTime": "yesterday"}], group={"DesiredCapacity": 1}),
    ):
        diagnosis(nodes)


def test_lines_of_one_cause_are_one() -> None:
    first = "2 of 2 instances did not join; get-console-output --instance-id i-0a1b2c3d4e5f67890 (task 8f2c0e7a1b)"
    second = "2 of 2 instances did not join; get-console-output --instance-id i-0a1b2c3d4e5f67891 (task 8f2c0e7a1c)"
    assert without_ids(first) == without_ids(second)
    assert without_ids("EC2 has only 1 of 2 g5.xlarge in us-east-1a") == "EC2 has only 1 of 2 g5.xlarge in us-east-1a"
