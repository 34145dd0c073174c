"""Cost of a run's workers, at the stack's on-demand prices and EC2's current spot prices, and totals over its commands.

Each command writes its time and cost, and the totals of the commands before it under `earlier`.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple, TypedDict

from ray_on_ecs import spot_prices
from ray_on_ecs.cluster_info import ClusterInfo, ask_aws, read_cluster_info
from ray_on_ecs.contract import ON_DEMAND, SPOT

# Prices change while a run trains: spot prices, and the stack's list at `pulumi up`.
SPOT_SECONDS = 300.0
INFO_SECONDS = 300.0

Document = Mapping[str, Any]


class _SpotPrice(NamedTuple):
    """Hourly price in dollars, None if EC2 has none, and the time (monotonic) of the request."""

    usd: float | None
    requested_at: float


_spot_price_cache: dict[str, _SpotPrice] = {}
# The stack's description, and the time (monotonic) of the request.
_info_cache: tuple[ClusterInfo | None, float] = (None, -math.inf)


class InstanceKind(NamedTuple):
    """Instance type and market, `spot` or `on-demand`; None where the node has no label for it."""

    instance_type: str | None = None
    market: str | None = None


class InstanceCost(TypedDict):
    """Instances of one kind: their total hours, and the hourly price of one instance."""

    instance_type: str
    market: str
    hours: float
    hourly_usd: float


class Cost(TypedDict):
    """Cost of a command's workers.

    Attributes:
        usd: The hours at their prices, in dollars, without the head, disks and traffic.
        on_demand_usd: The same hours at on-demand prices.
        instance_hours: The hours of all instances on which the command reserved a worker.
    """

    usd: float
    on_demand_usd: float
    instance_hours: float
    instances: list[InstanceCost]


class Earlier(TypedDict):
    """Totals of the commands before this one.

    Attributes:
        usd: Cost of the workers, in dollars; None if the cost of one of the commands is not known.
    """

    seconds: float
    usd: float | None


def cost_of(hours: Mapping[InstanceKind, float]) -> Cost | None:
    """Return the cost of the hours of each kind of instance, or None if a price is not known."""
    info = _cluster_info()
    if info is None or info["prices"] is None:
        return None
    labelled_hours = _with_defaults(hours, info)
    on_spot = {instance_type for instance_type, market in labelled_hours if market == SPOT}
    prices = {ON_DEMAND: info["prices"], SPOT: _spot_prices(info, on_spot)}
    usd = on_demand_usd = 0.0
    instances: list[InstanceCost] = []
    for (instance_type, market), count in labelled_hours.items():
        hourly_usd = prices[market].get(instance_type)
        hourly_on_demand_usd = prices[ON_DEMAND].get(instance_type)
        if hourly_usd is None or hourly_on_demand_usd is None:
            return None
        usd += count * hourly_usd
        on_demand_usd += count * hourly_on_demand_usd
        instances.append({"instance_type": instance_type, "market": market, "hours": count, "hourly_usd": hourly_usd})
    return {
        "usd": round(usd, 4),
        "on_demand_usd": round(on_demand_usd, 4),
        "instance_hours": sum(labelled_hours.values()),
        "instances": instances,
    }


def cost_line(cost: Cost | None) -> str:
    """Return the cost for the last line of a run's log; empty if it is not known, or there was not an instance."""
    if not cost or not cost["instances"]:
        return ""
    kinds = []
    for instance in cost["instances"]:
        market = " on spot" if instance["market"] == SPOT else ""
        kinds.append(f"{instance['hours']:.2f} h of {instance['instance_type']}{market}")
    line = f", {cost['usd']:.2f} USD for {' and '.join(kinds)}"
    if any(instance["market"] == SPOT for instance in cost["instances"]):
        line += f" ({cost['on_demand_usd']:.2f} USD on demand)"
    return line


def earlier_of(status: Document | None) -> Earlier:
    """Return the totals up to and including the command with this status."""
    if not status:
        return {"seconds": 0.0, "usd": 0.0}
    return {"seconds": total_seconds(status, {}) or 0.0, "usd": total_usd(status, {})}


def total_seconds(status: Document, result: Document) -> float | None:
    """Return the total time of a run's commands, or None if it has not begun.

    Raises:
        Exception: A document is not one of the runner's, such as TypeError for a text in place of a number.
    """
    if not (status or result):
        return None
    if result:
        seconds = result["times"]["total_seconds"]
    else:
        started = datetime.fromisoformat(status["started"])
        updated = datetime.fromisoformat(status["updated"])
        seconds = (updated - started).total_seconds()
    return math.fsum((seconds, _earlier(status, result)["seconds"]))


def total_usd(status: Document, result: Document) -> float | None:
    """Return the total cost of a run's workers in dollars, or None if a part of it is not known; raise likewise."""
    usd = status.get("cost_usd")
    if result:
        usd = (result.get("cost") or {}).get("usd")
    earlier_usd = _earlier(status, result)["usd"]
    if usd is None or earlier_usd is None:
        return None
    return math.fsum((usd, earlier_usd))


def _cluster_info() -> ClusterInfo | None:
    """Return the stack's description: a run asks for its cost every few seconds."""
    global _info_cache
    info, requested_at = _info_cache
    if time.monotonic() - requested_at > INFO_SECONDS:
        info = read_cluster_info() or info
        _info_cache = (info, time.monotonic())
    return info


def _spot_prices(info: ClusterInfo, instance_types: set[str]) -> dict[str, float]:
    """Return the spot prices by type; a type without a price is missing."""
    now = time.monotonic()
    fresh = {name for name, price in _spot_price_cache.items() if now - price.requested_at <= SPOT_SECONDS}
    if instance_types - fresh:  # a run asks for its cost every few seconds
        response = ask_aws("ec2", "describe_spot_price_history", **spot_prices.question(info, instance_types))
        prices = spot_prices.by_type(response) if response else {}
        for name in instance_types:
            last_price = _spot_price_cache.get(name, _SpotPrice(None, now)).usd
            _spot_price_cache[name] = _SpotPrice(prices.get(name, last_price), now)
    cached = {name: _spot_price_cache[name].usd for name in instance_types}
    return {name: usd for name, usd in cached.items() if usd is not None}


def _with_defaults(hours: Mapping[InstanceKind, float], info: ClusterInfo) -> dict[tuple[str, str], float]:
    """Return the hours by type and market; a node without labels counts as the stack's first choice."""
    default_market = SPOT if info["spot"] else ON_DEMAND
    labelled_hours: dict[tuple[str, str], float] = defaultdict(float)
    for kind, count in hours.items():
        labelled_hours[kind.instance_type or info["types"][0], kind.market or default_market] += count
    return labelled_hours


def _earlier(status: Document, result: Document) -> Earlier:
    return result.get("earlier") or status.get("earlier") or {"seconds": 0.0, "usd": 0.0}
