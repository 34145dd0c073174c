"""Services and instances of a stack, with the reasons that AWS gives for missing ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ray_on_ecs.cluster import aws
from ray_on_ecs.cluster.stack import Stack
from ray_on_ecs.cluster_info import ClusterInfo
from ray_on_ecs.errors import HeadUnavailable, ResourceError, StackNotFound, TrainingError, counted
from ray_on_ecs.node.ray_status import HEAD, WORKERS
from ray_on_ecs.starting import deployments
from ray_on_ecs.starting.cause import explain, is_short, members
from ray_on_ecs.starting.deployments import Deployment
from ray_on_ecs.starting.look import Look
from ray_on_ecs.starting.states import Phase


@dataclass(frozen=True)
class Service:
    """ECS service; `fault` is the reason for missing tasks or instances, and `deployment` is the one in progress."""

    running: int
    desired: int
    fault: str | None
    deployment: Deployment | None = None


@dataclass(frozen=True)
class Group:
    """Auto Scaling group of the workers."""

    desired: int
    in_service: int
    instances: int
    unhealthy: list[str]
    suspended: list[str]

    def __str__(self) -> str:
        """Return the line of `status` and `doctor`."""
        text = f"{self.in_service} of {counted(self.desired, 'worker')} in service"
        if self.unhealthy:
            text += f"; unhealthy, being replaced: {', '.join(self.unhealthy)}"
        if self.suspended:
            text += f"; suspended: {', '.join(self.suspended)}"
        return text


def read_services(stack: Stack, info: ClusterInfo | None = None) -> dict[str, Service]:
    """Return the service of each kind of node, without missing and inactive ones; StackNotFound if it is down.

    With the description of the workers, the reasons also name what their Auto Scaling group lacks.
    """
    names = list(stack.services.values())
    try:
        found = aws.call("ecs", stack, "describe_services", cluster=stack.cluster_name, services=names)["services"]
    except aws.Refused as refused:
        if refused.code == "ClusterNotFoundException":
            raise aws.stack_not_found(stack) from refused
        raise
    active = {service["serviceName"]: service for service in found if service["status"] == "ACTIVE"}
    return {
        kind: Service(
            active[name]["runningCount"],
            active[name]["desiredCount"],
            _fault(stack, kind, active[name], info if kind == WORKERS else None),
            deployments.in_progress(active[name]),
        )
        for kind, name in stack.services.items()
        if name in active
    }


def looking(stack: Stack) -> Look:
    """Return a look at a stack with the user's credentials."""
    return Look(lambda name, operation, **arguments: aws.call(name, stack, operation, **arguments), stack.cluster_name)


def _fault(stack: Stack, kind: str, service: Mapping[str, Any], info: ClusterInfo | None) -> str | None:
    """Return the reason for missing tasks or instances, or a deployment that failed."""
    look = looking(stack)
    group = look.group(info["group"]) if info else None
    if not is_short(service, group) and deployments.failure(service) is None:
        return None
    if group is None and not info and (name := look.group_of(service)):
        group = look.group(name)
    known: dict[str, Any] = {"types": info["types"], "gpus": info["gpus"]} if info else {}
    return explain(look.nodes(service, group, **known), datetime.now(UTC)) or "AWS gives no reason yet"


def explain_head(stack: Stack) -> ResourceError | None:
    """Return AWS's reason why the head doesn't answer, or None if ECS can't be asked."""
    try:
        head = read_services(stack).get(HEAD)
    except StackNotFound as cause:
        return cause
    except TrainingError:
        return None
    if head is None:
        return aws.stack_not_found(stack)
    if head.running:
        state = "task runs, and Ray doesn't answer yet: it is starting, or being replaced; try again in a minute"
    else:
        state = f"task is not running: it is starting or being replaced; {head.fault or 'no task is wanted'}"
    return HeadUnavailable(f"the head's {state}")


def read_group(stack: Stack, info: ClusterInfo) -> Group:
    """Return the workers' Auto Scaling group; TrainingError if AWS refuses, or the group does not exist."""
    name = info["group"]
    groups = aws.call("autoscaling", stack, "describe_auto_scaling_groups", AutoScalingGroupNames=[name])
    if not groups["AutoScalingGroups"]:
        raise ResourceError(f"Auto Scaling group {name} not found; pulumi up creates it")
    group = groups["AutoScalingGroups"][0]
    return Group(
        desired=group["DesiredCapacity"],
        in_service=len(members(group, Phase.RUNNING)),
        instances=len(group["Instances"]),
        unhealthy=[member["InstanceId"] for member in group["Instances"] if member["HealthStatus"] == "Unhealthy"],
        suspended=[process["ProcessName"] for process in group["SuspendedProcesses"]],
    )
