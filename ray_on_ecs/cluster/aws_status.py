"""Services, Auto Scaling group, scale-in and cost of a stack, as AWS reports them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from ray_on_ecs.cluster import aws
from ray_on_ecs.cluster.costs import HourlyCost, hourly_by_kind, idle_monthly_usd
from ray_on_ecs.cluster.ray_status import WORKERS, Node
from ray_on_ecs.cluster.stack import Stack
from ray_on_ecs.cluster_info import Scaling
from ray_on_ecs.contract import CPU_WORKERS, SPOT
from ray_on_ecs.errors import TrainingError, one_line

T = TypeVar("T")
MIN_KEYS = {WORKERS: "minWorkers", CPU_WORKERS: "minCpuWorkers"}


@dataclass(frozen=True)
class Service:
    """ECS service; `fault` is ECS's reason for missing tasks."""

    running: int
    desired: int
    fault: str | None


@dataclass(frozen=True)
class Group:
    """Auto Scaling group of the workers; `failure` is EC2's reason if the last launch failed."""

    desired: int
    in_service: int
    unhealthy: list[str]
    failure: str | None


@dataclass(frozen=True)
class HeadInstance:
    """EC2 instance of the head."""

    instance_type: str
    zone: str


@dataclass(frozen=True, kw_only=True)
class AwsStatus:
    """State of a stack; a value that AWS refuses is None or missing.

    Attributes:
        region: The stack's region.
        services: The services by kind of node.
        hourly_usd: The cost of the nodes.
        idle_monthly_usd: The cost of a month without runs.
        unknown: AWS's refusals, by the name of the question.
        head: The head's instance.
        group: The workers' group.
        stops: Sentences on the scale-in of each kind of worker.
    """

    region: str
    services: dict[str, Service]
    hourly_usd: HourlyCost
    idle_monthly_usd: float | None
    unknown: dict[str, str]
    head: HeadInstance | None
    group: Group | None
    stops: list[str] | None


def read_aws(stack: Stack, nodes: Sequence[Node] | None) -> AwsStatus:
    """Return the state of a stack.

    Args:
        stack: The stack.
        nodes: Ray's nodes, or None if the head can't be reached.
    """
    unknown: dict[str, str] = {}
    services = {}
    descriptions = _ask(unknown, "services", aws.services, stack) or {}
    workers = _ask(unknown, "workers", aws.workers, stack)
    for kind, description in descriptions.items():
        fault = _ask(unknown, "tasks", _service_fault, stack, description)
        services[kind] = Service(description["runningCount"], description["desiredCount"], fault)
    head = None if nodes is None else _ask(unknown, "head", _head_instance, stack)
    hourly = HourlyCost(stack.estimated_hourly_usd)
    group = stops = None
    if workers:
        instances = 0
        description = _ask(unknown, "group", aws.group, stack, workers["group"])
        if description:
            instances = len(description["Instances"])
            group = _group(description, _ask(unknown, "activities", aws.launch_failure, stack, workers))
        numbers = _count_nodes(nodes, services, group)
        if nodes is not None:
            starting = max(0, instances - numbers[WORKERS])
            spot: Mapping[str, float] = {}
            if workers["spot"] or any(node.market == SPOT for node in nodes):
                spot = _ask(unknown, "spot prices", aws.spot_usd, stack, workers) or {}
            by_kind = hourly_by_kind(nodes, starting, workers, spot)
            hourly = HourlyCost(stack.estimated_hourly_usd, starting, by_kind)
        stops = []
        for kind, scale in workers["scaling"].items():
            if scale["max"]:
                alarms = _ask(unknown, "alarms", aws.scaling_alarms, stack, kind)
                stops += _scale_in(kind, scale, numbers[kind], hourly.by_kind.get(kind), alarms)
    return AwsStatus(
        region=stack.region,
        services=services,
        hourly_usd=hourly,
        idle_monthly_usd=idle_monthly_usd(workers) if workers else None,
        unknown=unknown,
        head=head,
        group=group,
        stops=stops,
    )


def _ask(unknown: dict[str, str], name: str, question: Callable[..., T], *arguments: Any) -> T | None:
    """Return AWS's answer; or None, with the reason under this name in `unknown`."""
    try:
        return question(*arguments)
    except TrainingError as cause:
        unknown[name] = one_line(cause)
        return None


def _service_fault(stack: Stack, service: dict[str, Any]) -> str | None:
    fault = aws.deployment_fault(service)
    if fault is None and service["runningCount"] < service["desiredCount"]:
        fault = aws.last_stop(stack, service)
    return fault


def _head_instance(stack: Stack) -> HeadInstance:
    instance = aws.instance(stack, aws.head_instance(stack))
    return HeadInstance(instance["InstanceType"], instance["Placement"]["AvailabilityZone"])


def _group(description: dict[str, Any], failure: str | None) -> Group:
    in_service = [instance for instance in description["Instances"] if instance["LifecycleState"] == "InService"]
    return Group(description["DesiredCapacity"], len(in_service), aws.unhealthy(description), failure)


def _count_nodes(nodes: Sequence[Node] | None, services: Mapping[str, Service], group: Group | None) -> Counter[str]:
    """Return the number of nodes of each kind, as ECS and EC2 count them if the head can't be reached."""
    if nodes is not None:
        return Counter(node.kind for node in nodes)
    numbers = Counter({kind: service.running for kind, service in services.items()})
    if group:
        numbers[WORKERS] = max(numbers[WORKERS], group.in_service)
    return numbers


def _scale_in(
    kind: str, scale: Scaling, number: int, usd: float | None, alarms: dict[str, dict[str, Any]] | None
) -> Iterator[str]:
    """Yield sentences on what stops the GPU or the CPU workers, and what keeps them.

    Args:
        kind: `workers` or `cpu-workers`.
        scale: The stack's limits of their number.
        number: Their number.
        usd: Their cost in USD per hour, if known.
        alarms: The alarms that scale them, or None if AWS refuses.
    """
    if not number:
        yield f"no {kind} running; jobs start up to {scale['max']}"
    if not scale["idle_minutes"]:
        cost = "" if usd is None else f" ({usd:.2f} USD an hour)"
        yield f"idle {kind} keep running{cost}; pulumi config set idleTimeoutMinutes 30 and pulumi up stop them"
        return
    if scale["min"] < scale["max"]:
        minimum = f", down to {scale['min']}" if scale["min"] else ""
        yield f"idle {kind} stop after {scale['idle_minutes']} minutes{minimum}{_alarm_note(alarms)}"
    if scale["min"]:
        members = f"the last {kind.removesuffix('s')} keeps" if scale["min"] == 1 else f"{scale['min']} {kind} keep"
        yield f"{members} running; pulumi config set {MIN_KEYS[kind]} 0 and pulumi up let the scale-in stop all"


def _alarm_note(alarms: dict[str, dict[str, Any]] | None) -> str:
    """Return the state of the alarm that stops idle workers, in parentheses; empty if AWS refuses."""
    if alarms is None:
        return ""
    alarm = alarms.get("idle")
    if not alarm:
        return " (but its alarm is missing; pulumi up creates it)"
    if not alarm["ActionsEnabled"]:
        enable = f"aws cloudwatch enable-alarm-actions --alarm-names {alarm['AlarmName']}"
        return f" (but the alarm's actions are disabled; {enable} enables them)"
    duration = age((datetime.now(UTC) - alarm["StateUpdatedTimestamp"]).total_seconds())
    if alarm["StateValue"] == "ALARM":
        return f" (alarm active for {duration}; scaling in)"
    if alarm["StateValue"] == "OK":
        return f" (alarm OK for {duration})"
    return f" (alarm without data for {duration})"


def age(seconds: float) -> str:
    """Return a duration for people."""
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} days"
