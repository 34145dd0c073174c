"""Services and instances of a stack, with the reasons that AWS gives for missing ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

from ray_on_ecs.cluster import aws
from ray_on_ecs.cluster.stack import Stack
from ray_on_ecs.cluster_info import ClusterInfo
from ray_on_ecs.errors import HeadUnavailable, ResourceError, StackNotFound, TrainingError
from ray_on_ecs.node.ray_status import HEAD
from ray_on_ecs.starting import deployments
from ray_on_ecs.starting.cause import explain, is_short, members
from ray_on_ecs.starting.deployments import Deployment
from ray_on_ecs.starting.look import MOST_SERVICES, Look, facts_of
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
    """Auto Scaling group of one kind of worker; `types` has the type of each of its instances."""

    desired: int
    in_service: int
    types: list[str]
    unhealthy: list[str]
    suspended: list[str]

    @property
    def is_at_rest(self) -> bool:
        """True if it has no instance and wants none, and nothing is wrong."""
        return not (self.desired or self.types or self.suspended)

    def line(self, kind: str) -> str:
        """Return the part of the line of `status` and `doctor`."""
        text = f"{self.in_service} of {counted_nodes(self.desired, kind)} in service"
        if self.unhealthy:
            text += f"; unhealthy, being replaced: {', '.join(self.unhealthy)}"
        if self.suspended:
            text += f"; suspended: {', '.join(self.suspended)}"
        return text


def read_groups(stack: Stack, info: ClusterInfo) -> dict[str, Group | None]:
    """Return the Auto Scaling group of each kind of worker, None for a missing one; TrainingError if AWS refuses."""
    names = {kind: group["group"] for kind, group in info["groups"].items()}
    answer = aws.call(stack, "autoscaling", "describe_auto_scaling_groups", AutoScalingGroupNames=[*names.values()])
    found = {group["AutoScalingGroupName"]: _group(group) for group in answer["AutoScalingGroups"]}
    return {kind: found.get(name) for kind, name in names.items()}


def _group(answer: Mapping[str, Any]) -> Group:
    instances = answer["Instances"]
    return Group(
        desired=answer["DesiredCapacity"],
        in_service=len(members(answer, Phase.RUNNING)),
        types=[member.get("InstanceType", "") for member in instances],
        unhealthy=[member["InstanceId"] for member in instances if member["HealthStatus"] == "Unhealthy"],
        suspended=[process["ProcessName"] for process in answer["SuspendedProcesses"]],
    )


def groups_line(groups: Mapping[str, Group | None]) -> str:
    """Return the line of `status` and `doctor`; groups without instances are named only if there is no other."""
    shown = [group.line(kind) for kind, group in groups.items() if group and not group.is_at_rest]
    shown = shown or [group.line(kind) for kind, group in groups.items() if group][:1]
    if missing := ", ".join(kind for kind, group in groups.items() if group is None):
        shown.append(f"the Auto Scaling group of {missing} is missing; pulumi up creates it")
    return "; ".join(shown)


def counted_nodes(number: int, kind: str) -> str:
    """Return a number of nodes of a kind in words: `1 h100-worker-b`."""
    before, noun, after = kind.rpartition("workers")
    return f"{number} {before}{noun.removesuffix('s') if number == 1 else noun}{after}"


def read_services(
    stack: Stack,
    info: ClusterInfo | None = None,
    groups: Mapping[str, Group | None] | None = None,
    kinds: Collection[str] | None = None,
) -> dict[str, Service]:
    """Return the service of each kind of node, by default of all, without missing and inactive ones.

    With `info` the reasons also name what the Auto Scaling groups lack; `groups` is None if AWS refuses them.
    StackNotFound if the stack is down.
    """
    names = {kind: name for kind, name in stack.services.items() if kinds is None or kind in kinds}
    active, look = _describe_services(stack, [*names.values()]), looking(stack)
    services = {}
    for kind, name in names.items():
        if service := active.get(name):
            fault = _fault(look, kind, service, info, (groups or {}).get(kind))
            deployment = deployments.in_progress(service)
            services[kind] = Service(service["runningCount"], service["desiredCount"], fault, deployment)
    return services


def _describe_services(stack: Stack, names: list[str]) -> dict[str, Any]:
    """Return ECS's description of the active services of these names; StackNotFound if the stack is down."""
    found = []
    for start in range(0, len(names), MOST_SERVICES):
        which = {"cluster": stack.cluster_name, "services": names[start : start + MOST_SERVICES]}
        try:
            found += aws.call(stack, "ecs", "describe_services", **which)["services"]
        except aws.Refused as refused:
            if refused.code == "ClusterNotFoundException":
                raise aws.stack_not_found(stack) from refused
            raise
    return {service["serviceName"]: service for service in found if service["status"] == "ACTIVE"}


def looking(stack: Stack) -> Look:
    """Return a look at a stack with the user's credentials."""
    return Look(partial(aws.call, stack), stack.cluster_name)


def _fault(
    look: Look, kind: str, service: Mapping[str, Any], info: ClusterInfo | None, group: Group | None
) -> str | None:
    """Return the reason for missing tasks or instances, or a deployment that failed."""
    lacks_instances = group is not None and group.in_service < group.desired
    if not (lacks_instances or is_short(service)) and deployments.failure(service) is None:
        return None
    known = facts_of(info, kind) if info else {}
    name = info["groups"][kind]["group"] if info and known else look.group_of(service)  # the head's
    answer = look.group(name) if name else None
    return explain(look.nodes(service, answer, **known), datetime.now(UTC)) or "AWS gives no reason yet"


def explain_head(stack: Stack) -> ResourceError | None:
    """Return AWS's reason why the head doesn't answer, or None if ECS can't be asked."""
    try:
        head = read_services(stack, kinds=[HEAD]).get(HEAD)
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


def head_phase(stack: Stack) -> str:
    """Return what a starting head waits for, with the usual time; empty if AWS does not say. Or StackNotFound."""
    try:
        service = next(iter(_describe_services(stack, [stack.services.get(HEAD, HEAD)]).values()), None)
    except StackNotFound:
        raise
    except TrainingError:
        return ""
    if service is None:  # pulumi up replaces it
        return ""
    if service["runningCount"]:
        return "its container runs, and Ray starts (usually 30 s)"
    if not service["desiredCount"]:
        return "the alarm has not acted yet (usually 10 to 30 s)"
    look = looking(stack)
    name = look.group_of(service)
    nodes = look.nodes(service, look.group(name) if name else None)
    fault = "" if look.unknown else explain(nodes, datetime.now(UTC))
    if fault or look.unknown:
        return fault
    if not nodes.instances:
        return "EC2 starts its instance (usually 60 s)"
    return "its instance pulls the image (usually 2 to 4 minutes, or no time if it has the image)"
