"""Present prices of spot instances, which EC2 is asked for when a cost is reckoned: the stack knows those on demand."""

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
        "Filters": [{"Name": "availability-zone", "Values": [each["zone"] for each in info["zones"]]}],
        # The prices that hold now, whenever they last changed.
        "StartTime": datetime.now(UTC),
    }


def by_type(answer: dict[str, Any]) -> dict[str, float]:
    """Return dollars an hour of each type, in the dearest of the zones; EC2 knows none for some."""
    prices: dict[str, float] = {}
    for each in answer["SpotPriceHistory"]:
        prices[each["InstanceType"]] = max(float(each["SpotPrice"]), prices.get(each["InstanceType"], 0.0))
    return prices
