"""`ray-on-ecs status`: nodes, runs, scaling and cost of the cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import click

from ray_on_ecs.cli.cluster_flags import on_cluster
from ray_on_ecs.cli.screen import out, print_json
from ray_on_ecs.cluster.aws_status import AwsStatus, Group, age, read_aws
from ray_on_ecs.cluster.clusters import Cluster
from ray_on_ecs.cluster.ray_status import HEAD, WORKERS, Node, RayStatus, read_ray
from ray_on_ecs.contract import CPU_WORKERS, SPOT
from ray_on_ecs.errors import ResourceError, counted


@click.command("status")
@on_cluster
@click.option("--json", "as_json", is_flag=True, help="Print the status as JSON.")
def command(cluster: Cluster, as_json: bool) -> int:
    """Show nodes, GPUs, queue, cost per hour and scale-in."""
    ray: RayStatus | None = None
    unreached: ResourceError | None = None
    try:
        with cluster.connect() as head:
            ray = read_ray(cluster, head)
    except ResourceError as cause:
        unreached = cause
    aws = read_aws(cluster.stack, ray.nodes if ray else None) if cluster.stack else None
    if as_json:
        print_json(_document(cluster.name, ray, aws, unreached))
    # AWS has nothing of a stack that is down; the error is enough.
    elif not unreached or (aws and aws.services):
        for line in _lines(cluster.name, ray, aws):
            out.print(line)
    if unreached:
        raise unreached
    return 0


def _document(
    name: str, ray: RayStatus | None, aws: AwsStatus | None, unreached: ResourceError | None
) -> dict[str, Any]:
    document: dict[str, Any] = {"cluster": name}
    if ray:
        document |= asdict(ray)
    if aws:
        document |= asdict(aws)
        document["hourly_usd"] = aws.hourly_usd.document()
    if unreached:
        document["unreached"] = str(unreached)
    return document


def _lines(name: str, ray: RayStatus | None, aws: AwsStatus | None) -> Iterator[str]:
    """Yield the screen."""
    yield f"{name} in {aws.region}" if aws else name
    if ray:
        yield from _ray_lines(ray, aws)
    if aws:
        yield from _aws_lines(aws, has_nodes=ray is not None)


def _ray_lines(ray: RayStatus, aws: AwsStatus | None) -> Iterator[str]:
    for node in ray.nodes:
        if node.kind == HEAD:
            yield _head_line(node, ray.ray_version, aws)
    for kind in (WORKERS, CPU_WORKERS):
        groups: dict[tuple[str | None, str | None, str | None], list[Node]] = {}
        for node in ray.nodes:
            if node.kind == kind:
                groups.setdefault((node.instance_type, node.zone, node.market), []).append(node)
        for (instance_type, zone, market), members in groups.items():
            yield _line(kind, f"{len(members)} x {_place(instance_type or 'node', zone, market)}: {_usage(members)}")
        if not groups and aws and kind in aws.services:
            yield _line(kind, "none")
    yield _line("GPUs", f"{ray.gpus.used:g} of {ray.gpus.total:g} in use, {ray.gpus.requested:g} requested")
    # The drivers of queued runs are running jobs.
    running, queued = ray.jobs.running - len(ray.queue), ray.jobs.queued + len(ray.queue)
    yield _line("jobs", f"{running} running, {queued} queued")
    for index, run in enumerate(ray.queue):
        yield _line("" if index else "queue", f"{run.run} ({run.owner}) behind {run.behind}")


def _head_line(node: Node, ray_version: str, aws: AwsStatus | None) -> str:
    parts = []
    if aws and aws.head:
        parts.append(_place(aws.head.instance_type, aws.head.zone))
    elif aws and "head" in aws.unknown:
        parts.append(_unknown(aws.unknown, "head"))
    parts += [f"Ray {ray_version}", f"up {age(node.up_seconds)}"]
    if not aws:
        parts.append(_usage([node]))
    return _line("head", ", ".join(parts))


def _aws_lines(aws: AwsStatus, *, has_nodes: bool) -> Iterator[str]:
    services = [f"{kind} {service.running} of {service.desired} running" for kind, service in aws.services.items()]
    yield _line("ECS", ", ".join(services) or _unknown(aws.unknown, "services"))
    for kind, service in aws.services.items():
        if service.fault:
            yield _line("", f"{kind}: {service.fault}")
    yield _line("EC2", _group_text(aws.group) if aws.group else _unknown(aws.unknown, "group", "workers"))
    yield _line("cost", _cost_text(aws, has_nodes=has_nodes))
    for index, sentence in enumerate(aws.stops or [_unknown(aws.unknown, "workers")]):
        yield _line("" if index else "scale-in", sentence)
    if "alarms" in aws.unknown:
        yield _line("alarms", _unknown(aws.unknown, "alarms"))


def _group_text(group: Group) -> str:
    text = f"{group.in_service} of {counted(group.desired, 'worker')} in service"
    if group.unhealthy:
        text += f"; unhealthy, being replaced: {', '.join(group.unhealthy)}"
    if group.failure:
        text += f"; the last launch failed: {group.failure}"
    return text


def _cost_text(aws: AwsStatus, *, has_nodes: bool) -> str:
    cost = aws.hourly_usd
    maximum = "" if cost.estimated is None else f"; at most {cost.estimated:.2f} with all GPU and CPU workers"
    if cost.now is not None:
        starting = f", including {counted(cost.starting, 'starting worker')}" if cost.starting else ""
        idle = "" if aws.idle_monthly_usd is None else f"; {aws.idle_monthly_usd:.0f} USD a month while idle"
        return f"{cost.now:.2f} USD an hour now{starting}{maximum}{idle}; disks, NAT and traffic are extra"
    if not has_nodes:
        reason = "unknown (the nodes are not known while the head can't be reached)"
    elif aws.unknown.keys() & {"workers", "spot prices"}:
        reason = _unknown(aws.unknown, "workers", "spot prices")
    else:
        reason = "unknown (the stack has no price of a node)"
    return reason + maximum


def _place(instance_type: str, zone: str | None, market: str | None = None) -> str:
    place = instance_type
    if market:
        place += " on spot" if market == SPOT else " on demand"
    return f"{place} in {zone}" if zone else place


def _usage(nodes: Sequence[Node]) -> str:
    """Return how many GPUs of these nodes are in use, or CPUs if they have no GPUs."""
    gpus = sum(node.gpus for node in nodes)
    if gpus:
        return f"{sum(node.gpus_used for node in nodes):g} of {gpus:g} GPUs in use"
    return f"{sum(node.cpus_used for node in nodes):g} of {sum(node.cpus for node in nodes):g} CPUs in use"


def _unknown(unknown: Mapping[str, str], *questions: str) -> str:
    """Return the first of these questions' reasons."""
    for question in questions:
        if question in unknown:
            return f"unknown ({unknown[question]})"
    return "unknown (AWS returned nothing)"


def _line(title: str, text: str) -> str:
    return f"  {title:8} {text}"
