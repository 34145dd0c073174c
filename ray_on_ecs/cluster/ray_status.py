"""Nodes, GPUs, jobs and queue of a cluster, as Ray and the folders of its runs report them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray_on_ecs.cluster.head import ALIVE, Head
from ray_on_ecs.cluster.history import Job, under_way
from ray_on_ecs.cluster.local_jobs import Jobs, LocalJobs
from ray_on_ecs.contract import CPU_WORKERS, INSTANCE_LABELS, NODE_GROUP_LABEL
from ray_on_ecs.errors import one_line
from ray_on_ecs.node.api import AnswerError
from ray_on_ecs.storage import layout

if TYPE_CHECKING:
    from ray_on_ecs.cluster.clusters import Cluster

HEAD, WORKERS = "head", "workers"


@dataclass(frozen=True, kw_only=True)
class Node:
    """Ray node; the instance's values are None on a node without labels, such as the head's."""

    kind: str
    instance_type: str | None
    zone: str | None
    market: str | None
    gpus: float
    cpus: float
    gpus_used: float
    cpus_used: float
    up_seconds: int


@dataclass(frozen=True)
class QueuedRun:
    """Run whose driver waits until the run in front of it has its workers."""

    run: str
    owner: str
    behind: str


@dataclass(frozen=True)
class RayStatus:
    """State of a cluster whose head answers, or of this machine, which needs none.

    Attributes:
        ray_version: The version of Ray; None on this machine.
        nodes: The nodes that are alive.
        gpus: The numbers of GPUs: used, total, and requested, which includes the used ones.
        jobs: The numbers of jobs: running and queued.
        queue: The queued runs.
    """

    ray_version: str | None
    nodes: list[Node]
    gpus: dict[str, float]
    jobs: dict[str, int]
    queue: list[QueuedRun]


def read_ray(cluster: Cluster, head: Jobs) -> RayStatus:
    """Return the state of a cluster.

    Raises:
        TrainingError: The head doesn't answer, or its answers have another form.
    """
    if isinstance(head, LocalJobs):
        gpus = {"used": 0.0, "total": 0.0, "requested": 0.0}
        jobs = head.list_jobs()
        return RayStatus(None, [], gpus, _counts(jobs), _queue(cluster, jobs))
    try:
        return _read_ray(cluster, head)
    except (AttributeError, LookupError, TypeError, ValueError) as cause:
        raise AnswerError(head.url, f"not an answer of Ray's: {cause!r}") from cause


def _read_ray(cluster: Cluster, head: Head) -> RayStatus:
    jobs = head.list_jobs()
    status = head.get("/api/cluster_status", "data", "clusterStatus") or {}
    load = status.get("loadMetricsReport") or {}
    now = status.get("time") or time.time()  # the head's clock: this machine's may be wrong
    alive = [_node(node, load, now) for node in head.nodes() if node["state"] == ALIVE]
    used = sum(node.gpus_used for node in alive)
    return RayStatus(
        ray_version=head.get("/api/version", "ray_version"),
        nodes=alive,
        gpus={"used": used, "total": sum(node.gpus for node in alive), "requested": used + _pending_gpus(load)},
        jobs=_counts(jobs),
        queue=_queue(cluster, jobs),
    )


def _counts(jobs: Sequence[Job]) -> dict[str, int]:
    states = Counter(job["status"] for job in jobs)
    return {"running": states["RUNNING"], "queued": states["PENDING"]}


def _node(node: dict[str, Any], load: dict[str, Any], now: float) -> Node:
    labels = node["labels"] or {}
    total = node["resources_total"]
    usage = (load.get("usageByNode") or {}).get(node["node_id"]) or {}
    if node["is_head_node"]:
        kind = HEAD
    elif labels.get(NODE_GROUP_LABEL) == CPU_WORKERS:
        kind = CPU_WORKERS
    else:
        kind = WORKERS
    return Node(
        kind=kind,
        instance_type=labels.get(INSTANCE_LABELS["instance_type"]),
        zone=labels.get(INSTANCE_LABELS["zone"]),
        market=labels.get(INSTANCE_LABELS["market"]),
        gpus=total.get("GPU", 0),
        cpus=total.get("CPU", 0),
        gpus_used=usage.get("GPU", [0])[0],  # Ray reports pairs: used and total
        cpus_used=usage.get("CPU", [0])[0],
        up_seconds=round(max(0.0, now - node["start_time_ms"] / 1000)),
    )


def _pending_gpus(load: dict[str, Any]) -> float:
    """Return the GPUs that pending tasks, actors and placement groups request."""
    shapes = [*(load.get("resourceDemand") or ())]
    for group, count in load.get("pgDemand") or ():
        shapes += [(bundle, number * count) for bundle, number in group["bundles"]]
    return sum(shape.get("GPU", 0) * count for shape, count in shapes)


def _queue(cluster: Cluster, jobs: Sequence[Job]) -> list[QueuedRun]:
    """Return the runs whose jobs run and whose folders say that they are queued; unreadable folders are left out."""
    queue = []
    for name, job in under_way(jobs, cluster.storage_path).items():
        with suppress(Exception):  # others may have written the document
            status = cluster.storage(name).read_json(layout.STATUS) or {}
            if status["state"] == "queued" and status["job"] == job["submission_id"]:
                queue.append(QueuedRun(name, one_line(status.get("owner") or ""), one_line(status["behind"])))
    return queue
