"""Questions to AWS about nodes that do not start, each of which AWS may refuse."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from ray_on_ecs.aws import Refused
from ray_on_ecs.contract import DOCUMENTS_VARIABLE
from ray_on_ecs.errors import ResourceError
from ray_on_ecs.run.shortage import Shortage
from ray_on_ecs.starting.cause import explain
from ray_on_ecs.starting.launches import SLOW
from ray_on_ecs.starting.look import Look, WorkersLook, facts_of
from tests.log_lines import collect_lines

NOW = datetime.now(UTC)
GROUP = {"pool": "default", "gpu": "A10G", "units": 1, "types": ["g5.xlarge"], "zones": ["us-west-2a"]}
H100 = {"pool": "h100", "gpu": "H100", "units": 8, "types": ["p5.48xlarge"], "zones": ["us-west-2b"]}
INFO: Any = {
    "prices": None,
    "groups": {
        "workers": {**GROUP, "group": "ray-workers-group", "provider": "of-workers"},
        "h100-workers": {**H100, "group": "ray-h100-workers-group", "provider": "of-h100-workers"},
    },
}
PREFIX = "arn:aws:autoscaling:us-west-2:1:autoScalingGroup:9f:autoScalingGroupName/ray"
Answer = Callable[..., Any]


class Cloud:
    """ECS with a head and two workers, whose instances run and whose tasks end."""

    def __init__(self) -> None:
        self.failures: dict[str, Exception] = {}  # by operation
        self.asked: list[str] = []  # operations so far
        self.task = {
            "stoppedAt": NOW,
            "stopCode": "EssentialContainerExited",
            "stoppedReason": "Essential container in task exited",
            "containers": [{"exitCode": 2}],
        }

    def ask(self, service: str, operation: str, **arguments: Any) -> Any:
        self.asked.append(operation)
        if operation in self.failures:
            raise self.failures[operation]
        return getattr(self, operation)(**arguments)

    def list_services(self, cluster: str, nextToken: str = "") -> Any:
        assert cluster == "ray"
        if nextToken:
            return {"serviceArns": [*(f"p{number}-workers" for number in range(12)), "workers", "h100-workers"]}
        return {"serviceArns": ["head"], "nextToken": "2"}

    def describe_services(self, cluster: str, services: list[str]) -> Any:
        assert len(services) <= 10
        service = {"status": "ACTIVE", "runningCount": 1, "desiredCount": 2}
        return {
            "services": [
                {**service, "serviceName": name, "capacityProviderStrategy": [{"capacityProvider": f"of-{name}"}]}
                for name in services
            ]
        }

    def describe_capacity_providers(self, capacityProviders: list[str]) -> Any:
        arn = f"{PREFIX}-{capacityProviders[0].removeprefix('of-')}-group"
        return {"capacityProviders": [{"autoScalingGroupProvider": {"autoScalingGroupArn": arn}}]}

    def list_tasks(self, cluster: str, serviceName: str, desiredStatus: str) -> Any:
        assert desiredStatus == "STOPPED"
        return {"taskArns": ["task"] if serviceName == "workers" else []}

    def describe_tasks(self, cluster: str, tasks: list[str]) -> Any:
        return {"tasks": [self.task]}

    def list_container_instances(self, cluster: str) -> Any:
        return {"containerInstanceArns": [f"i-{number}" for number in range(250)]}

    def describe_container_instances(self, cluster: str, containerInstances: list[str]) -> Any:
        assert len(containerInstances) <= 100
        known = {"status": "ACTIVE", "registeredResources": [{"name": "GPU", "stringSetValue": ["GPU-1"]}]}
        workers = {"i-3", "i-4"}
        return {
            "containerInstances": [
                {
                    **known,
                    "ec2InstanceId": name,
                    "capacityProviderName": f"of-{'workers' if name in workers else 'head'}",
                }
                for name in containerInstances
            ]
        }

    def describe_auto_scaling_groups(self, **given: Any) -> Any:
        instances = [
            {"InstanceId": f"i-{number}", "LifecycleState": "InService", "AvailabilityZone": "us-west-2a"}
            for number in (3, 4)
        ]
        group = {"AutoScalingGroupName": "g", "DesiredCapacity": 2, "MaxSize": 2, "VPCZoneIdentifier": "subnet-1"}
        return {"AutoScalingGroups": [{**group, "Instances": instances}]}

    def describe_scaling_activities(self, **given: Any) -> Any:
        began = NOW - timedelta(minutes=10)
        launch = {"StatusCode": "Successful", "StartTime": began, "EndTime": began, "Details": "{}"}
        return {"Activities": [{**launch, "Description": f"Launching a new EC2 instance: i-{n}"} for n in (3, 4)]}


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Cloud:
    monkeypatch.setenv(DOCUMENTS_VARIABLE, "s3://bucket/clusters/ray")
    return Cloud()


def waiting_run(cloud: Cloud) -> Shortage:
    return Shortage(INFO, "workers", lambda: (2, 0), NOW, cloud.ask, lambda: NOW)


def test_waiting_run_says_what_status_says(cloud: Cloud) -> None:
    lines = collect_lines()
    run = waiting_run(cloud)
    for _ in range(3):
        run.look()
    look = Look(cloud.ask, "ray")
    [service] = look.services(["workers"])
    of_status = explain(look.nodes(service, look.group("ray-workers-group"), **facts_of(INFO, "workers")), NOW)
    assert run.line == of_status
    assert run.line.startswith("the last task stopped: Ray's token, the head's version of Ray or the image's PyT")
    assert lines == [run.line]
    assert cloud.asked.count("list_services") == 2, "two pages, once: the service's name is known then"


def test_another_kind_has_its_own_answers(cloud: Cloud) -> None:
    nodes = WorkersLook(INFO, "h100-workers", cloud.ask).nodes({"DesiredCapacity": 0, "MaxSize": 2}, [])
    assert (nodes.kind, nodes.pool, nodes.types, nodes.gpus) == ("h100-workers", "h100", ["p5.48xlarge"], 8)
    assert nodes.service
    assert nodes.service["serviceName"] == "h100-workers"
    assert explain(nodes, NOW, 3) == (
        "the run needs 3 instances, and workerPools.h100.max is 2; raise it, or ask for fewer workers"
    )
    late = explain(nodes, NOW, 1, SLOW)
    assert "alarm h100-workers-short is missing or disabled" in late


def test_running_tasks_of_other_zones_are_counted(cloud: Cloud) -> None:
    others = {f"p{number}-workers": {**H100, "provider": f"of-p{number}-workers"} for number in range(2)}
    info: Any = {**INFO, "groups": {**INFO["groups"], **others}}
    look = WorkersLook(info, "h100-workers", cloud.ask)
    group = {"DesiredCapacity": 0, "MaxSize": 2}
    for _ in range(2):
        nodes = look.nodes(group, [])
        assert nodes.elsewhere == 2
        assert nodes.service
        assert nodes.service["serviceName"] == "h100-workers"
    assert cloud.asked.count("list_services") == 2, "two pages, once"
    assert "other zones of pool h100 have 2 of its 2 (workerPools.h100.max)" in explain(nodes, NOW, 1, SLOW)


def test_instances_of_all_kinds_are_listed_once(cloud: Cloud) -> None:
    look = Look(cloud.ask, "ray")
    for service in look.services():
        look.nodes(service, None)
    assert cloud.asked.count("list_container_instances") == 1


ERRORS = {
    "is denied": Refused("AccessDeniedException", "ecs: not authorized"),
    "failed (ecs: Rate exceeded)": Refused("ThrottlingException", "ecs: Rate exceeded"),
    "failed (ecs: not an answer of AWS's)": ResourceError("ecs: not an answer of AWS's"),
    "failed ('tasks')": KeyError("tasks"),
}


@pytest.mark.parametrize("said", ERRORS)
@pytest.mark.parametrize(
    "operation",
    [
        *("list_services", "describe_services", "list_tasks", "describe_tasks"),
        *("list_container_instances", "describe_container_instances"),
    ],
)
def test_refused_question_is_named_and_the_others_are_asked(operation: str, said: str, cloud: Cloud) -> None:
    cloud.failures[operation] = ERRORS[said]
    run = waiting_run(cloud)
    run.look()
    action = "ecs:" + "".join(word.capitalize() for word in operation.split("_"))
    assert run.line.endswith(f"AWS does not tell more: {action} {said}")
    if operation.endswith("instances"):
        assert run.line.startswith("the last task stopped: Ray's token")
    cloud.failures.clear()
    run.look()
    assert "AWS does not tell more" not in run.line, "it is asked again"


@pytest.mark.parametrize("operation", ["describe_auto_scaling_groups", "describe_scaling_activities"])
def test_denied_group_hides_no_task(operation: str, cloud: Cloud) -> None:
    lines = collect_lines()
    cloud.failures[operation] = Refused("AccessDenied", "autoscaling: not authorized")
    run = waiting_run(cloud)
    run.look_if_due()
    assert run.line.startswith("the last task stopped: Ray's token")
    assert f"autoscaling:{''.join(map(str.capitalize, operation.split('_')))} is denied" in run.line
    assert lines == [run.line]


def test_run_outside_a_stack_asks_nothing(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DOCUMENTS_VARIABLE)
    run = waiting_run(cloud)
    run.look()
    assert run.line == ""
    assert cloud.asked == ["describe_auto_scaling_groups", "describe_scaling_activities"]
