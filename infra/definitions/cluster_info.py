"""Content of the SSM parameter with the workers' pools, instance types, zones, prices, groups and limits.

Head, runs and command line read it: see ray_on_ecs/cluster_info.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infra.types import NodeSpec, Scale


def document(
    nodes: Mapping[str, NodeSpec],
    scales: Mapping[str, Scale],
    *,
    cluster: str,
    zone: str,
    group_names: Mapping[str, str],
    provider_names: Mapping[str, str],
) -> str:
    """JSON of `ClusterInfo` in ray_on_ecs/cluster_info.py, without spaces, as a parameter has at most 4096 characters.

    `zone` is that of the nodes that name none. The names are by kind.
    """
    groups = {
        kind: _group(nodes[kind], scale, zone) | {"group": group_names[kind], "provider": provider_names[kind]}
        for kind, scale in scales.items()
    }
    # The price on demand counts for a type that other pools have in a Capacity Block.
    by_price = sorted((nodes[kind] for kind in scales), key=lambda node: not node.is_in_block)
    prices = {name: price.on_demand for node in by_price for name, price in (node.prices or {}).items()}
    info = {
        "cluster": cluster,
        "groups": groups,
        "prices": prices or None,
        "head_usd": max((price.on_demand for price in (nodes["head"].prices or {}).values()), default=None),
        "network_gbits": {
            each.name: each.network_gbits for node in by_price for each in node.instances if each.network_gbits
        },
    }
    return json.dumps(info, separators=(",", ":"))


def _group(node: NodeSpec, scale: Scale, zone: str) -> dict[str, Any]:
    """Node group without its names."""
    reservation = node.reservation
    return {
        "pool": node.pool,
        "zones": list(node.zones or [zone]),
        "types": list(node.instance_types),
        "gpu": node.gpu,
        "units": node.units,
        "spot": node.spot_count > 0,
        "min": scale.min_count,
        "max": scale.max_count,
        "default_nodes": scale.default_job_count,
        "idle_minutes": scale.idle_minutes,
        "disk_usd": node.disk_usd,
        **({"efa": len(node.efa_cards)} if node.efa_cards else {}),
        **({"reservation": {"id": reservation.id, "is_block": reservation.is_block}} if reservation else {}),
    }
