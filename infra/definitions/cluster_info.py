"""Content of the SSM parameter with the workers' pools, instance types, zones, prices, groups and limits.

Head, runs and command line read it: see ray_on_ecs/cluster_info.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ray_on_ecs.contract import CPU_WORKERS, WORKERS, gpu_name

if TYPE_CHECKING:
    from infra.types import NodeSpec, Scale


def document(
    nodes: Mapping[str, NodeSpec],
    scales: Mapping[str, Scale],
    default_gpus: int,
    *,
    cluster: str,
    zone: str,
    subnets: Mapping[str, str],
    group_names: Mapping[str, str],
    provider_names: Mapping[str, str],
    placement_groups: Mapping[str, str],
) -> dict[str, Any]:
    """Description of the workers.

    Its own keys describe `workers` and `cpu-workers`, as they did before there were other pools, so that a stack
    without these keeps its document, and a head that has not restarted can read it. `pools` has the other kinds.

    `zone` is that of the nodes that name none. The names and IDs are by kind, and by zone; `placement_groups` are those
    of `workers`, which a head of an earlier version reads.
    """
    worker = nodes[WORKERS]
    own = {kind: scale for kind, scale in scales.items() if kind in (WORKERS, CPU_WORKERS)}
    limits: dict[str, dict[str, Any]] = {
        kind: {
            "min": scale.min_count,
            "max": scale.max_count,
            "idle_minutes": scale.idle_minutes,
            "units": nodes[kind].units,
            **({"efa": len(nodes[kind].efa_cards)} if nodes[kind].efa_cards else {}),
            "group": group_names[kind],
            "provider": provider_names[kind],
        }
        for kind, scale in scales.items()
    }
    if CPU_WORKERS in limits:
        limits[CPU_WORKERS]["types"] = list(nodes[CPU_WORKERS].instance_types)
    pools = {
        kind: {
            "pool": nodes[kind].pool,
            "zones": list(nodes[kind].zones or [zone]),
            "types": list(nodes[kind].instance_types),
            "gpu": nodes[kind].gpu,
            "spot": nodes[kind].spot_count > 0,
            "default_nodes": scale.default_job_count,
            "disk_usd": nodes[kind].disk_usd,
            **_reservation(nodes[kind]),
            **limits[kind],
        }
        for kind, scale in scales.items()
        if kind not in own
    }
    # The price on demand counts for a type that other pools have in a Capacity Block.
    by_price = sorted((node for kind, node in nodes.items() if kind != "head"), key=lambda node: not node.is_in_block)
    prices = {name: price.on_demand for node in by_price for name, price in (node.prices or {}).items()}
    gbits = {
        each.name: each.network_gbits
        for kind, node in nodes.items()
        for each in node.instances
        if kind != "head" and each.network_gbits
    }
    return {
        "cluster": cluster,
        "group": group_names[WORKERS],
        "types": list(worker.instance_types),
        "gpus": worker.task.gpus,
        **({"gpu": worker.gpu} if worker.gpu != gpu_name(list(worker.instance_types)) else {}),
        "default_gpus": default_gpus,
        "zones": [
            {
                "zone": name,
                "subnet_id": subnets[name],
                # A placement group would only limit the capacity for a single worker.
                "placement_group": placement_groups[name] if placement_groups and worker.max_count > 1 else None,
            }
            for name in worker.zones or [zone]
        ],
        "spot": worker.spot_count > 0,
        "spread": worker.spread,
        "prices": prices or None,
        **({"network_gbits": gbits} if gbits else {}),
        "disk_usd": worker.disk_usd,
        **_reservation(worker),
        "head_usd": max((price.on_demand for price in (nodes["head"].prices or {}).values()), default=None),
        "scaling": {kind: limits[kind] for kind in own},
        **({"pools": pools} if pools else {}),
    }


def _reservation(node: NodeSpec) -> dict[str, Any]:
    """Key of a kind of worker that has a reservation."""
    reservation = node.reservation
    return {"reservation": {"id": reservation.id, "is_block": reservation.is_block}} if reservation else {}
