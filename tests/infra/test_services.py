"""Services of capacity providers that leave the cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

import boto3
import pulumi
import pytest
from moto import mock_aws
from moto.core import DEFAULT_ACCOUNT_ID
from moto.ecs.models import ecs_backends

from infra.config import services
from infra.errors import Refusal
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
        monkeypatch.setattr(services, "client", lambda *_: ecs)
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
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:  # asyncio.run would end other tests' loop
        runner.run(services.end_services(REGION)(args))  # ty: ignore


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
        protected = [{"taskArn": each, "protectionEnabled": is_in_use and each.endswith("-101")} for each in tasks]
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
