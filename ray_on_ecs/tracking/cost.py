"""Cost of a run's workers, at the stack's on-demand prices and EC2's current spot prices, and totals over its commands.

Each command writes its time and cost, and the totals of the commands before it under `earlier`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple, TypedDict

from ray_on_ecs.cluster_info import ask_aws, read_cluster_info, recent, spot_prices, spot_question
from ray_on_ecs.contract import ON_DEMAND, SPOT

# Prices on spot change while a run trains, which asks for its cost every few seconds.
SPOT_PRICES_SECONDS = 300.0

Document = Mapping[str, Any]


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
    """Cost of a command's workers in dollars, without the head, the disks' size and traffic."""

    usd: float
    on_demand_usd: float  # the same hours at on-demand prices
    instance_hours: float
    instances: list[InstanceCost]


class Earlier(TypedDict):
    """Time and cost of the workers of the commands before this one; None if a cost is not known."""

    seconds: float
    usd: float | None


def cost_of(hours: Mapping[InstanceKind, float]) -> Cost | None:
    """Return the cost of the hours of each kind of instance, or None if a price is not known."""
    info = read_cluster_info()
    if info is None or info["prices"] is None:
        return None
    # A node without labels counts as the stack's first choice.
    default_market = SPOT if info["spot"] else ON_DEMAND
    labelled_hours: dict[tuple[str, str], float] = defaultdict(float)
    for kind, count in hours.items():
        labelled_hours[kind.instance_type or info["types"][0], kind.market or default_market] += count
    on_spot = frozenset(instance_type for instance_type, market in labelled_hours if market == SPOT)
    spot = None
    if on_spot:
        question = partial(ask_aws, "ec2", "describe_spot_price_history", **spot_question(info, on_spot))
        spot = recent(on_spot, lambda: spot_prices(question() or {"SpotPriceHistory": []}, info), SPOT_PRICES_SECONDS)
    prices = {ON_DEMAND: info["prices"], SPOT: spot or {}}
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
    """Return the total time of a run's commands, or None if it has not begun; any error if a document is broken."""
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
    """Return the total cost of a run's workers in dollars, or None if a part of it is not known."""
    usd = status.get("cost_usd")
    if result:
        usd = (result.get("cost") or {}).get("usd")
    earlier_usd = _earlier(status, result)["usd"]
    if usd is None or earlier_usd is None:
        return None
    return math.fsum((usd, earlier_usd))


def _earlier(status: Document, result: Document) -> Earlier:
    return result.get("earlier") or status.get("earlier") or {"seconds": 0.0, "usd": 0.0}
