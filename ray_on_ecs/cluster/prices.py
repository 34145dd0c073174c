"""Prices of a stack's instances in USD per hour: on demand from its description, and EC2's current Spot prices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import partial

from ray_on_ecs.cluster import aws
from ray_on_ecs.cluster.stack import Stack
from ray_on_ecs.cluster_info import ClusterInfo
from ray_on_ecs.errors import ResourceError
from ray_on_ecs.tracking.cost import InstanceKind, hourly_prices, labelled


def hourly_usd(stack: Stack, info: ClusterInfo, instances: Iterable[InstanceKind]) -> dict[str, float]:
    """Return the price of these instances in USD per hour, by kind of node.

    Raises:
        TrainingError: A price is not known, or AWS refuses the Spot prices.
    """
    rented = [labelled(each, info) for each in instances]
    prices = hourly_prices(info, rented, partial(aws.call, "ec2", stack, "describe_spot_price_history"))
    usd: dict[str, float] = defaultdict(float)
    for each in rented:
        if each not in prices:
            raise ResourceError("the stack has no price of a node")
        usd[each.kind] += prices[each]
    return dict(usd)
