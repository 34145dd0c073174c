"""Cost of a run's workers: on demand at the prices in the stack's parameter, on spot at EC2's present prices."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple, TypedDict

from ray_on_ecs import spot_prices
from ray_on_ecs.cluster_info import ClusterInfo, ask_aws, read_cluster_info
from ray_on_ecs.contract import ON_DEMAND, SPOT

SPOT_SECONDS = 300.0
# Prices on spot by type, each with the time of the question; None where EC2 knows none.
_known: dict[str, tuple[float, float | None]] = {}


class InstanceKind(NamedTuple):
    """An instance's type and its market, `spot` or `on-demand`; each None where its node doesn't say."""

    instance_type: str | None = None
    market: str | None = None


class InstanceCost(TypedDict):
    """The instances of one kind: their hours, and the price of one of them, an hour."""

    instance_type: str
    market: str
    hours: float
    hourly_usd: float


class Cost(TypedDict):
    """What a command's workers have cost.

    Attributes:
        usd: Dollars: the hours by their prices. The head, disks and traffic are no part of it.
        on_demand_usd: What they would have cost on demand.
        instance_hours: The hours of all instances on which the command held a place for a worker.
        instances: The same by kind of instance.
    """

    usd: float
    on_demand_usd: float
    instance_hours: float
    instances: list[InstanceCost]


def cost_of(hours: Mapping[InstanceKind, float]) -> Cost | None:
    """Return the cost of so many hours of each kind of instance, or None where a price is not known."""
    info = read_cluster_info()
    if info is None or info["prices"] is None:
        return None
    kinds = _by_full_kind(hours, info)
    usd = {ON_DEMAND: info["prices"], SPOT: _spot_prices(info, {name for name, market in kinds if market == SPOT})}
    on_demand_usd = 0.0
    instances: list[InstanceCost] = []
    for (instance_type, market), counted in kinds.items():
        hourly_usd, on_demand = usd[market].get(instance_type), info["prices"].get(instance_type)
        if hourly_usd is None or on_demand is None:
            return None
        on_demand_usd += counted * on_demand
        instances.append({"instance_type": instance_type, "market": market, "hours": counted, "hourly_usd": hourly_usd})
    return {
        "usd": round(sum(each["hours"] * each["hourly_usd"] for each in instances), 4),
        "on_demand_usd": round(on_demand_usd, 4),
        "instance_hours": sum(each["hours"] for each in instances),
        "instances": instances,
    }


def cost_line(cost: Cost | None) -> str:
    """Return what the line at the end of a run says of the cost; empty if it is not known, or there was no instance."""
    if not cost or not cost["instances"]:
        return ""
    kinds = " and ".join(
        f"{each['hours']:.2f} h of {each['instance_type']}{' on spot' if each['market'] == SPOT else ''}"
        for each in cost["instances"]
    )
    line = f", {cost['usd']:.2f} USD for {kinds}"
    is_on_spot = any(each["market"] == SPOT for each in cost["instances"])
    return f"{line} ({cost['on_demand_usd']:.2f} USD on demand)" if is_on_spot else line


def _spot_prices(info: ClusterInfo, instance_types: set[str]) -> dict[str, float]:
    """Return the prices by type; a run asks for its cost every few seconds, and EC2 is asked every few minutes."""
    now = time.monotonic()
    if instance_types - _known.keys() or any(now - _known[name][0] > SPOT_SECONDS for name in instance_types):
        answer = ask_aws("ec2", "describe_spot_price_history", **spot_prices.question(info, instance_types))
        found = spot_prices.by_type(answer) if answer else {}
        for name in instance_types:  # the last price holds where EC2 says nothing
            _known[name] = now, found.get(name, _known.get(name, (now, None))[1])
    return {name: price for name in instance_types if (price := _known[name][1]) is not None}


def _by_full_kind(hours: Mapping[InstanceKind, float], workers: ClusterInfo) -> dict[tuple[str, str], float]:
    """Return the hours by type and market; where a node says neither, it counts as what the stack asks for first."""
    market = SPOT if workers["spot"] else ON_DEMAND
    found: dict[tuple[str, str], float] = defaultdict(float)
    for kind, counted in hours.items():
        found[kind.instance_type or workers["types"][0], kind.market or market] += counted
    return found
