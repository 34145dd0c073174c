"""Services of pools that have left the configuration: they end before the cluster releases their capacity providers.

ECS refuses to take a capacity provider from a cluster while a service uses it, and Pulumi deletes what a program no
longer has after all updates, of which the cluster's list of providers is one.
https://docs.aws.amazon.com/AmazonECS/latest/APIReference/API_PutClusterCapacityProviders.html
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import pulumi
from botocore.exceptions import BotoCoreError, ClientError

from infra.config.clients import client
from infra.errors import Refusal, error_reason


def end_services(region: str) -> Callable[[pulumi.ResourceHookArgs], Awaitable[None]]:
    """Hook before an update of a cluster's providers: it deletes the services of those that the update removes.

    It waits until their tasks have stopped. Pulumi then finds these services deleted. A task that protects itself after
    this function has looked is stopped, too.

    Raises:
        Refusal: A run uses one of them, ECS refuses, or ECS does not answer.
    """

    async def end(update: pulumi.ResourceHookArgs) -> None:
        before, after = update.old_inputs or {}, update.new_inputs or {}
        kept = {_logical_name(provider) for provider in after.get("capacityProviders", ())}
        # A provider that is replaced keeps its logical name: Pulumi updates its service later.
        removed = {provider for provider in before.get("capacityProviders", ()) if _logical_name(provider) not in kept}
        if not removed:
            return
        try:
            # In a thread: the program's event loop registers other resources meanwhile.
            await asyncio.to_thread(_end, client("ecs", region), before["clusterName"], removed)
        except (BotoCoreError, ClientError) as error:
            command = f"aws ecs delete-service --force --cluster {before['clusterName']} --service NAME"
            raise Refusal(
                "ECS",
                f"the services of {' and '.join(sorted(removed))} could not be deleted ({error_reason(error)}); delete "
                f"each with `{command}`, and run `pulumi up` again",
            ) from error

    return end


def _end(ecs: Any, cluster: str, providers: Collection[str]) -> None:
    """Delete all services that use these providers, and wait also for those that are being deleted."""
    ending: dict[str, str] = {}
    # As many services as DescribeServices takes.
    pages = ecs.get_paginator("list_services").paginate(cluster=cluster, PaginationConfig={"PageSize": 10})
    for page in pages:
        names = page["serviceArns"]
        found = ecs.describe_services(cluster=cluster, services=names)["services"] if names else []
        ending |= {service["serviceArn"]: service["status"] for service in found if _uses(service, providers)}
    active = [service for service, status in ending.items() if status == "ACTIVE"]
    for service in active:
        _refuse_in_use(ecs, cluster, service)
    for service in active:
        ecs.delete_service(cluster=cluster, service=service, force=True)
    for service in ending:
        ecs.get_waiter("services_inactive").wait(cluster=cluster, services=[service])


def _refuse_in_use(ecs: Any, cluster: str, service: str) -> None:
    """Raise a Refusal if a task of the service has protected itself (ray_on_ecs/node/protection.py)."""
    # As many tasks as GetTaskProtection takes.
    pages = ecs.get_paginator("list_tasks").paginate(cluster=cluster, serviceName=service)
    for page in pages:
        tasks = page["taskArns"]
        protected = ecs.get_task_protection(cluster=cluster, tasks=tasks)["protectedTasks"] if tasks else []
        if any(task["protectionEnabled"] for task in protected):
            name = service.rpartition("/")[2]
            hint = "stop it (`ray-on-ecs runs`, `ray-on-ecs stop NAME`) or wait, and run `pulumi up` again"
            raise Refusal("ECS", f"the service {name} of a removed pool or zone is in use by a run; {hint}")


def _logical_name(provider: str) -> str:
    """Name of a capacity provider without the random end that Pulumi adds."""
    return provider.rpartition("-")[0]


def _uses(service: dict[str, Any], providers: Collection[str]) -> bool:
    strategy = service.get("capacityProviderStrategy") or []
    return any(item["capacityProvider"] in providers for item in strategy)
