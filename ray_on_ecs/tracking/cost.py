"""Cost of a run's workers, at the stack's on-demand prices and EC2's current spot prices, and totals over its commands.

Each command writes its time and cost, and the totals of the commands before it under `earlier`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime
from typing import Any, NamedTuple, TypedDict

from ray_on_ecs.cluster_info import (
    ClusterInfo,
    NodeGroup,
    ask_aws,
    read_cluster_info,
    recent,
    spot_prices,
    spot_question,
)
from ray_on_ecs.contract import ON_DEMAND, SPOT, WORKERS, per_hour_and_month
from ray_on_ecs.errors import ResourceError
from ray_on_ecs.pools import setting

# Prices on spot change while a run trains, which asks for its cost every few seconds.
SPOT_PRICES_SECONDS = 300.0

Document = Mapping[str, Any]


class InstanceKind(NamedTuple):
    """Instance type and market, `spot` or `on-demand`, None where the node has no label for it; and kind of node."""

    instance_type: str | None = None
    market: str | None = None
    kind: str = WORKERS


class InstanceCost(TypedDict):
    """Instances of one kind: their total hours, and the hourly price of one instance."""

    pool: str
    zones: list[str]  # one, or those over which the pool spreads its instances
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
    labelled_hours: dict[InstanceKind, float] = defaultdict(float)
    for kind, count in hours.items():
        labelled_hours[labelled(kind, info)] += count
    prices = hourly_prices(info, labelled_hours, recent_spot_prices)
    usd = on_demand_usd = 0.0
    instances: list[InstanceCost] = []
    for each, count in labelled_hours.items():
        group, on_demand = info["groups"].get(each.kind), _on_demand(each, info)
        if each not in prices or on_demand is None or each.market is None or group is None:
            return None
        usd += count * prices[each]
        on_demand_usd += count * on_demand
        named: InstanceCost = {
            "pool": group["pool"],
            "zones": group["zones"],
            "instance_type": each.instance_type or "",
            "market": each.market,
            "hours": count,
            "hourly_usd": prices[each],
        }
        instances.append(named)
    return {
        "usd": round(usd, 4),
        "on_demand_usd": round(on_demand_usd, 4),
        "instance_hours": sum(labelled_hours.values()),
        "instances": instances,
    }


def labelled(instance: InstanceKind, info: ClusterInfo) -> InstanceKind:
    """Return an instance with its type and market; without labels it counts as the first choice of its kind."""
    group = info["groups"].get(instance.kind)
    first = group["types"][0] if group else None
    market = SPOT if group and group["spot"] else ON_DEMAND
    return InstanceKind(instance.instance_type or first, instance.market or market, instance.kind)


def hourly_usd(info: ClusterInfo, instances: Iterable[InstanceKind], ask: Callable[..., Any]) -> dict[str, float]:
    """Return the price of these instances in dollars an hour, by kind of node; `ask` as for `hourly_prices`.

    Raises:
        TrainingError: A price is not known, or AWS refuses the Spot prices.
    """
    rented = [labelled(each, info) for each in instances]
    prices = hourly_prices(info, rented, ask)
    usd: dict[str, float] = defaultdict(float)
    for each in rented:
        if each not in prices:
            raise ResourceError("the stack has no price of a node")
        usd[each.kind] += prices[each]
    return dict(usd)


def hourly_prices(
    info: ClusterInfo, instances: Collection[InstanceKind], ask: Callable[..., Any]
) -> dict[InstanceKind, float]:
    """Return the price of an instance of each kind in dollars an hour; those without a known price are missing.

    Args:
        info: The stack's workers.
        instances: Kinds with type and market.
        ask: Asks AWS by service and operation, with arguments, once, if some are on spot.
    """
    prices = {each: _on_demand(each, info) for each in instances if each.market != SPOT}
    groups = {
        each: info["groups"][each.kind] for each in instances if each.market == SPOT and each.kind in info["groups"]
    }
    if groups:
        zones = [zone for group in groups.values() for zone in group["zones"]]
        question = spot_question([each.instance_type or "" for each in groups], zones)
        answer = ask("ec2", "describe_spot_price_history", **question)
        for each, group in groups.items():
            own = [entry for entry in answer["SpotPriceHistory"] if entry["AvailabilityZone"] in group["zones"]]
            found = spot_prices({"SpotPriceHistory": own}, group["disk_usd"])
            prices[each] = found.get(each.instance_type or "")
    return {each: price for each, price in prices.items() if price is not None}


def _on_demand(instance: InstanceKind, info: ClusterInfo) -> float | None:
    """Return the price on demand of an instance; in a Capacity Block it is that of its disk."""
    group = info["groups"].get(instance.kind)
    reserved = group and group.get("reservation")
    if group and reserved and reserved["is_block"]:
        return group["disk_usd"]
    return (info["prices"] or {}).get(instance.instance_type or "")


def recent_spot_prices(service: str, operation: str, **question: Any) -> Any:
    """Return EC2's recent prices, the last ones if it does not answer."""

    def ask() -> Any:
        answer = ask_aws(service, operation, **question)
        return answer if answer and answer["SpotPriceHistory"] else None

    asked = (SPOT, *question["InstanceTypes"], *question["Filters"][0]["Values"])
    return recent(asked, ask, SPOT_PRICES_SECONDS) or {"SpotPriceHistory": []}


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


def lines_after_run(most: Callable[[float], Mapping[InstanceKind, int]], *, then_stop: bool) -> list[str]:
    """Return what runs on and costs after a run: its workers until the idle stop, and the head; empty without a stack.

    Args:
        most: Returns the highest number of the run's instances by kind in the last seconds.
        then_stop: The run's workers stop at its end.
    """
    info = read_cluster_info()
    if info is None:
        return []
    timeout = max((group["idle_minutes"] for group in info["groups"].values()), default=0)
    used: dict[str, dict[InstanceKind, int]] = defaultdict(lambda: defaultdict(int))
    for instance, count in most(60.0 * timeout if timeout else math.inf).items():
        if instance.kind in info["groups"]:
            used[instance.kind][labelled(instance, info)] += count
    prices = hourly_prices(info, [each for of_kind in used.values() for each in of_kind], recent_spot_prices)
    staying = [_staying(info["groups"][kind], instances, prices, then_stop) for kind, instances in used.items()]
    if (
        timeout
        and not then_stop
        and any(sum(each.values()) > info["groups"][kind]["min"] for kind, each in used.items())
    ):
        staying.append("run --then-stop stops a run's workers at its end")
    lines = ["; ".join(staying)] if staying else []
    if info["head_usd"] is not None:
        head = f"the head costs {per_hour_and_month(info['head_usd'])}, network and CloudWatch are extra"
        lines.append(f"{head}; pulumi destroy ends the stack")
    return lines


def _staying(
    group: NodeGroup, instances: Mapping[InstanceKind, int], prices: Mapping[InstanceKind, float], then_stop: bool
) -> str:
    """Return in words for how long a run's instances of a kind stay, and their cost if the prices are known."""
    count, least, minutes = sum(instances.values()), group["min"], group["idle_minutes"]
    names = [f"{number} x {_named(each)}" for each, number in instances.items()]
    text, is_one, key = " and ".join(names), count == 1, setting(group["pool"], "min")
    usd = math.nan
    if instances.keys() <= prices.keys():
        usd = sum(prices[each] * number for each, number in instances.items())
    if count <= least or not (then_stop or minutes):
        cost = "" if math.isnan(usd) else f": {per_hour_and_month(usd)}"
        why = key if count <= least else "idleTimeoutMinutes is 0"
        return f"{text} {'keeps' if is_one else 'keep'} running ({why}){cost}"
    down = f", down to {least} ({key})" if least else ""
    if then_stop:
        return f"{text} {'is' if is_one else 'are'} being stopped{down} (--then-stop)"
    share = (count - least) / count * minutes / 60
    cost = "" if math.isnan(usd) else f" ({usd * share:.2f} USD)"
    them = "it" if is_one else "them"
    stay = f"{text} {'stays' if is_one else 'stay'} idle for some {minutes} minutes{cost}"
    return f"{stay} unless another run takes {them}{down}"


def _named(instance: InstanceKind) -> str:
    return (instance.instance_type or instance.kind) + (" on spot" if instance.market == SPOT else "")


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
