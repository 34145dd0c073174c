"""Scale-in of idle workers: what stops them, or what keeps them running although they cost money.

https://docs.aws.amazon.com/AmazonECS/latest/developerguide/service-auto-scaling.html
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from ray_on_ecs.cluster import aws
from ray_on_ecs.cluster.aws_status import Group, Service, counted_nodes, looking
from ray_on_ecs.cluster.stack import Stack
from ray_on_ecs.cluster_info import ClusterInfo, NodeGroup
from ray_on_ecs.contract import CPU_POOL
from ray_on_ecs.errors import TrainingError
from ray_on_ecs.node.ray_status import Node
from ray_on_ecs.pools import listed, setting
from ray_on_ecs.tracking.cost import InstanceKind, hourly_usd

# A deployment that waits for no run ends within minutes.
LONG = timedelta(minutes=10)


@dataclass(frozen=True)
class ScaleIn:
    """Scale-in of one kind of node."""

    line: str  # with the idle time, or the reason for which they keep running
    is_hindered: bool = False  # True if something other than the configuration keeps them running
    fix: str = ""  # the command that ends that


@dataclass(frozen=True, kw_only=True)
class Facts:
    """AWS's answers about the scale-in of one kind of node."""

    kind: str
    scale: NodeGroup  # its node group in the stack's description
    service: Service | None = None  # None if that is not known
    # Alarm that stops idle nodes; empty if there is none, None if that is not known.
    alarm: Mapping[str, Any] | None = None
    target: Mapping[str, Any] | None = None  # its scalable target; empty if there is none, None if that is not known
    suspended: Sequence[str] = ()  # processes of its Auto Scaling group that are suspended
    idle: str = ""  # nodes that run nothing, and their cost, in words; empty if there are none
    names: Mapping[str, str]  # names for commands: region, resource, group and alarm


def describe(facts: Facts) -> ScaleIn | None:
    """Return the line of one kind of node; None if the stack can't have such nodes."""
    kind, scale = facts.kind, facts.scale
    key = setting(scale["pool"], "min")
    if not scale["max"]:
        is_named = scale["pool"] != CPU_POOL  # which few stacks have
        return ScaleIn(f"no {kind} are configured ({setting(scale['pool'], 'max')} is 0)") if is_named else None
    if not scale["idle_minutes"]:
        return ScaleIn(f"idle {kind} keep running (idleTimeoutMinutes is 0)")
    if scale["min"] >= scale["max"]:
        return ScaleIn(f"all {scale['max']} {kind} keep running ({key})")
    if scale["min"] and facts.service and facts.service.desired <= scale["min"]:
        return ScaleIn(f"{scale['min']} {kind} keep running ({key})")
    if hindrance := next(_hindrances(facts), None):
        cost = f"; {facts.idle} meanwhile" if facts.idle else ""
        return ScaleIn(f"idle {kind} keep running: {hindrance[0]}{cost}", True, hindrance[1])
    is_settled = facts.service is None or facts.service.deployment is None
    if is_settled and facts.alarm and facts.alarm.get("StateValue") == "ALARM":
        since = facts.alarm.get("StateUpdatedTimestamp")
        return ScaleIn(f"scaling in {kind}" + (f" since {since:%H:%M} UTC" if since else ""))
    minimum = f", down to {scale['min']} ({key})" if scale["min"] else ""
    return ScaleIn(f"idle {kind} stop after {scale['idle_minutes']} minutes{minimum}")


def _hindrances(facts: Facts) -> Iterator[tuple[str, str]]:
    """Yield what keeps idle nodes running, and the command that ends it."""
    names = facts.names
    deployment = facts.service.deployment if facts.service else None
    if deployment and (deployment.old_tasks or deployment.age(datetime.now(UTC)) >= LONG):
        yield f"{deployment}; ECS does not scale in before its end", ""
    if facts.alarm is not None and not facts.alarm:
        yield f"alarm {names['alarm']} is missing", "pulumi up"
    if facts.alarm and facts.alarm.get("ActionsEnabled") is False:
        yield (
            f"the actions of alarm {names['alarm']} are disabled",
            f"aws cloudwatch enable-alarm-actions --region {names['region']} --alarm-names {names['alarm']}",
        )
    if facts.target is not None and not facts.target:
        yield "the service has no scalable target", "pulumi up --refresh --run-program"
    if facts.target and (facts.target.get("SuspendedState") or {}).get("DynamicScalingInSuspended"):
        yield (
            "its scale-in is suspended in Application Auto Scaling",
            f"aws application-autoscaling register-scalable-target --region {names['region']} --service-namespace ecs "
            f"--scalable-dimension ecs:service:DesiredCount --resource-id {names['resource']} "
            "--suspended-state DynamicScalingInSuspended=false",
        )
    if "Terminate" in facts.suspended:
        yield (
            "the process Terminate of their Auto Scaling group is suspended, so instances stay without tasks",
            f"aws autoscaling resume-processes --region {names['region']} --auto-scaling-group-name {names['group']} "
            "--scaling-processes Terminate",
        )


def in_words(lines: Mapping[str, ScaleIn]) -> str:
    """Return the lines of all kinds as one; those that differ only in the kind are said once."""
    kinds: dict[str, list[str]] = {}
    for kind, each in lines.items():
        kinds.setdefault(each.line.replace(kind, "{}", 1), []).append(kind)
    return "; ".join(line.replace("{}", listed(same), 1) for line, same in kinds.items())


def read(
    stack: Stack,
    info: ClusterInfo,
    services: Mapping[str, Service],
    groups: Mapping[str, Group | None],
    nodes: Sequence[Node] | None,
) -> tuple[dict[str, ScaleIn], dict[str, str]]:
    """Return the scale-in of each kind of node, and the reasons of what AWS does not tell, by IAM action.

    `groups` has the Auto Scaling groups that are known, and `nodes` is None if Ray's are not.
    """
    look = looking(stack)
    stopping = [
        kind
        for kind, scale in info["groups"].items()
        if kind in stack.services and scale["idle_minutes"] and scale["min"] < scale["max"]
    ]
    resources = {kind: f"service/{stack.cluster_name}/{stack.services[kind]}" for kind in stopping}
    alarm_names = {kind: f"{stack.cluster_name}-{kind}-idle" for kind in stopping}  # see infra/node_scaling.py
    alarms = targets = None
    if stopping:
        which: dict[str, Any] = {"AlarmNames": [*alarm_names.values()], "AlarmTypes": ["MetricAlarm"]}
        alarms = _by(look.listed("cloudwatch", "describe_alarms", "MetricAlarms", **which), "AlarmName")
        which = {"ServiceNamespace": "ecs", "ResourceIds": [*resources.values()]}
        found = look.listed("application-autoscaling", "describe_scalable_targets", "ScalableTargets", **which)
        targets = _by(found, "ResourceId")
    lines: dict[str, ScaleIn] = {}
    for kind, scale in info["groups"].items():
        names = {"region": stack.region, "group": scale["group"]}
        group = groups.get(kind)
        facts = Facts(kind=kind, scale=scale, service=services.get(kind), names=names)
        if kind in stopping:
            facts = replace(
                facts,
                alarm=None if alarms is None else alarms.get(alarm_names[kind], {}),
                target=None if targets is None else targets.get(resources[kind], {}),
                suspended=group.suspended if group else (),
                names={**names, "alarm": alarm_names[kind], "resource": resources[kind]},
            )
        line = describe(facts)
        if line and line.is_hindered:
            line = describe(replace(facts, idle=_idle(stack, info, kind, nodes or ())))
        if line:
            lines[kind] = line
    return lines, look.unknown


def _by(found: list[Any] | None, key: str) -> dict[str, Any] | None:
    return None if found is None else {each[key]: each for each in found}


def _idle(stack: Stack, info: ClusterInfo, kind: str, nodes: Sequence[Node]) -> str:
    """Return the nodes of a kind that run nothing, and their price, in words."""
    idle = [node for node in nodes if node.kind == kind and not node.gpus_used and not node.cpus_used]
    if not idle:
        return ""
    said = counted_nodes(len(idle), f"idle {kind}")
    try:
        instances = [InstanceKind(node.instance_type, node.market, kind) for node in idle]
        usd = sum(hourly_usd(info, instances, partial(aws.call, stack)).values())
    except TrainingError:
        return f"{said} are billed"
    return f"{said} cost{'s' if len(idle) == 1 else ''} {usd:.2f} USD an hour"
