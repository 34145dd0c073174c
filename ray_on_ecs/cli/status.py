"""`ray-on-ecs status`: nodes, runs, scaling and cost of the cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta

import click

from ray_on_ecs.cli.cluster_flags import on_cluster
from ray_on_ecs.cli.screen import out, print_json
from ray_on_ecs.cluster.aws_status import AwsStatus, read_aws
from ray_on_ecs.cluster.clusters import Cluster
from ray_on_ecs.cluster.ray_status import HEAD, Node, RayStatus, read_ray
from ray_on_ecs.cluster_info import Scaling
from ray_on_ecs.contract import SPOT
from ray_on_ecs.errors import ResourceError


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
        document = {"cluster": cluster.name, **(asdict(ray) if ray else {}), **(asdict(aws) if aws else {})}
        print_json(document | ({"unreached": str(unreached)} if unreached else {}))
    # AWS has nothing of a stack that is down; the error is enough.
    elif ray or (aws and aws.services):
        out.print(f"{cluster.name} in {aws.region}" if aws else cluster.name)
        for title, text in [*(_ray_lines(ray) if ray else ()), *(_aws_lines(aws, ray) if aws else ())]:
            out.print(f"  {title:8} {text}")
    if unreached:
        raise unreached
    return 0


def _ray_lines(ray: RayStatus) -> Iterator[tuple[str, str]]:
    """Yield a title and a text for each line."""
    groups: dict[tuple[str, str], list[Node]] = {}
    for node in ray.nodes:
        if node.kind == HEAD:
            cpus = f", {_usage([node])}" if node.cpus else ""  # a stack's head runs no tasks
            yield HEAD, f"Ray {ray.ray_version}, up {timedelta(seconds=node.up_seconds)}{cpus}"
        else:
            groups.setdefault((node.kind, _place(node)), []).append(node)
    for (kind, place), nodes in sorted(groups.items(), reverse=True):
        yield kind, f"{len(nodes)} x {place}: {_usage(nodes)}"
    if ray.ray_version is None:
        yield "Ray", "only a Ray program starts it; ray-on-ecs dashboard --local shows it meanwhile"
    else:
        yield "GPUs", "{used:g} of {total:g} in use, {requested:g} requested".format(**ray.gpus)
    # The drivers of queued runs are running jobs.
    waiting = len(ray.queue)
    yield "jobs", f"{ray.jobs['running'] - waiting} running, {ray.jobs['queued'] + waiting} queued"
    for index, run in enumerate(ray.queue):
        yield "" if index else "queue", f"{run.run} ({run.owner}) behind {run.behind}"


def _aws_lines(aws: AwsStatus, ray: RayStatus | None) -> Iterator[tuple[str, str]]:
    services = [f"{kind} {service.running} of {service.desired} running" for kind, service in aws.services.items()]
    yield "ECS", ", ".join(services) or _unknown(aws.unknown, "services")
    for kind, service in aws.services.items():
        if service.fault:
            yield "", f"{kind}: {service.fault}"
    yield "EC2", str(aws.group or _unknown(aws.unknown, "workers", "group"))
    if aws.hourly_usd is not None:
        cost = f"{aws.hourly_usd:.2f} USD an hour now"
    elif ray is None:
        cost = "unknown while the head can't be reached"
    else:
        cost = _unknown(aws.unknown, "workers", "prices")
    if aws.estimated_hourly_usd is not None:
        cost += f"; at most {aws.estimated_hourly_usd:.2f} with all workers"
    yield "cost", f"{cost}; disks, NAT and traffic are extra"
    yield "scale-in", _scale_in(aws.scaling) or _unknown(aws.unknown, "workers")


def _scale_in(scaling: Mapping[str, Scaling]) -> str:
    """Return what stops idle workers, with the configuration keys that keep them."""
    parts = []
    for kind, scale in scaling.items():
        key = "minWorkers" if kind == "workers" else "minCpuWorkers"
        if scale["max"] and not scale["idle_minutes"]:
            parts.append(f"idle {kind} keep running (idleTimeoutMinutes is 0)")
        elif scale["max"]:
            minimum = f", down to {scale['min']} ({key})" if scale["min"] else ""
            parts.append(f"idle {kind} stop after {scale['idle_minutes']} minutes{minimum}")
    return "; ".join(parts)


def _unknown(unknown: Mapping[str, str], *questions: str) -> str:
    """Return the first of these questions' reasons."""
    reasons = [unknown[question] for question in questions if question in unknown]
    return f"unknown ({reasons[0]})" if reasons else "unknown (AWS returned nothing)"


def _place(node: Node) -> str:
    market = "" if node.market is None else " on spot" if node.market == SPOT else " on demand"
    return f"{node.instance_type or 'node'}{market}" + (f" in {node.zone}" if node.zone else "")


def _usage(nodes: Sequence[Node]) -> str:
    """Return how many GPUs of these nodes are in use, or CPUs if they have no GPUs."""
    gpus = sum(node.gpus for node in nodes)
    if gpus:
        return f"{sum(node.gpus_used for node in nodes):g} of {gpus:g} GPUs in use"
    return f"{sum(node.cpus_used for node in nodes):g} of {sum(node.cpus for node in nodes):g} CPUs in use"
