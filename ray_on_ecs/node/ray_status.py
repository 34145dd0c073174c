"""Ray's version, nodes and GPUs on this head, and the stack's workers, for the state that its desk writes.

    ray_version  Ray's version
    nodes        the nodes that are alive: the fields of Node
    gpus         GPUs in use, of all nodes, and requested
    groups       the stack's node groups by kind, with the keys of NodeGroup (cluster_info.py); missing while they are
                 not known, and without a stack

Commands of other versions read it: `nodes_of` leaves out fields that it does not know.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any

from ray_on_ecs.cluster_info import ClusterInfo, is_node_group, read_cluster_info
from ray_on_ecs.contract import CPU_POOL, CPU_WORKERS, DEFAULT_POOL, INSTANCE_LABELS, NODE_GROUP_LABEL, WORKERS
from ray_on_ecs.node import api, ports
from ray_on_ecs.node.api import AnswerError
from ray_on_ecs.pools import ZONE_LABEL, kind_of_node

ALIVE = "ALIVE"
HEAD = "head"


@dataclass(frozen=True, kw_only=True)
class Node:
    """Ray node; the instance's values are None on a node without labels, such as the head's.

    Its kind is the head's, or that of its node group. `pool` is empty on the head.
    """

    kind: str
    pool: str
    instance_type: str | None
    zone: str | None
    market: str | None
    gpus: float
    cpus: float
    gpus_used: float
    cpus_used: float
    up_seconds: int


def read() -> dict[str, Any]:
    """Return the state of Ray, see above; OSError if it doesn't answer, or its answers have another form."""
    url = f"http://127.0.0.1:{ports.DASHBOARD}"
    status = api.below(url, api.ask(f"{url}/api/cluster_status"), "data", "clusterStatus") or {}
    listed = api.below(url, api.ask(f"{url}/api/v0/nodes?detail=1&limit=1000"), "data", "result", "result")
    info = read_cluster_info()
    try:
        load = status.get("loadMetricsReport") or {}
        nodes = [_node(node, load, info) for node in api.items_in(url, listed, api.NODE) if node["state"] == ALIVE]
        used = sum(node.gpus_used for node in nodes)
        # Requests of pending tasks, actors and placement groups.
        shapes = [*(load.get("resourceDemand") or ())]
        for group, count in load.get("pgDemand") or ():
            shapes += [(bundle, number * count) for bundle, number in group["bundles"]]
        pending = sum(shape.get("GPU", 0) * count for shape, count in shapes)
        return {
            "ray_version": api.below(url, api.ask(f"{url}/api/version"), "ray_version"),
            "nodes": [asdict(node) for node in nodes],
            "gpus": {"used": used, "total": sum(node.gpus for node in nodes), "requested": used + pending},
            **({"groups": info["groups"]} if info else {}),
        }
    except (AttributeError, LookupError, TypeError, ValueError) as cause:
        raise AnswerError(url, f"not an answer of Ray's: {cause!r}") from cause


def nodes_of(ray: Mapping[str, Any]) -> list[Node]:
    """Return the nodes in a state of Ray, without those that are broken."""
    known = {field.name for field in fields(Node)}
    nodes = []
    for node in ray.get("nodes", ()):
        with suppress(AttributeError, TypeError):
            nodes.append(Node(**{key: value for key, value in node.items() if key in known}))
    return [node for node in nodes if isinstance(node.kind, str) and isinstance(node.pool, str)]


def workers_of(ray: Mapping[str, Any]) -> ClusterInfo | None:
    """Return the stack's workers in a state of Ray, without prices; None if it does not have them."""
    groups = ray.get("groups")
    if not (isinstance(groups, dict) and groups and all(map(is_node_group, groups.values()))):
        return None
    return {"cluster": "", "groups": groups, "prices": None, "head_usd": None, "network_gbits": {}}


def _kind_of(labels: Mapping[str, str], info: ClusterInfo | None) -> str:
    if info and (kind := kind_of_node(labels, info)):
        return kind
    label = labels.get(NODE_GROUP_LABEL, "")
    kind = {"": WORKERS, CPU_WORKERS: CPU_WORKERS}.get(label, f"{label}-{WORKERS}")
    # Its pool no longer has the node's zone.
    return f"{kind}-{labels[ZONE_LABEL][-1:]}" if info and kind in info["groups"] else kind


def _node(node: dict[str, Any], load: dict[str, Any], info: ClusterInfo | None) -> Node:
    labels = node["labels"] or {}
    label, is_head = labels.get(NODE_GROUP_LABEL, ""), node["is_head_node"]
    total = node["resources_total"]
    usage = (load.get("usageByNode") or {}).get(node["node_id"]) or {}
    return Node(
        kind=HEAD if is_head else _kind_of(labels, info),
        pool="" if is_head else {"": DEFAULT_POOL, CPU_WORKERS: CPU_POOL}.get(label, label),
        instance_type=labels.get(INSTANCE_LABELS["instance_type"]),
        zone=labels.get(INSTANCE_LABELS["zone"]),
        market=labels.get(INSTANCE_LABELS["market"]),
        gpus=total.get("GPU", 0),
        cpus=total.get("CPU", 0),
        gpus_used=usage.get("GPU", [0])[0],  # Ray reports pairs: used and total
        cpus_used=usage.get("CPU", [0])[0],
        up_seconds=round(max(0.0, time.time() - node["start_time_ms"] / 1000)),
    )
