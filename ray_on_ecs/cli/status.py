"""`ray-on-ecs status`: nodes, runs, scaling and cost of the cluster."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, TypeVar

import click

from ray_on_ecs.cli.screen import out, print_json
from ray_on_ecs.cluster import aws
from ray_on_ecs.cluster.clusters import Cluster, Head, on_cluster
from ray_on_ecs.cluster.history import Job
from ray_on_ecs.cluster.nodes import ALIVE, nodes
from ray_on_ecs.cluster.stack import Stack
from ray_on_ecs.cluster_info import ClusterInfo, Scaling
from ray_on_ecs.contract import CPU_WORKERS, INSTANCE_LABELS, NODE_GROUP_LABEL, ON_DEMAND, SPOT
from ray_on_ecs.errors import ResourceError, TrainingError, counted, one_line
from ray_on_ecs.tracking import layout

T = TypeVar("T")
Document = dict[str, Any]
HEAD, WORKERS = "head", "workers"


@click.command("status")
@on_cluster
@click.option("--json", "as_json", is_flag=True, help="Print the same for programs.")
def command(cluster: Cluster, as_json: bool) -> int:
    """Show nodes, GPUs, queue, cost per hour and scale-in."""
    found: Document = {"cluster": cluster.name}
    unreached: TrainingError | None = None
    try:
        with cluster.connect() as head:
            jobs = head.get("/api/jobs/")
            found |= read_ray(head, jobs)
            found["queue"] = read_queue(cluster, jobs)
    except ResourceError as cause:
        unreached = cause
    if cluster.stack:
        found |= read_aws(cluster.stack, found.get("nodes"))
    if unreached:
        found["unreached"] = str(unreached)
    if as_json:
        print_json(found)
    # AWS does not know a stack that is down; the reason is enough.
    elif not unreached or found.get("services"):
        for line in lines(found):
            out.print(line, markup=False)
    if unreached:
        raise unreached
    return 0


def read_ray(head: Head, jobs: Sequence[Job]) -> Document:
    """Return what Ray knows: nodes, GPUs and jobs.

    Args:
        head: The head.
        jobs: Its jobs, as its REST API has them.

    Raises:
        TrainingError: The head doesn't answer.
    """
    status = head.get("/api/cluster_status")["data"]["clusterStatus"] or {}
    load = status.get("loadMetricsReport") or {}
    # By the head's clock: this machine's may be another.
    now = status.get("time") or time.time()
    there = [_node(node, load, now) for node in nodes(head) if node["state"] == ALIVE]
    used = sum(node["gpus_used"] for node in there)
    states = Counter(job["status"] for job in jobs)
    return {
        "ray_version": head.get("/api/version")["ray_version"],
        "nodes": there,
        "gpus": {
            "used": used,
            "there": sum(node["gpus"] for node in there),
            "wanted": used + _waiting("GPU", load),
        },
        "jobs": {"running": states["RUNNING"], "queued": states["PENDING"]},
    }


def read_queue(cluster: Cluster, jobs: Sequence[Job]) -> list[Document]:
    """Return the runs that are queued, from the folders of those whose jobs run; none that can't be read."""
    queue = []
    for job in jobs:
        name = (job.get("metadata") or {}).get("run_name")
        if job["status"] != "RUNNING" or not name:
            continue
        with suppress(OSError, ValueError, TrainingError):
            status = cluster.storage(name).read_json(layout.STATUS) or {}
            if status.get("state") == "queued" and status.get("job") == job.get("submission_id"):
                queue.append({"run": name, "owner": status["owner"], "behind": status["behind"]})
    return queue


def _node(node: dict[str, Any], load: dict[str, Any], now: float) -> Document:
    usage, total = (load.get("usageByNode") or {}).get(node["node_id"]) or {}, node["resources_total"]
    labels = node["labels"] or {}
    kind = HEAD if node["is_head_node"] else CPU_WORKERS if labels.get(NODE_GROUP_LABEL) == CPU_WORKERS else WORKERS
    return {
        "kind": kind,
        **{key: labels.get(label) for key, label in INSTANCE_LABELS.items()},
        **{f"{name.lower()}s": total.get(name, 0) for name in ("GPU", "CPU")},
        **{f"{name.lower()}s_used": usage.get(name, [0])[0] for name in ("GPU", "CPU")},
        "up_seconds": round(max(0.0, now - node["start_time_ms"] / 1000)),
    }


def _waiting(resource: str, load: dict[str, Any]) -> float:
    """Return how many GPUs all that waits wants: tasks, actors and placement groups."""
    shapes = [*(load.get("resourceDemand") or ())]
    for group, count in load.get("pgDemand") or ():
        shapes += [(bundle, number * count) for bundle, number in group["bundles"]]
    return sum(bundle.get(resource, 0) * count for bundle, count in shapes)


def read_aws(stack: Stack, there: Sequence[Document] | None) -> Document:
    """Return what AWS knows, and under `unknown` why it does not say the rest.

    Args:
        stack: The stack.
        there: The nodes that Ray has, or None if it can't be asked.
    """
    unknown: dict[str, str] = {}

    def ask(what: str, question: Callable[[], T]) -> T | None:
        try:
            return question()
        except TrainingError as cause:
            unknown[what] = one_line(cause)
            return None

    services = ask("services", lambda: aws.services(stack))
    workers = ask("workers", lambda: aws.workers(stack))
    found: Document = {
        "region": stack.region,
        "services": {
            kind: {
                "running": service["runningCount"],
                "desired": service["desiredCount"],
                "fault": ask("tasks", lambda service=service: service_fault(stack, service)),
            }
            for kind, service in (services or {}).items()
        },
        "hourly_usd": {"estimated": stack.estimated_hourly_usd},
        "idle_monthly_usd": idle_monthly_usd(workers) if workers else None,
        "unknown": unknown,
    }
    if there is not None:
        found["head"] = ask("head", lambda: _instance(aws.instance(stack, aws.head_instance(stack))))
    if not workers:
        return found
    group = ask("group", lambda: aws.group(stack, workers["group"]))
    if group:
        found["group"] = {
            "desired": group["DesiredCapacity"],
            "has": sum(instance["LifecycleState"] == "InService" for instance in group["Instances"]),
            "unhealthy": aws.unhealthy(group),
            "failure": ask("activities", lambda: aws.launch_failure(stack, workers)),
        }
    numbers = _numbers(there, found)
    if there is not None:
        starting = max(0, len(group["Instances"]) - numbers[WORKERS]) if group else 0
        spot = {}
        if workers["spot"] or any(node["market"] == SPOT for node in there):
            spot = ask("spot prices", lambda: aws.spot_usd(stack, workers)) or {}
        found["hourly_usd"] |= costs(there, starting, workers, spot)
    scaling = workers["scaling"]
    alarms = {
        kind: ask("alarms", lambda kind=kind: aws.scaling_alarms(stack, kind)) if scale["max"] else {}
        for kind, scale in scaling.items()
    }
    found["stops"] = [
        line
        for kind, scale in scaling.items()
        for line in what_stops(kind, scale, numbers[kind], found["hourly_usd"].get(kind), alarms[kind])
    ]
    return found


def service_fault(stack: Stack, service: dict[str, Any]) -> str | None:
    """Return ECS's reason why a service lacks tasks, or None if it has them.

    Raises:
        TrainingError: AWS refuses.
    """
    if fault := aws.deployment_fault(service):
        return fault
    return aws.last_stop(stack, service) if service["runningCount"] < service["desiredCount"] else None


def idle_monthly_usd(workers: ClusterInfo) -> float | None:
    """Return what the instances of a stack without runs cost in 730 hours on demand, or None if a price is not known.

    These are the head and the workers that no idle stop ends.
    """
    prices = workers["prices"] or {}
    of_cpu_workers = [usd for name, usd in prices.items() if name not in workers["types"]]
    of_kind = {WORKERS: prices.get(workers["types"][0]), CPU_WORKERS: max(of_cpu_workers, default=None)}
    hourly = workers["head_usd"]
    for kind, scale in workers["scaling"].items():
        least = scale["min"] if scale["idle_minutes"] else scale["max"]
        if hourly is None or (least and of_kind[kind] is None):
            return None
        hourly += least * (of_kind[kind] or 0)
    return None if hourly is None else round(730 * hourly, 2)


def _instance(found: dict[str, Any]) -> Document:
    return {"instance_type": found["InstanceType"], "zone": found["Placement"]["AvailabilityZone"]}


def _numbers(there: Sequence[Document] | None, found: Document) -> dict[str, int]:
    """Return how many nodes there are of each kind; as ECS counts them if Ray can't be asked."""
    if there is not None:
        counted = Counter(node["kind"] for node in there)
    else:
        counted = Counter({kind: service["running"] for kind, service in found["services"].items()})
    if group := found.get("group"):
        counted[WORKERS] = max(counted[WORKERS], group["has"]) if there is None else counted[WORKERS]
    return {kind: counted[kind] for kind in (HEAD, WORKERS, CPU_WORKERS)}


def costs(there: Sequence[Document], starting: int, workers: ClusterInfo, spot: Mapping[str, float]) -> Document:
    """Return USD per hour, by kind of node, and `now` in total; nodes without a known price are left out.

    Args:
        there: The nodes.
        starting: So many instances of workers have no node yet.
        workers: The stack's description of the workers, with on-demand prices.
        spot: Prices of spot instances by type.
    """
    nodes = [*there, *[{"kind": WORKERS, "instance_type": None, "market": None}] * starting]
    found: Document = {"starting": starting}
    for kind in (HEAD, WORKERS, CPU_WORKERS):
        prices = [_price(node, workers, spot) for node in nodes if node["kind"] == kind]
        if None not in prices:
            found[kind] = round(sum(filter(None, prices)), 4)
    if len(found) == 4:
        found["now"] = round(found[HEAD] + found[WORKERS] + found[CPU_WORKERS], 4)
    return found


def _price(node: Document, workers: ClusterInfo, spot: Mapping[str, float]) -> float | None:
    """Return what a node costs an hour; a worker without labels counts as what the stack asks for first."""
    if node["kind"] == HEAD:
        return workers["head_usd"]
    first = workers["types"][0] if node["kind"] == WORKERS else ""
    market = node["market"] or (SPOT if workers["spot"] and first else ON_DEMAND)
    return (spot if market == SPOT else workers["prices"] or {}).get(node["instance_type"] or first)


def what_stops(
    kind: str, scale: Scaling, number: int, usd: float | None, alarms: dict[str, dict[str, Any]] | None
) -> Iterator[str]:
    """Yield what ends the GPU or the CPU workers, and what keeps them.

    Args:
        kind: `workers` or `cpu-workers`.
        scale: The stack's limits of their number.
        number: How many there are.
        usd: Their cost in USD per hour, if known.
        alarms: The alarms that change their number, or None if they are not known.
    """
    if not scale["max"]:
        return
    if not number:
        yield f"no {kind} run; a job starts up to {scale['max']}"
    if not scale["idle_minutes"]:
        hint = "pulumi config set idleTimeoutMinutes 30 and pulumi up"
        yield f"nothing stops idle {kind}: {_costing(usd)} until pulumi destroy, or {hint}"
    elif scale["min"] < scale["max"]:
        down = f", down to {scale['min']}" if scale["min"] else ""
        yield f"idle {kind} stop after {scale['idle_minutes']} minutes{down}{_ringing('idle', alarms)}"
    if scale["idle_minutes"] and scale["min"]:
        last = kind.removesuffix("s") if scale["min"] == 1 else f"{scale['min']} {kind}"
        yield f"nothing stops the last {last} until pulumi destroy, or {_setting(kind)}"


def _costing(usd: float | None) -> str:
    return "they run" if usd is None else f"they cost {usd:.2f} USD an hour"


def _setting(kind: str) -> str:
    key = {WORKERS: "minWorkers", CPU_WORKERS: "minCpuWorkers"}[kind]
    return f"pulumi config set {key} 0 and pulumi up"


def _ringing(name: str, alarms: dict[str, dict[str, Any]] | None) -> str:
    """Return the note on an alarm that follows its purpose."""
    if alarms is None:
        return ""
    if not (alarm := alarms.get(name)):
        return " (but its alarm is not there: pulumi up makes it)"
    if not alarm["ActionsEnabled"]:
        return " (but the actions of its alarm are switched off: it stops nothing)"
    since = _age((datetime.now(UTC) - alarm["StateUpdatedTimestamp"]).total_seconds())
    if alarm["StateValue"] == "ALARM":
        return f" (that has been so for {since}: they are being stopped)"
    if alarm["StateValue"] == "OK":
        return f" (not so at present, for {since})"
    return f" (its alarm has had no data for {since})"


def lines(found: Document) -> Iterator[str]:
    """Yield the screen."""
    unknown = found.get("unknown", {})
    yield f"{found['cluster']} in {found['region']}" if "region" in found else found["cluster"]
    if "nodes" in found:
        yield from _ray_lines(found)
    if "services" in found:
        services = ", ".join(
            f"{kind} {service['running']} of {service['desired']} running"
            for kind, service in found["services"].items()
        )
        yield _line("ECS", services or _unknown(unknown, "services"))
        for kind, service in found["services"].items():
            if service["fault"]:
                yield _line("", f"{kind}: {service['fault']}")
        yield _line("EC2", _group_line(found.get("group")) or _unknown(unknown, "group", "workers"))
        yield _line("cost", _cost_line(found))
        stops = found.get("stops") or [_unknown(unknown, "stops", "workers")]
        yield from (_line("" if index else "stops", stop) for index, stop in enumerate(stops))
        if "alarms" in unknown and "stops" in found:
            yield _line("alarms", _unknown(unknown, "alarms"))


def _ray_lines(found: Document) -> Iterator[str]:
    for head in (node for node in found["nodes"] if node["kind"] == HEAD):
        instance = found.get("head") or {}
        place = _place(instance.get("instance_type"), instance.get("zone"))
        cpus = "" if "services" in found else _use([head])
        unknown = _unknown(found["unknown"], "head") if "head" in found.get("unknown", {}) else ""
        parts = [place or unknown, f"Ray {found['ray_version']}", f"up {_age(head['up_seconds'])}", cpus]
        yield _line("head", ", ".join(filter(None, parts)))
    for kind in (WORKERS, CPU_WORKERS):
        keys = ("instance_type", "market", "zone")
        alike: dict[tuple[Any, ...], list[Document]] = {}
        for node in found["nodes"]:
            if node["kind"] == kind:
                alike.setdefault(tuple(node[key] for key in keys), []).append(node)
        for (instance_type, market, zone), members in alike.items():
            yield _line(kind, f"{len(members)} x {_place(instance_type or 'node', zone, market)}: {_use(members)}")
        if not alike and kind in found.get("services", {}):
            yield _line(kind, "none")
    gpus, jobs, queue = found["gpus"], found["jobs"], found.get("queue", [])
    yield _line("GPUs", f"{gpus['used']:g} in use, {gpus['there']:g} there, {gpus['wanted']:g} wanted")
    queued = jobs["queued"] + len(queue)
    yield _line("jobs", f"{jobs['running'] - len(queue)} running, {queued} queued")
    for index, run in enumerate(queue):
        yield _line("" if index else "queue", f"{run['run']} ({run['owner']}) behind {run['behind']}")


def _place(instance_type: str | None, zone: str | None, market: str | None = None) -> str:
    kind = " ".join(filter(None, [instance_type, market and ("on spot" if market == SPOT else "on demand")]))
    return f"{kind} in {zone}" if kind and zone else kind


def _use(members: Sequence[Document]) -> str:
    """Return how much of these nodes' GPUs, or CPUs if they have none, is used."""
    unit = "GPU" if any(node["gpus"] for node in members) else "CPU"
    total, used = (sum(node[f"{unit.lower()}s{end}"] for node in members) for end in ("", "_used"))
    return f"{used:g} of {total:g} {unit}s in use"


def _group_line(group: Document | None) -> str:
    if not group:
        return ""
    line = f"asked for {counted(group['desired'], 'worker')}, has {group['has']}"
    if group["unhealthy"]:
        line += f"; unhealthy, being replaced: {', '.join(group['unhealthy'])}"
    return f"{line}; the last launch failed: {group['failure']}" if group["failure"] else line


def _cost_line(found: Document) -> str:
    usd, unknown = found["hourly_usd"], found["unknown"]
    estimated = usd["estimated"]
    at_most = "" if estimated is None else f"; at most {estimated:.2f} with all GPU and CPU workers"
    if "now" not in usd:
        refused = {"workers", "spot prices"} & unknown.keys()
        why = _unknown(unknown, *refused) if refused else "unknown (the stack knows no price of a node)"
        return (why if "nodes" in found else "unknown (Ray does not say which nodes there are)") + at_most
    idle = "" if found["idle_monthly_usd"] is None else f"; {found['idle_monthly_usd']:.0f} USD a month while idle"
    starting = f" with {usd['starting']} that start" if usd["starting"] else ""
    return f"{usd['now']:.2f} USD an hour now{starting}{at_most}{idle}; disks, NAT and traffic are extra"


def _unknown(unknown: dict[str, str], *keys: str) -> str:
    return f"unknown ({next((unknown[key] for key in keys if key in unknown), 'AWS does not say')})"


def _line(title: str, text: str) -> str:
    return f"  {title:8} {text}"


def _age(seconds: float) -> str:
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} days"
