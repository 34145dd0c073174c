"""Prices of a stack's instances in USD per hour: on demand from its description, and EC2's current Spot prices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ray_on_ecs.cluster import aws
from ray_on_ecs.cluster.stack import Stack
from ray_on_ecs.cluster_info import ClusterInfo, spot_prices, spot_question
from ray_on_ecs.contract import ON_DEMAND, SPOT
from ray_on_ecs.errors import ResourceError
from ray_on_ecs.node.ray_status import WORKERS, Node
from ray_on_ecs.tracking.cost import InstanceKind


def total_usd(stack: Stack, info: ClusterInfo, instances: Iterable[InstanceKind]) -> float:
    """Return the price of these instances in USD per hour.

    Raises:
        TrainingError: A price is not known, or AWS refuses the Spot prices.
    """
    rented = [*instances]
    on_demand = info["prices"] or {}
    spot: Mapping[str, float] = {}
    if any(kind.market == SPOT for kind in rented):
        spot = spot_prices(aws.call("ec2", stack, "describe_spot_price_history", **spot_question(info)), info)
    prices = [(spot if kind.market == SPOT else on_demand).get(kind.instance_type or "") for kind in rented]
    if None in prices:
        raise ResourceError("the stack has no price of a node")
    return sum(price for price in prices if price is not None)


def preferred(info: ClusterInfo) -> InstanceKind:
    """Return the kind of instance that the stack starts first."""
    return InstanceKind(info["types"][0], SPOT if info["spot"] else ON_DEMAND)


def kind_of(node: Node, info: ClusterInfo) -> InstanceKind:
    """Return the kind of a node's instance; a worker that does not say it counts as the preferred kind."""
    default = preferred(info) if node.kind == WORKERS else InstanceKind()
    return InstanceKind(node.instance_type or default.instance_type, node.market or default.market)
