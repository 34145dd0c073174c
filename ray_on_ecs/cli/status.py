"""`ray-on-ecs status`: nodes, runs, scaling and cost of the cluster, as Ray, AWS and the runs' folders report them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, TypeVar

import click

from ray_on_ecs.cli.cluster_flags import chosen, cluster_flags, typed
from ray_on_ecs.cli.screen import out, print_json
from ray_on_ecs.cluster import aws, scale_in
from ray_on_ecs.cluster.aws_status import Group, explain_head, groups_line, read_groups, read_services
from ray_on_ecs.cluster.clusters import Cluster
from ray_on_ecs.cluster.history import Job, elsewhere, under_way
from ray_on_ecs.cluster.stack import Stack
from ray_on_ecs.cluster.wake import clock
from ray_on_ecs.cluster_info import ClusterInfo, NodeGroup
from ray_on_ecs.contract import HOURS_OF_MONTH, SPOT, per_hour_and_month
from ray_on_ecs.errors import (
    HeadUnavailable,
    ResourceError,
    StackNotFound,
    TrainingError,
    UsageError,
    counted,
    one_line,
)
from ray_on_ecs.jobs.record import PENDING, RUNNING
from ray_on_ecs.jobs.remote import SILENT_SECONDS, RemoteJobs, is_asleep
from ray_on_ecs.node import ray_status
from ray_on_ecs.node.ray_status import HEAD, Node
from ray_on_ecs.pools import gpus_of
from ray_on_ecs.reservations import Reservation, parse
from ray_on_ecs.storage import layout
from ray_on_ecs.tracking.cost import InstanceKind, hourly_usd
from ray_on_ecs.tracking.end import end_in, words
from ray_on_ecs.tracking.starts import describe, starts_in

T = TypeVar("T")


@click.command("status")
@click.argument("names", nargs=-1, metavar="")
@cluster_flags
@click.option("--json", "as_json", is_flag=True, help="Print the status as JSON.")
def command(flags: dict[str, Any], names: Sequence[str], as_json: bool) -> int:
    """Show nodes, GPUs, queue, cost per hour and scale-in."""
    if names:
        runs, logs, report = (f"ray-on-ecs {verb}{typed(flags)}" for verb in ("runs", "logs", "open"))
        shows = f"{logs} {names[0]} and {report} {names[0]} show one"
        raise UsageError(f"{names[0]}: status shows the cluster; {runs} lists the runs, {shows}")
    cluster = chosen(flags)
    ray: dict[str, Any] = {}
    unreached: TrainingError | None = None
    try:
        ray = read_jobs(cluster)
    except (HeadUnavailable, OSError) as cause:
        unreached = cause if isinstance(cause, TrainingError) else ResourceError(one_line(cause))
        if cluster.stack:
            unreached = explain_head(cluster.stack) or unreached
    nodes = None if ray.get("asleep_since") else ray.get("nodes")  # the last state has the head's
    of_aws = read_aws(cluster.stack, nodes) if cluster.stack else {}
    if as_json:
        document = {"cluster": cluster.name, **ray, **of_aws}
        print_json(document | ({"unreached": str(unreached)} if unreached else {}))
    # AWS has nothing of a stack that is down; the error is enough.
    elif ray or of_aws.get("services"):
        out.print(f"{cluster.name} in {of_aws['region']}" if of_aws else cluster.name)
        lines = [
            *(_ray_lines(ray, ray | of_aws, cluster) if ray else ()),
            *(_aws_lines(of_aws, ray) if of_aws else ()),
        ]
        width = max(8, *(len(title) for title, _ in lines))
        for title, text in lines:
            out.print(f"  {title:{width}} {text}")
    if unreached:
        raise unreached
    return 0


def read_jobs(cluster: Cluster) -> dict[str, Any]:
    """Return nodes that are alive, node groups, GPUs, jobs, queued runs, and of the others starts and progress.

    `elsewhere` is the number of these jobs by storage path, of those below another one than the cluster's.

    `asleep_since` is the time at which the head has gone to sleep (ISO 8601), or None. TrainingError without its state.
    """
    held = cluster.jobs()
    seconds, ray, asleep_since = 0.0, {}, None
    if isinstance(held, RemoteJobs):
        state, seconds, jobs = held.read()
        ray = state.ray
        if is_asleep(state, seconds):
            asleep_since = (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat(timespec="seconds")
    else:
        ray = {} if cluster.is_here else ray_status.read()
        jobs = held.list_jobs()
    states = Counter(job["status"] for job in jobs)
    of_others = elsewhere((job for job in jobs if job["status"] in (RUNNING, PENDING)), cluster.storage_path)
    return {
        "seconds_ago": round(seconds),
        "asleep_since": asleep_since,
        "ray_version": ray.get("ray_version"),
        "nodes": ray_status.nodes_of(ray),
        "node_groups": (ray_status.workers_of(ray) or {"groups": {}})["groups"],
        "gpus": ray.get("gpus", {"used": 0.0, "total": 0.0, "requested": 0.0}),
        "jobs": {"running": states[RUNNING], "queued": states[PENDING]},
        "elsewhere": Counter(str(job["metadata"]["storage_path"]) for job in of_others),
        **read_runs(cluster, jobs),
    }


def read_runs(cluster: Cluster, jobs: Iterable[Job]) -> dict[str, list[dict[str, Any]]]:
    """Return the runs whose jobs run: those that wait behind another run; the last starts and the ends of others."""
    found: dict[str, list[dict[str, Any]]] = {"queue": [], "starts": [], "runs": []}
    for name, job in under_way(jobs, cluster.storage_path).items():
        with suppress(Exception):  # others may have written the document
            status = cluster.storage(name).read_json(layout.STATUS) or {}
            if status["job"] != job["submission_id"]:
                continue
            if status["state"] == "queued":
                owner, behind = one_line(status.get("owner") or ""), one_line(status["behind"])
                pool = one_line(status.get("line") or "")
                found["queue"].append({"run": name, "owner": owner, "behind": behind, "pool": pool})
                continue
            if known := starts_in(status):
                found["starts"].append({"run": name, **known[-1]})
            if end := end_in(status, is_training=status["state"] == "training"):
                found["runs"].append({"run": name, "end": end})
    return found


def read_aws(stack: Stack, nodes: Sequence[Node] | None) -> dict[str, Any]:
    """Return services, groups, scale-in and cost (with Ray's nodes) of a stack, and AWS's refusals by what was asked.

    StackNotFound if the stack is down.
    """
    unknown: dict[str, str] = {}

    def read(question: str, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except StackNotFound:
            raise
        except TrainingError as cause:
            unknown[question] = one_line(cause)
            return None

    info = read("workers", lambda: aws.workers(stack))
    groups = read("groups", lambda: read_groups(stack, info)) if info else None
    services = read("services", lambda: read_services(stack, info, groups)) or {}
    of_stack = ("region", "estimated_hourly_usd", "idle_hourly_usd", "asleep_hourly_usd")
    found: dict[str, Any] = {name: getattr(stack, name) for name in of_stack}
    found |= {"services": services, "groups": groups, "scale_in": {}, "unknown": unknown}
    found |= {"hourly_usd": None, "monthly_usd": None, "hourly_usd_by_part": None}
    if info:
        known = groups or {}
        stopping, refused = read("scale-in", lambda: scale_in.read(stack, info, services, known, nodes)) or ({}, {})
        unknown |= refused
        reserved = read("reservations", lambda: read_reservations(stack, info)) or {}
        now = datetime.now(UTC)
        found |= {"node_groups": info["groups"], "scale_in": stopping}
        found["reservations"] = {kind: each.words(now) for kind, each in reserved.items()}
        if nodes is not None:
            usd = read("prices", lambda: read_hourly_usd(stack, info, nodes, known, reserved))
            if usd:
                total = sum(usd.values())
                found |= {"hourly_usd": round(total, 4), "monthly_usd": round(total * HOURS_OF_MONTH, 2)}
                found["hourly_usd_by_part"] = usd
    return found


def read_hourly_usd(
    stack: Stack,
    info: ClusterInfo,
    nodes: Sequence[Node],
    groups: Mapping[str, Group | None],
    reserved: Mapping[str, Reservation],
) -> dict[str, float]:
    """Return the cost in USD per hour as it stands: of what runs without workers, by part, and of workers, by kind.

    Workers that have not joined count, and reserved instances that are not used. TrainingError if a price is not known.
    """
    instances = [InstanceKind(node.instance_type, node.market, node.kind) for node in nodes if node.kind != HEAD]
    for kind, group in groups.items():
        joined = [node.instance_type or "" for node in nodes if node.kind == kind]
        types = group.types if group else []
        others = (Counter(types) - Counter(joined)).elements()
        starting = [*others][: max(0, len(types) - len(joined))]
        instances += [InstanceKind(instance_type or None, kind=kind) for instance_type in starting]
    if info["head_usd"] is None:
        raise ResourceError("the stack has no price of a node")
    idle = {part: usd for part, usd in (stack.idle_hourly_usd or {}).items() if usd is not None}
    of_workers = hourly_usd(info, instances, partial(aws.call, stack))
    return {HEAD: info["head_usd"], **idle, **of_workers, **_unused_usd(info, reserved)}


def read_reservations(stack: Stack, info: ClusterInfo) -> dict[str, Reservation]:
    """Return the reservations of the kinds of workers that have one; TrainingError if EC2 refuses."""
    named = {kind: group["reservation"] for kind, group in info["groups"].items() if "reservation" in group}
    are_blocks = all(reserved["is_block"] for reserved in named.values())  # their owner has paid
    account = "" if are_blocks else aws.call(stack, "sts", "get_caller_identity")["Account"]
    found = {}
    for kind, reserved in named.items():
        answer = aws.call(stack, "ec2", "describe_capacity_reservations", CapacityReservationIds=[reserved["id"]])
        found |= {kind: each} if (each := parse(answer, account)) else {}
    return found


def _unused_usd(info: ClusterInfo, reserved: Mapping[str, Reservation]) -> dict[str, float]:
    """Return the cost of active reservations on demand for instances that are not used, if this account pays it."""
    usd = {}
    for kind, each in reserved.items():
        group, prices = info["groups"][kind], info["prices"] or {}
        known = [prices[name] - group["disk_usd"] for name in group["types"] if name in prices]
        if known and each.free and each.state == "active" and not (each.is_block or each.payer):
            usd[f"{each.free} unused of {each.id}"] = each.free * known[0]
    return usd


def _ray_lines(ray: Mapping[str, Any], known: Mapping[str, Any], cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Yield a title and a text for each line; each zone of a pool has one, and its reservation another.

    `known` has the node groups as AWS has them, or else the head.
    """
    seconds, is_asleep = ray["seconds_ago"], ray["asleep_since"] is not None
    if is_asleep:
        wakes = "the requested runs wake it" if ray["jobs"]["queued"] else f"{cluster.command('run')} wakes it"
        yield HEAD, f"asleep since {clock(seconds)} ({timedelta(seconds=seconds)} ago), {wakes}"
    elif seconds > SILENT_SECONDS:
        yield HEAD, f"silent: this is its state of {timedelta(seconds=seconds)} ago"
    of_kind: dict[str, list[Node]] = defaultdict(list)
    for node in () if is_asleep else ray["nodes"]:
        if node.kind == HEAD:
            cpus = f", {_usage([node])}" if node.cpus else ""  # a stack's head runs no tasks
            yield HEAD, f"Ray {ray['ray_version']}, up {timedelta(seconds=node.up_seconds)}{cpus}"
        else:
            of_kind[node.kind].append(node)
    pools: dict[str, list[str]] = defaultdict(list)
    for kind, group in known["node_groups"].items():
        pools[group["pool"]].append(_node_group(of_kind.pop(kind, []), group))
        if "reservation" in group:
            why = known.get("unknown", {}).get("reservations", "EC2 does not tell more")
            unread = f"capacity reservation {group['reservation']['id']} ({why})"
            pools[group["pool"]].append(known.get("reservations", {}).get(kind, unread))
    for _, nodes in sorted(of_kind.items()):  # of a group that is not known, or no longer there
        pools[nodes[0].pool].append(_node_group(nodes))
    for pool, texts in pools.items():
        yield from zip((pool, *[""] * len(texts)), texts, strict=False)
    if ray["ray_version"] is None and not is_asleep:
        local = "only a Ray program starts it; ray-on-ecs dashboard --local shows it meanwhile"
        yield "Ray", local if cluster.is_here else "does not answer the head: it is starting, or busy"
    elif not is_asleep:
        yield "GPUs", "{used:g} of {total:g} in use, {requested:g} requested".format(**ray["gpus"])
    # The drivers of queued runs are running jobs.
    waiting = len(ray["queue"])
    others = "".join(f"; {number} of them in {one_line(path)}" for path, number in ray["elsewhere"].items())
    yield "jobs", f"{ray['jobs']['running'] - waiting} running, {ray['jobs']['queued'] + waiting} queued{others}"
    for index, run in enumerate(ray["queue"]):
        of_pool = f" in pool {run['pool']}" if run["pool"] else ""
        yield "" if index else "queue", "{run} ({owner}) behind {behind}".format(**run) + of_pool
    for index, start in enumerate(ray["starts"]):
        yield "" if index else "start", f"{start['run']}: {one_line(describe(start))}"
    for index, run in enumerate(ray["runs"]):
        yield "" if index else "progress", f"{run['run']}: {words(run['end'])}"


def _node_group(nodes: Sequence[Node], group: NodeGroup | None = None) -> str:
    """Return the nodes of a node group, of at most how many if that is known, with their zone, types and use."""
    zones = group["zones"] if group else sorted({node.zone for node in nodes if node.zone})
    number = f"{len(nodes)} of {counted(group['max'], 'node')}" if group else counted(len(nodes), "node")
    text = f"{number} in {' or '.join(zones)}: " if zones else f"{number}: "
    if nodes or group is None:
        markets = {None: "", SPOT: " on spot"}
        named = [node for node in nodes if node.instance_type]
        types = Counter(f"{node.instance_type}{markets.get(node.market, ' on demand')}" for node in named)
        return text + ", ".join([*(f"{number} x {name}" for name, number in types.items()), _usage(nodes)])
    size = f"{gpus_of(group)} x {group['gpu']}" if group["gpu"] else counted(group["units"], "CPU")
    return f"{text}{' or '.join(group['types'])} ({size})"


def _usage(nodes: Sequence[Node]) -> str:
    """Return how many GPUs of these nodes are in use, or CPUs if they have no GPUs."""
    gpus = sum(node.gpus for node in nodes)
    if gpus:
        return f"{sum(node.gpus_used for node in nodes):g} of {gpus:g} GPUs in use"
    return f"{sum(node.cpus_used for node in nodes):g} of {sum(node.cpus for node in nodes):g} CPUs in use"


def _aws_lines(of_aws: Mapping[str, Any], ray: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    def unknown(*questions: str) -> str:
        reasons = [of_aws["unknown"][question] for question in questions if question in of_aws["unknown"]]
        return f"unknown ({reasons[0] if reasons else 'AWS returned nothing'})"

    services, groups = of_aws["services"], of_aws["groups"]
    busy = {kind: each for kind, each in services.items() if len(services) <= 2 or each.running or each.desired}
    running = [f"{kind} {service.running} of {service.desired} running" for kind, service in busy.items()]
    yield "ECS", ", ".join(running) or unknown("services")
    for kind, service in services.items():
        if service.fault:
            yield "", f"{kind}: {service.fault}"
    yield "EC2", groups_line(groups) if groups else unknown("workers", "groups")
    if ray.get("asleep_since"):
        yield "cost", _cost_asleep(of_aws)
    else:
        yield "cost", _cost(of_aws, unknown("workers", "prices") if ray else "unknown while the head can't be reached")
    lines = scale_in.in_words(of_aws["scale_in"]) or unknown("workers", "scale-in")
    refused = "; ".join(f"{action} {why}" for action, why in of_aws["unknown"].items() if ":" in action)
    yield "scale-in", lines + (f" (not known: {refused})" if refused else "")


def _cost(of_aws: Mapping[str, Any], unknown: str) -> str:
    """Return the cost as it stands by part, the most that it can be, and what ends it."""
    idle = of_aws["idle_hourly_usd"] or {}
    known = {part: usd for part, usd in idle.items() if usd is not None}
    if of_aws["hourly_usd"] is not None:
        # Image and service discovery cost less than half a cent.
        shown = {part: usd for part, usd in of_aws["hourly_usd_by_part"].items() if part not in idle or round(usd, 2)}
        parts = ", ".join(f"{part} {usd:.2f}" for part, usd in shown.items())
        texts = [f"{per_hour_and_month(of_aws['hourly_usd'])} now: {parts}"]
    else:
        least = [f"at least {per_hour_and_month(sum(known.values()))} without workers"] if known else []
        texts = [unknown, *least]
    if of_aws["estimated_hourly_usd"] is not None:
        others = sum(usd for part, usd in known.items() if part != HEAD)
        texts.append(f"at most {of_aws['estimated_hourly_usd'] + others:.2f} an hour with all workers")
    without = [part for part, usd in idle.items() if usd is None] if idle else ["network", "CloudWatch"]
    extra = [*without, "disk space of workers" if idle else "disk space", "traffic, S3 and logs"]
    return "; ".join([*texts, f"{', '.join(extra)} are extra", "`pulumi destroy` ends it"])


def _cost_asleep(of_aws: Mapping[str, Any]) -> str:
    """Return the cost while the head sleeps by part; workers that still run are not among them."""
    parts = of_aws["asleep_hourly_usd"]
    if not parts:
        return "unknown while the head sleeps; pulumi up writes it into the stack's outputs"
    known = {part: usd for part, usd in parts.items() if usd is not None}
    without = [*(part for part, usd in parts.items() if usd is None), "traffic, S3 and logs"]
    listed = ", ".join(f"{part} {usd:.3f}" for part, usd in known.items())
    asleep = f"{per_hour_and_month(sum(known.values()))} asleep: {listed}"
    return f"{asleep}; {', '.join(without)} are extra; `pulumi destroy` ends it"
