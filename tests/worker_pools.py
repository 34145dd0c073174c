"""A stack's workers as its cluster info describes them, with valid defaults."""

from __future__ import annotations

from typing import Any

from ray_on_ecs.cluster_info import ClusterInfo, NodeGroup
from ray_on_ecs.contract import CPU_POOL, DEFAULT_POOL, GPUS


def node_group(pool: str = DEFAULT_POOL, *types: str, zone: str = "us-west-2a", **more: Any) -> NodeGroup:
    """Return a node group of a pool; by default of four g5.xlarge."""
    names = list(types) or ["g5.xlarge"]
    defaults: NodeGroup = {
        "pool": pool,
        "zones": [zone],
        "types": names,
        "gpu": " or ".join(dict.fromkeys(GPUS[name.partition(".")[0]] for name in names)),
        "units": 1,
        "spot": False,
        "min": 0,
        "max": 4,
        "default_nodes": 1,
        "idle_minutes": 30,
        "group": f"{pool}-{zone}-group",
        "provider": f"{pool}-{zone}-provider",
        "disk_usd": 0.0,
    }
    return NodeGroup(**{**defaults, **more})


def cpu_group(pool: str = CPU_POOL, **more: Any) -> NodeGroup:
    """Return a node group without GPUs, of nodes with eight CPUs; by default that of the CPU workers."""
    defaults: dict[str, Any] = {"types": ["m7i.2xlarge"], "gpu": "", "units": 8}
    return node_group(pool, **(defaults | more))


def workers(**groups: NodeGroup) -> ClusterInfo:
    """Return a stack with these node groups, whose names have `_` for the `-` of their kinds."""
    named = {kind.replace("_", "-"): group for kind, group in groups.items()}
    return {"cluster": "ray", "groups": named, "prices": None, "head_usd": None, "network_gbits": {}}
