"""Services of capacity providers that leave the cluster, and the head's when its sleep is switched off."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import boto3
import pulumi
import pytest
from botocore.exceptions import EndpointConnectionError
from moto import mock_aws
from moto.core import DEFAULT_ACCOUNT_ID
from moto.ecs.models import ecs_backends

from infra.config import services
from infra.errors import Refusal
from infra.tags import SLEEP_TAG
from tests.infra.fake_aws import REGION

KINDS = ("head", "workers", "cpu-workers", "h100-workers")
MANY = tuple(f"pool{number}-workers" for number in range(12))


@pytest.fixture
def ecs(monkeypatch: pytest.MonkeyPatch) -> Generator[Any]:
    """ECS with a cluster that has a service for each kind of node, and one without a capacity provider."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    mock = mock_aws()
    mock.start(reset=False)  # other tests of this process have a moto server with the same accounts
    try:
        ecs_backends[DEFAULT_ACCOUNT_ID][REGION].reset()
        ecs = boto3.client("ecs", region_name=REGION)
        clients = {"ecs": ecs, "application-autoscaling": boto3.client("application-autoscaling", region_name=REGION)}
        monkeypatch.setattr(services, "client", lambda service, _: clients[service])
        ecs.create_cluster(clusterName="ray")
        container = {"name": "ray", "image": "ray", "memory": 512}
        ecs.register_task_definition(family="ray", containerDefinitions=[container])
        of_service: dict[str, Any] = {"cluster": "ray", "taskDefinition": "ray", "desiredCount": 1}
        for kind in (*KINDS, *MANY):
            ecs.create_service(serviceName=kind, **of_service)
            # Moto forgets it.
            made: Any = ecs_backends[DEFAULT_ACCOUNT_ID][REGION].services[f"ray:{kind}"]
            made.capacity_provider_strategy = [{"capacityProvider": provider(kind), "weight": 1}]
        ecs.create_service(serviceName="other", launchType="EC2", **of_service)
        yield ecs
    finally:
        mock.stop(remove_data=False)


def running(ecs: Any) -> set[str]:
    """Names of the services that are left."""
    found = ecs.describe_services(cluster="ray", services=[*KINDS, *MANY, "other"])["services"]
    return {service["serviceName"] for service in found if service["status"] == "ACTIVE"}


def provider(kind: str) -> str:
    """Name of a kind's capacity provider; that of `KIND=END` has another end, as after a replacement."""
    name, _, end = kind.partition("=")
    return f"ray-on-ecs-{name}-capacity-provider-{end or '1a2b3c4'}"


def update(before: tuple[str, ...], after: tuple[str, ...], cluster: str = "ray") -> None:
    """Run the hook for a cluster whose providers change."""
    inputs = [
        {"clusterName": cluster, "capacityProviders": [provider(kind) for kind in kinds]} for kinds in (before, after)
    ]
    args = pulumi.ResourceHookArgs("urn", "ray", "providers", "type", old_inputs=inputs[0], new_inputs=inputs[1])
    run(services.end_services(REGION)(args))


def run(hook: Any) -> None:
    """Run a hook to its end, while all threads of the event loop wait, as they may for Pulumi's engine."""
    ended = threading.Event()
    # asyncio.run would end other tests' loop.
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner, ThreadPoolExecutor(1) as threads:
        runner.get_loop().set_default_executor(threads)
        threads.submit(ended.wait)
        try:
            runner.run(asyncio.wait_for(hook, 120))
        finally:
            ended.set()


@pytest.mark.parametrize(
    ("after", "removed"),
    [
        (KINDS[:3], {"h100-workers"}),
        (("head", "workers"), {"cpu-workers", "h100-workers"}),
        (("head", "workers", "h100-workers"), {"cpu-workers"}),
        (("head", "workers", "cpu-workers", "h100-workers-b"), {"h100-workers"}),
        (KINDS, set()),
        (KINDS[::-1], set()),
        ((*KINDS, "l4-workers"), set()),
        (("head=5d6e7f8", "workers=5d6e7f8", "cpu-workers", "h100-workers=5d6e7f8"), set()),
    ],
    ids=["a pool", "two", "CPU workers", "another name", "nothing", "another order", "one more", "replacements"],
)
def test_services_of_removed_providers_end_first(ecs: Any, after: tuple[str, ...], removed: set[str]) -> None:
    update(KINDS, after)
    assert running(ecs) == {*KINDS, *MANY, "other"} - removed


def test_services_of_every_page_end(ecs: Any) -> None:
    update((*KINDS, *MANY), KINDS)
    assert running(ecs) == {*KINDS, "other"}


def test_service_that_is_gone_is_no_error(ecs: Any) -> None:
    ecs.delete_service(cluster="ray", service="h100-workers", force=True)
    update(KINDS, KINDS[:3])
    assert "h100-workers" not in running(ecs)


@pytest.mark.parametrize("is_in_use", [True, False], ids=["by a run", "idle"])
def test_pool_of_a_run_keeps_its_services(ecs: Any, monkeypatch: pytest.MonkeyPatch, is_in_use: bool) -> None:
    """A task of the last of many has protected itself; Moto starts no tasks of services."""
    arn = f"arn:aws:ecs:{REGION}:{DEFAULT_ACCOUNT_ID}:task/ray/"
    tasks = {f"ray-{number}": number == 101 for number in range(102)}

    class Pages:
        def paginate(self, cluster: str, **asked: Any) -> list[dict[str, Any]]:
            names = [f"{arn}{name}" for name in tasks] if asked["serviceName"].endswith("/cpu-workers") else []
            return [{"taskArns": names[:100]}, {"taskArns": names[100:]}]

    def get_task_protection(cluster: str, tasks: list[str]) -> dict[str, Any]:
        assert len(tasks) <= 100  # ECS's limit
        protected = [{"taskArn": task, "protectionEnabled": is_in_use and task.endswith("-101")} for task in tasks]
        return {"protectedTasks": protected, "failures": []}

    paginator = ecs.get_paginator
    monkeypatch.setattr(ecs, "get_paginator", lambda name: Pages() if name == "list_tasks" else paginator(name))
    monkeypatch.setattr(ecs, "get_task_protection", get_task_protection, raising=False)
    if is_in_use:
        with pytest.raises(
            Refusal, match=r"^ECS: the service cpu-workers of a removed pool or zone is in use by a run; "
        ):
            update(KINDS, ("head", "workers"))
    else:
        update(KINDS, ("head", "workers"))
    assert ("h100-workers" in running(ecs)) == ("cpu-workers" in running(ecs)) == is_in_use


def test_refusal_names_reason_and_way_out(ecs: Any) -> None:
    with pytest.raises(Refusal) as refused:
        update(KINDS, KINDS[:3], cluster="absent")
    assert str(refused.value).startswith(
        "ECS: the services of ray-on-ecs-h100-workers-capacity-provider-1a2b3c4 could not be deleted (An error "
    )
    assert str(refused.value).endswith(
        "; delete each with `aws ecs delete-service --force --cluster absent --service NAME`, and run `pulumi up` again"
    )


TARGET = {"ServiceNamespace": "ecs", "ScalableDimension": "ecs:service:DesiredCount", "ResourceId": "service/ray/head"}


def update_head(before: bool, after: bool, service: str = "head") -> None:
    """Run the hook for the head's service, whose sleep is on or off before and after an update."""
    inputs = [{"tags": {"Name": "head", **({SLEEP_TAG: "true"} if sleeps else {})}} for sleeps in (before, after)]
    arn = f"arn:aws:ecs:{REGION}:{DEFAULT_ACCOUNT_ID}:service/ray/{service}"
    args = pulumi.ResourceHookArgs("urn", arn, "head", "type", old_inputs=inputs[0], new_inputs=inputs[1])
    run(services.start_head(REGION)(args))


def scaling() -> Any:
    """Application Auto Scaling."""
    return services.client("application-autoscaling", REGION)


def bounds() -> list[tuple[int, int]]:
    """Bounds of all scalable services."""
    targets = scaling().describe_scalable_targets(ServiceNamespace="ecs")["ScalableTargets"]
    return [(target["MinCapacity"], target["MaxCapacity"]) for target in targets]


def count(ecs: Any, name: str = "head") -> int:
    """Desired number of tasks of a service."""
    return ecs.describe_services(cluster="ray", services=[name])["services"][0]["desiredCount"]


@pytest.fixture
def sleeping(ecs: Any) -> Generator[Any]:
    """ECS with a head that sleeps, and workers at zero."""
    for name in ("head", "workers"):
        ecs.update_service(cluster="ray", service=name, desiredCount=0)
    scaling().register_scalable_target(**TARGET, MinCapacity=0, MaxCapacity=1)
    yield ecs
    if bounds():
        scaling().deregister_scalable_target(**TARGET)


@pytest.mark.parametrize("running", [0, 1], ids=["asleep", "awake"])
def test_head_runs_after_its_sleep_is_switched_off(sleeping: Any, running: int) -> None:
    sleeping.update_service(cluster="ray", service="head", desiredCount=running)
    update_head(before=True, after=False)
    assert count(sleeping) == 1
    assert bounds() == [(1, 1)], "the sleep alarm, which is deleted later, would stop it again"
    assert count(sleeping, "workers") == 0


@pytest.mark.parametrize(
    ("before", "after"), [(True, True), (False, True), (False, False)], ids=["still on", "switched on", "never on"]
)
def test_other_updates_of_the_head_ask_aws_nothing(
    sleeping: Any, monkeypatch: pytest.MonkeyPatch, before: bool, after: bool
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(services, "client", None)
        update_head(before, after)
    assert (count(sleeping), bounds()) == (0, [(0, 1)])


def test_head_starts_without_a_scalable_target(sleeping: Any) -> None:
    """An `up` that was to switch sleep on, and ended before."""
    scaling().deregister_scalable_target(**TARGET)
    update_head(before=True, after=False)
    assert (count(sleeping), bounds()) == (1, [])


def test_head_starts_with_the_next_up_after_an_interruption(sleeping: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(**_: Any) -> None:
        raise EndpointConnectionError(endpoint_url="https://ecs.us-west-2.amazonaws.com/")

    with monkeypatch.context() as patch:
        patch.setattr(sleeping, "update_service", unreachable)
        with pytest.raises(Refusal, match=r"^ECS: the head could not be started \(Could not connect to "):
            update_head(before=True, after=False)
    assert (count(sleeping), bounds()) == (0, [(0, 1)]), "it sleeps as before"
    update_head(before=True, after=False)
    assert (count(sleeping), bounds()) == (1, [(1, 1)])


def test_refusal_to_start_the_head_is_one_line(sleeping: Any) -> None:
    with pytest.raises(Refusal) as refused:
        update_head(before=True, after=False, service="absent")
    line = str(refused.value)
    assert line.startswith("ECS: the head could not be started (An error occurred (ServiceNotFoundException)")
    assert line.endswith("; check the credentials of the environment (AWS_PROFILE), and run `pulumi up` again")
    assert "\n" not in line
