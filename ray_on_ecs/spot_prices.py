"""Current spot prices from EC2; the stack's parameter has only on-demand prices."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any

from ray_on_ecs.cluster_info import ClusterInfo


def question(info: ClusterInfo, instance_types: Collection[str] | None = None) -> dict[str, Any]:
    """Return the arguments of EC2's DescribeSpotPriceHistory, for these types or all of the workers'."""
    return {
        "InstanceTypes": sorted(instance_types or info["types"]),
        "ProductDescriptions": ["Linux/UNIX"],
        "Filters": [{"Name": "availability-zone", "Values": [zone["zone"] for zone in info["zones"]]}],
        # With the current time EC2 returns the current prices.
        "StartTime": datetime.now(UTC),
    }


def by_type(answer: dict[str, Any]) -> dict[str, float]:
    """Return dollars an hour by type, in the most expensive zone; types without a spot price are missing."""
    prices: dict[str, float] = {}
    for entry in answer["SpotPriceHistory"]:
        instance_type = entry["InstanceType"]
        prices[instance_type] = max(float(entry["SpotPrice"]), prices.get(instance_type, 0.0))
    return prices
