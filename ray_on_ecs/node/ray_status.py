"""Ray's version, nodes and GPUs on this head, for the state that its desk writes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from ray_on_ecs.contract import CPU_WORKERS, INSTANCE_LABELS, NODE_GROUP_LABEL
from ray_on_ecs.node import api, ports
from ray_on_ecs.node.api import AnswerError

ALIVE = "ALIVE"
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


def read() -> dict[str, Any]:
    """Return Ray's version, the nodes that are alive, and the GPUs: in use, of all nodes, and requested.

    Raises:
        OSError: Ray doesn't answer, or its answers have another form.
    """
    url = f"http://127.0.0.1:{ports.DASHBOARD}"
    status = api.below(url, api.get(f"{url}/api/cluster_status"), "data", "clusterStatus") or {}
    listed = api.below(url, api.get(f"{url}/api/v0/nodes?detail=1&limit=1000"), "data", "result", "result")
    try:
        load = status.get("loadMetricsReport") or {}
        nodes = [_node(node, load) for node in api.items_in(url, listed, api.NODE) if node["state"] == ALIVE]
        used = sum(node.gpus_used for node in nodes)
        # Requests of pending tasks, actors and placement groups.
        shapes = [*(load.get("resourceDemand") or ())]
        for group, count in load.get("pgDemand") or ():
            shapes += [(bundle, number * count) for bundle, number in group["bundles"]]
        pending = sum(shape.get("GPU", 0) * count for shape, count in shapes)
        return {
            "ray_version": api.below(url, api.get(f"{url}/api/version"), "ray_version"),
            "nodes": [asdict(node) for node in nodes],
            "gpus": {"used": used, "total": sum(node.gpus for node in nodes), "requested": used + pending},
        }
    except (AttributeError, LookupError, TypeError, ValueError) as cause:
        raise AnswerError(url, f"not an answer of Ray's: {cause!r}") from cause


def nodes_of(ray: Mapping[str, Any]) -> list[Node]:
    """Return the nodes in a document with what `read` returns, without those that are broken."""
    nodes = []
    for node in ray.get("nodes", ()):
        with suppress(TypeError):
            nodes.append(Node(**node))
    return nodes


def _node(node: dict[str, Any], load: dict[str, Any]) -> Node:
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
        up_seconds=round(max(0.0, time.time() - node["start_time_ms"] / 1000)),
    )
