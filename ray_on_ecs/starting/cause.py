"""Reason why nodes of one kind have not started, and the way out, on one line.

Pure functions of AWS's answers, of which any part may be missing. They look for the cause in the order in which a node
starts: its group, EC2, ECS's agent, its task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from ray_on_ecs.contract import DEFAULT_POOL, WORKERS
from ray_on_ecs.errors import counted, one_line
from ray_on_ecs.pools import setting
from ray_on_ecs.starting import deployments, launches, states
from ray_on_ecs.starting.launches import RECENT, SLOW, at, minutes
from ray_on_ecs.starting.states import Phase
from ray_on_ecs.starting.stops import last_stop

Document = Mapping[str, Any]

DEPLOYMENT_FAILED = "the last deployment failed"


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """AWS's answers about nodes of one kind; None where it has not answered."""

    service: Document | None = None
    group: Document | None = None
    activities: Sequence[Document] | None = None  # the group's last scaling activities
    instances: Sequence[Document] | None = None  # container instances of their capacity provider
    stopped: Sequence[Document] | None = None  # the service's tasks that have stopped
    kind: str = WORKERS
    pool: str = DEFAULT_POOL
    types: Sequence[str] = ()  # their instance types; nothing if they are not known
    gpus: int = 0  # GPUs of an instance
    elsewhere: int = 0  # running tasks of their pool in its other zones
    unknown: Mapping[str, str] = field(default_factory=dict)  # reasons of answers that are missing, by IAM action


def explain(nodes: Nodes, now: datetime, needed: int | None = None, waited: timedelta = timedelta()) -> str:
    """Return why nodes have not started, and the way out; empty if nothing is known to be wrong.

    `needed` is the number of instances that a run has waited for, by default those that the group asks for.
    """
    # A run that waits for GPUs in use does not wait for a deployment.
    failed = _failed_deployment(nodes) if needed is None or is_short(nodes.service) else ""
    cause = failed or _group(nodes, now, needed) or _ecs(nodes, now)
    if not cause and waited >= SLOW:
        cause = _not_requested(nodes, needed)
    hidden = "; ".join(f"{action} {reason}" for action, reason in nodes.unknown.items())
    return "; ".join(filter(None, (cause, hidden and f"AWS does not tell more: {hidden}")))


def is_short(service: Document | None) -> bool:
    """Return whether tasks are missing."""
    return service is not None and service.get("runningCount", 0) < service.get("desiredCount", 0)


def members(group: Document | None, *phases: Phase) -> list[Document]:
    """Return the group's instances in these phases; one in a state that AWS has added counts as running."""
    listed = (group or {}).get("Instances") or ()
    return [each for each in listed if states.LIFECYCLE.get(str(each.get("LifecycleState")), Phase.RUNNING) in phases]


def _failed_deployment(nodes: Nodes) -> str:
    reason = deployments.failure(nodes.service or {})
    if reason is None:
        return ""
    causes = filter(None, (last_stop(nodes.stopped or ()), reason))
    way_out = (
        "while a run waits, the head tries again after 10 minutes; "
        "pulumi config set redeployWorkers WORD and pulumi up does at once"
    )
    return f"{DEPLOYMENT_FAILED}: {'; '.join((*causes, way_out))}"


def _group(nodes: Nodes, now: datetime, needed: int | None) -> str:
    """Return what keeps the group from having its instances."""
    group, activities = nodes.group, nodes.activities or ()
    if group is None:
        return ""
    name = group.get("AutoScalingGroupName")
    have = len(members(group, Phase.RUNNING, Phase.STARTING))
    wanted = group.get("DesiredCapacity", 0) if needed is None else needed
    short_lives = launches.short_lives(activities, now)
    if len(members(group, Phase.RUNNING)) >= wanted:
        return short_lives
    most = group.get("MaxSize")
    if needed is not None and most is not None and needed > most:
        fewer = ", or ask for fewer workers" if most else ""
        return (
            f"the run needs {counted(needed, 'instance')}, and {setting(nodes.pool, 'max')} is {most}; raise it{fewer}"
        )
    for process in group.get("SuspendedProcesses") or ():
        if process.get("ProcessName") == "Launch":
            why = one_line(process.get("SuspensionReason") or "AWS gives no reason")
            return (
                f"Auto Scaling starts no instance, as its process Launch is suspended ({why}); aws autoscaling "
                f"resume-processes --scaling-processes Launch --auto-scaling-group-name {name}"
            )
    failure = launches.newest_failure(activities, now - RECENT) if have < wanted else None
    if failure:
        zones = " or ".join(group.get("AvailabilityZones") or ())
        return launches.launch_line(
            failure, nodes.types, zones, f"only {have} of {wanted}" if have else "no", nodes.pool
        )
    return short_lives or launches.slow_launch(activities, now) or _parked(group)


def _not_requested(nodes: Nodes, needed: int | None) -> str:
    """Return the line for a group that has not been asked for the instances of a run."""
    group = nodes.group or {}
    requested, most = group.get("DesiredCapacity"), group.get("MaxSize")
    if requested is None or needed is None or requested >= needed:
        return ""
    if nodes.elsewhere and most is not None and nodes.elsewhere + needed > most:
        return (
            f"the run needs {counted(needed, 'instance')}, and other zones of pool {nodes.pool} have {nodes.elsewhere} "
            f"of its {most} ({setting(nodes.pool, 'max')}); raise it, or wait for them to stop"
        )
    return (
        f"the group is asked for {requested} of {counted(needed, 'instance')}, {minutes(SLOW)} after the run asked: "
        f"the head's calls fail (its log says why), and alarm {nodes.kind}-short is missing or disabled, or gets no "
        "demand; pulumi up --refresh --run-program repairs the alarm"
    )


def _parked(group: Document) -> str:
    parked = members(group, Phase.PARKED)
    if not parked:
        return ""
    names = " ".join(str(each.get("InstanceId")) for each in parked)
    return (
        f"a person has put {counted(len(parked), 'instance')} of the group into {parked[0]['LifecycleState']}; aws "
        f"autoscaling exit-standby --auto-scaling-group-name {group.get('AutoScalingGroupName')} --instance-ids {names}"
    )


def _ecs(nodes: Nodes, now: datetime) -> str:
    """Return what keeps ECS from running the tasks, although the instances are there."""
    service = nodes.service
    if service is not None and service.get("runningCount", 0) >= service.get("desiredCount", 0):
        return ""
    return (
        _unregistered(nodes, now)
        or _without_gpus(nodes)
        or last_stop(nodes.stopped or ())
        or _unfit(nodes)
        or _of_former_type(nodes)
        or _event(service or {}, now)
    )


def _unregistered(nodes: Nodes, now: datetime) -> str:
    if nodes.instances is None or nodes.activities is None:
        return ""
    known = {instance.get("ec2InstanceId") for instance in nodes.instances}
    since = launches.in_service_since(nodes.activities)
    running = [str(each.get("InstanceId")) for each in members(nodes.group, Phase.RUNNING)]
    missing = [name for name in running if name not in known and now - since.get(name, now) >= SLOW]
    if not missing:
        return ""
    return (
        f"{len(missing)} of {counted(len(running), 'instance')} that EC2 runs and bills did not join ECS within "
        f"{minutes(SLOW)}: the AMI is not one of ECS, a mount fails, or the network does not reach ECS; "
        f"{states.NETWORK}; aws ec2 get-console-output --instance-id {missing[0]} shows the boot"
    )


def _former_types(nodes: Nodes) -> dict[str, str]:
    """Return the types of the running instances that are of none of the pool's, by ID."""
    types = {str(each.get("InstanceId")): each.get("InstanceType") for each in members(nodes.group, Phase.RUNNING)}
    return {name: found for name, found in types.items() if found and nodes.types and found not in nodes.types}


def _of_former_type(nodes: Nodes) -> str:
    for name, instance_type in _former_types(nodes).items():
        types = " or ".join(nodes.types)
        return f"{name} is a {instance_type}, and pool {nodes.pool} has {types} now: the head ends it when it is idle"
    return ""


def _without_gpus(nodes: Nodes) -> str:
    former = _former_types(nodes)
    for instance in nodes.instances or ():
        resources = instance.get("registeredResources")
        if resources is None or instance.get("status") != "ACTIVE" or instance.get("ec2InstanceId") in former:
            continue
        registered = sum(len(each.get("stringSetValue") or ()) for each in resources if each.get("name") == "GPU")
        if registered < nodes.gpus:
            return (
                f"{instance.get('ec2InstanceId')} runs, and ECS has registered {registered} of its "
                f"{counted(nodes.gpus, 'GPU')}: the AMI's driver does not know them; {states.AMI}"
            )
    return ""


def _unfit(nodes: Nodes) -> str:
    """Return why an instance gets no task."""
    for instance in nodes.instances or ():
        name, status = instance.get("ec2InstanceId"), str(instance.get("status"))
        state = states.CONTAINER_INSTANCES.get(status)
        if state is None or state.phase is not Phase.RUNNING:
            why = one_line(instance.get("statusReason") or "")
            return f"{name} {state.means if state else f'is {status}'}{f': {why}' if why else ''}"
        # For a moment it is normal.
        if instance.get("agentConnected") is False and not instance.get("runningTasksCount"):
            return f"ECS's agent on {name} is not connected; if that lasts, {states.NETWORK}, or terminate the instance"
    return ""


def _event(service: Document, now: datetime) -> str:
    """Return the service's newest event that may tell of a fault."""
    for event in service.get("events") or ():
        message = one_line(event.get("message") or "")
        is_old = event.get("createdAt") and now - at(event, "createdAt") > RECENT
        if is_old or states.STEADY.search(message):
            return ""
        if message and not states.HARMLESS.search(message):
            return message
    return ""
