"""Cost of a stack's nodes, from its on-demand prices and EC2's Spot prices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray_on_ecs.cluster.ray_status import HEAD, KINDS, WORKERS, Node
from ray_on_ecs.cluster_info import ClusterInfo
from ray_on_ecs.contract import CPU_WORKERS, ON_DEMAND, SPOT

HOURS_PER_MONTH = 730


@dataclass(frozen=True)
class HourlyCost:
    """Cost in USD per hour.

    Attributes:
        estimated: The cost of all nodes that the stack can have, or None if a price is not known.
        starting: The number of worker instances without a node yet, or None if the nodes are not known.
        by_kind: The cost of the nodes by their kind, without kinds that have a node of unknown price.
    """

    estimated: float | None
    starting: int | None = None
    by_kind: dict[str, float] = field(default_factory=dict)

    @property
    def now(self) -> float | None:
        """The cost of all nodes, or None if a price is not known."""
        if self.by_kind.keys() != set(KINDS):
            return None
        return round(sum(self.by_kind.values()), 4)

    def document(self) -> dict[str, Any]:
        """Return the values for JSON, without unknown ones."""
        document: dict[str, Any] = {"estimated": self.estimated}
        if self.starting is not None:
            document["starting"] = self.starting
        document |= self.by_kind
        if self.now is not None:
            document["now"] = self.now
        return document


def hourly_by_kind(
    nodes: Sequence[Node], starting: int, workers: ClusterInfo, spot: Mapping[str, float]
) -> dict[str, float]:
    """Return USD per hour by kind of node, without kinds that have a node of unknown price.

    Args:
        nodes: The nodes.
        starting: The number of worker instances that have no node yet.
        workers: The stack's description of its workers, with on-demand prices.
        spot: Spot prices by instance type.
    """
    costs = {}
    for kind in KINDS:
        prices = [_price(kind, node.instance_type, node.market, workers, spot) for node in nodes if node.kind == kind]
        if kind == WORKERS:
            prices += [_price(kind, None, None, workers, spot)] * starting
        known_prices = [price for price in prices if price is not None]
        if len(known_prices) == len(prices):
            costs[kind] = round(sum(known_prices), 4)
    return costs


def _price(
    kind: str, instance_type: str | None, market: str | None, workers: ClusterInfo, spot: Mapping[str, float]
) -> float | None:
    if kind == HEAD:
        return workers["head_usd"]
    if kind == WORKERS:  # without labels: priced as the type and the market that the stack prefers
        instance_type = instance_type or workers["types"][0]
        market = market or (SPOT if workers["spot"] else ON_DEMAND)
    prices = spot if market == SPOT else workers["prices"] or {}
    return prices.get(instance_type or "")


def idle_monthly_usd(workers: ClusterInfo) -> float | None:
    """Return the on-demand cost of a month without runs, or None if a price is not known.

    The instances are the head's and those of the workers that the scale-in keeps.
    """
    prices = workers["prices"] or {}
    cpu_worker_prices = [usd for name, usd in prices.items() if name not in workers["types"]]
    price_of = {WORKERS: prices.get(workers["types"][0]), CPU_WORKERS: max(cpu_worker_prices, default=None)}
    hourly = workers["head_usd"]
    if hourly is None:
        return None
    for kind, scale in workers["scaling"].items():
        number = scale["min"] if scale["idle_minutes"] else scale["max"]
        price = price_of[kind]
        if not number:
            continue
        if price is None:
            return None
        hourly += number * price
    return round(HOURS_PER_MONTH * hourly, 2)
