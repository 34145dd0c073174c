"""Changes of services that the AWS provider can't make, in hooks of an update.

Services of pools that have left the configuration end before the cluster releases their capacity providers: ECS refuses
to take a provider from a cluster while a service uses it, and Pulumi deletes what a program no longer has after all
updates, of which the cluster's list of providers is one.
https://docs.aws.amazon.com/AmazonECS/latest/APIReference/API_PutClusterCapacityProviders.html

A head whose sleep is switched off starts: the state does not know the number of its tasks, so the AWS provider leaves
it as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pulumi

from infra.config.clients import ERRORS, client
from infra.errors import Refusal, error_reason
from infra.tags import SLEEP_TAG

Hook = Callable[[pulumi.ResourceHookArgs], Awaitable[None]]
# The program's event loop registers other resources meanwhile. With `pulumi up --parallel 1` these may fill the threads
# of asyncio.to_thread, and wait for the hook.
THREADS = ThreadPoolExecutor(thread_name_prefix="hooks")


def end_services(region: str) -> Hook:
    """Hook before an update of a cluster's providers: it deletes the services of those that the update removes.

    It waits until their tasks have stopped. Pulumi then finds these services deleted. A task that protects itself after
    this function has looked is stopped, too.
    """

    async def end(update: pulumi.ResourceHookArgs) -> None:
        before, after = update.old_inputs or {}, update.new_inputs or {}
        # A provider that is replaced keeps its name but for the random end: Pulumi updates its service later.
        kept = {provider.rpartition("-")[0] for provider in after.get("capacityProviders", ())}
        providers = before.get("capacityProviders", ())
        removed = {provider for provider in providers if provider.rpartition("-")[0] not in kept}
        if not removed:
            return
        try:
            await _in_thread(_end, client("ecs", region), before["clusterName"], removed)
        except ERRORS as error:
            command = f"aws ecs delete-service --force --cluster {before['clusterName']} --service NAME"
            raise Refusal(
                "ECS",
                f"the services of {' and '.join(sorted(removed))} could not be deleted ({error_reason(error)}); delete "
                f"each with `{command}`, and run `pulumi up` again",
            ) from error

    return end


def start_head(region: str) -> Hook:
    """Hook before an update of the head's service: if that switches sleep off, it sets the number of tasks to 1."""

    async def start(update: pulumi.ResourceHookArgs) -> None:
        before, after = ((inputs or {}).get("tags") or {} for inputs in (update.old_inputs, update.new_inputs))
        if SLEEP_TAG not in before or SLEEP_TAG in after:
            return
        service = update.id.partition(":service/")[2]  # CLUSTER/NAME, from its ARN
        try:
            await _in_thread(_start, client("application-autoscaling", region), client("ecs", region), service)
        except ERRORS as error:
            problem = f"the head could not be started ({error_reason(error)})"
            hint = "check the credentials of the environment (AWS_PROFILE), and run `pulumi up` again"
            raise Refusal("ECS", f"{problem}; {hint}") from error

    return start


async def _in_thread(function: Callable[..., None], *arguments: Any) -> None:
    await asyncio.get_running_loop().run_in_executor(THREADS, function, *arguments)


def _start(scaling: Any, ecs: Any, service: str) -> None:
    """Start the head, and raise its lower bound first: the alarm that stops it is deleted after all updates.

    If ECS does not start it, the update fails, and the head goes on sleeping: the bound is lowered again.
    """
    target: dict[str, Any] = {"ServiceNamespace": "ecs", "ScalableDimension": "ecs:service:DesiredCount"}
    resource_id = f"service/{service}"
    has_target = bool(scaling.describe_scalable_targets(**target, ResourceIds=[resource_id])["ScalableTargets"])
    cluster, _, name = service.partition("/")
    try:
        if has_target:
            scaling.register_scalable_target(**target, ResourceId=resource_id, MinCapacity=1)
        ecs.update_service(cluster=cluster, service=name, desiredCount=1)
    except ERRORS:
        if has_target:
            with contextlib.suppress(*ERRORS):
                scaling.register_scalable_target(**target, ResourceId=resource_id, MinCapacity=0)
        raise


def _end(ecs: Any, cluster: str, providers: Collection[str]) -> None:
    """Delete all services that use these providers, and wait until they are deleted."""
    ending: dict[str, str] = {}
    # As many services as DescribeServices takes.
    pages = ecs.get_paginator("list_services").paginate(cluster=cluster, PaginationConfig={"PageSize": 10})
    for page in pages:
        names = page["serviceArns"]
        found = ecs.describe_services(cluster=cluster, services=names)["services"] if names else []
        for service in found:
            strategy = service.get("capacityProviderStrategy") or []
            if any(item["capacityProvider"] in providers for item in strategy):
                ending[service["serviceArn"]] = service["status"]
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
