"""Services and instances of a stack, with the reasons that AWS gives for missing ones."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from ray_on_ecs.cluster import aws
from ray_on_ecs.cluster.stack import Stack
from ray_on_ecs.cluster_info import ClusterInfo
from ray_on_ecs.errors import GpuError, HeadUnavailable, ResourceError, StackNotFound, TrainingError, counted, one_line
from ray_on_ecs.node.ray_status import HEAD
from ray_on_ecs.run.zone_failover import newest_failure

DEPLOYMENT_FAILED = "the last deployment failed"
# Prefix of a task's stoppedReason after a scale-in or a deployment.
SCALING = "Scaling activity initiated"
# Number of scaling activities to read, the newest first.
ACTIVITIES = 20


@dataclass(frozen=True)
class Service:
    """ECS service; `fault` is ECS's reason for missing tasks or a failed deployment."""

    running: int
    desired: int
    fault: str | None


@dataclass(frozen=True)
class Group:
    """Auto Scaling group of the workers; `failure` is EC2's reason if the last launch failed."""

    desired: int
    in_service: int
    instances: int
    unhealthy: list[str]
    failure: str | None

    def __str__(self) -> str:
        """Return the line of `status` and `doctor`."""
        text = f"{self.in_service} of {counted(self.desired, 'worker')} in service"
        if self.unhealthy:
            text += f"; unhealthy, being replaced: {', '.join(self.unhealthy)}"
        if self.failure:
            text += f"; the last launch failed: {self.failure}"
        return text


def read_services(stack: Stack) -> dict[str, Service]:
    """Return the service of each kind of node, without missing and inactive ones; StackNotFound if it is down."""
    names = list(stack.services.values())
    try:
        found = aws.call("ecs", stack, "describe_services", cluster=stack.cluster_name, services=names)["services"]
    except aws.Refused as refused:
        if refused.code == "ClusterNotFoundException":
            raise aws.stack_not_found(stack) from refused
        raise
    active = {service["serviceName"]: service for service in found if service["status"] == "ACTIVE"}
    return {
        kind: Service(active[name]["runningCount"], active[name]["desiredCount"], _fault(stack, active[name]))
        for kind, name in stack.services.items()
        if name in active
    }


def _fault(stack: Stack, service: Mapping[str, Any]) -> str | None:
    """Return the reason for missing tasks: a deployment that failed, else the last stop of a task, else an event."""
    for deployment in service.get("deployments", ()):
        if deployment.get("rolloutState") == "FAILED":
            reason = one_line(deployment.get("rolloutStateReason") or "ECS gives no reason").removesuffix(".")
            return f"{DEPLOYMENT_FAILED}: {reason}; pulumi config set redeployWorkers WORD and pulumi up try again"
    if service["runningCount"] >= service["desiredCount"]:
        return None
    with suppress(ResourceError):
        if stop := _last_stop(stack, service):
            return f"the last task stopped{stop}"
    events = [one_line(event["message"]) for event in service.get("events", ())]
    return events[0] if events else "ECS gives no reason yet"


def _last_stop(stack: Stack, service: Mapping[str, Any]) -> str | None:
    """Return why a service's last task stopped, which ECS forgets after an hour; None without one.

    Tasks that a scale-in or a deployment stopped don't count.
    """
    cluster = stack.cluster_name
    task_filter = {"serviceName": service["serviceName"], "desiredStatus": "STOPPED"}
    task_arns = aws.call("ecs", stack, "list_tasks", cluster=cluster, **task_filter)["taskArns"]
    tasks = aws.call("ecs", stack, "describe_tasks", cluster=cluster, tasks=task_arns)["tasks"] if task_arns else ()
    stopped = [
        task for task in tasks if task.get("stoppedAt") and not task.get("stoppedReason", "").startswith(SCALING)
    ]
    if not stopped:
        return None
    newest = max(stopped, key=lambda task: task["stoppedAt"])
    reasons = [newest.get("stoppedReason") or "ECS gives no reason"]
    # The task's own reason is often only "Essential container in task exited".
    for container in newest.get("containers", ()):
        if container.get("exitCode") == GpuError.exit_status:
            return " because a GPU is missing or does not compute (its log says which)"
        if container.get("exitCode"):
            reasons.append(f"exit status {container['exitCode']}")
        if container.get("reason"):
            reasons.append(container["reason"])
    return f": {one_line(', '.join(reasons))}"


def explain_head(stack: Stack) -> ResourceError | None:
    """Return ECS's reason why the head doesn't answer, or None if ECS can't be asked."""
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
        state = f"task is not running: it is starting or being replaced; ECS says: {head.fault or 'no task is wanted'}"
    return HeadUnavailable(f"the head's {state}")


def read_group(stack: Stack, info: ClusterInfo) -> Group:
    """Return the workers' Auto Scaling group; TrainingError if AWS refuses, or the group does not exist."""
    name = info["group"]
    groups = aws.call("autoscaling", stack, "describe_auto_scaling_groups", AutoScalingGroupNames=[name])
    if not groups["AutoScalingGroups"]:
        raise ResourceError(f"Auto Scaling group {name} not found; pulumi up creates it")
    group = groups["AutoScalingGroups"][0]
    members = group["Instances"]
    failure = None
    with suppress(ResourceError):
        which = {"AutoScalingGroupName": name, "MaxRecords": ACTIVITIES}
        activities = aws.call("autoscaling", stack, "describe_scaling_activities", **which)["Activities"]
        subnets = [zone["subnet_id"] for zone in info["zones"]]
        failure = newest_failure(activities, subnets, datetime.now(UTC) - timedelta(days=1))
    return Group(
        desired=group["DesiredCapacity"],
        in_service=sum(member["LifecycleState"] == "InService" for member in members),
        instances=len(members),
        unhealthy=[member["InstanceId"] for member in members if member["HealthStatus"] == "Unhealthy"],
        failure=one_line(failure) if failure else None,
    )
