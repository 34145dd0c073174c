"""Prices of instances and of their disks' throughput: from the AWS Price List API, on spot from EC2's price history.

The Price List API has endpoints in only a few regions, and the AWS provider calls the stack's region: hence boto3.
https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/using-price-list-query-api.html
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple

from infra.config.clients import ERRORS, client
from infra.config.together import in_threads
from infra.config.worker_pool import counts_of
from infra.definitions.sizing import GP3_MIB
from infra.errors import SettingError, error_reason, warn
from infra.types import NodeSpec, Price
from ray_on_ecs.contract import HOURS_OF_MONTH

PRICE_LIST_REGION = "us-east-1"
# Linux without licences, on demand, on shared tenancy; without unused reservations and capacity blocks, which have
# prices of the same type: this leaves one price per type.
PRODUCT = {
    "operatingSystem": "Linux", "tenancy": "Shared", "preInstalledSw": "NA", "capacitystatus": "Used",
    "marketoption": "OnDemand",
}  # fmt: skip
# Throughput of a gp3 volume above what its size includes, for a month.
# https://aws.amazon.com/ebs/pricing/
THROUGHPUT = {"productFamily": "Provisioned Throughput", "volumeApiName": "gp3"}
MIB_OF_UNIT = 1024
# Requests for nodes at once: the API takes ten, of which idle_cost.py makes two; then five per second.
# https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/using-pelong.html
BURST = 8
# Refused or absent, or the page of a proxy in place of an answer.
UNREADABLE = (*ERRORS, LookupError)


class Product(NamedTuple):
    """Product of the AWS Price List: service, unit, and the attributes that leave one price per region."""

    service: str
    unit: str
    attributes: Mapping[str, str]


def look_up(region: str, *nodes: NodeSpec, zones: Collection[str] = (), spot: bool = True) -> list[NodeSpec]:
    """Nodes with their on-demand prices, and with spot prices if `spot` is true and they have Spot Instances.

    `zones` are those of nodes whose zone the state keeps. The node groups of a pool have the spot prices of all of its
    zones, since each can have all of its instances.
    A node with a type whose price is unknown is returned without prices, as are all if the list can't be read.
    """
    names = sorted({name for node in nodes if not node.is_in_block for name in node.instance_types})
    used = {name for node in nodes if node.max_count and not node.is_in_block for name in node.instance_types}
    on_demand, unknown = {}, []
    try:
        price_list = client("pricing", PRICE_LIST_REGION)
        calls: list[Callable[[], float]] = [partial(hourly_usd, price_list, region, name) for name in names]
        if any(node.disk_throughput != GP3_MIB for node in nodes):
            calls.append(partial(usd, price_list, region, Product("AmazonEC2", "GiBps-mo", THROUGHPUT)))
        answers = _usd(calls)
        asked = _ask_spot(region, nodes, zones) if spot else {}
        for name in names:
            try:
                on_demand[name] = next(answers)
            except LookupError as cause:  # as of types that are only sold in Capacity Blocks
                unknown += [error_reason(cause)] if name in used else []
    except UNREADABLE as cause:
        warn(f"cost estimate is not available (pricing:GetProducts: {error_reason(cause)}); continuing")
        return list(nodes)
    if unknown:
        warn(f"cost estimate is not available (pricing:GetProducts: {', '.join(unknown)}); continuing")
    if not on_demand:
        return list(nodes)
    disk_usd = _disk_usd(answers)
    on_spot = {pool: _spot_prices(answer) for pool, answer in asked.items()}
    markets = (on_spot.get(node.pool, {}) if node.spot_count else {} for node in nodes)
    return [_priced(node, on_demand, market, disk_usd) for node, market in zip(nodes, markets, strict=True)]


def _priced(node: NodeSpec, on_demand: Mapping[str, float], on_spot: Mapping[str, float], disk_usd: float) -> NodeSpec:
    if not node.is_in_block and not on_demand.keys() >= {*node.instance_types}:
        return node
    disk = round(disk_usd * (node.disk_throughput - GP3_MIB), 4)
    if node.is_in_block:
        return replace(node, prices=dict.fromkeys(node.instance_types, Price(on_demand=disk)), disk_usd=disk)
    prices = {
        name: Price(
            on_demand=round(on_demand[name] + disk, 6),
            spot=round(on_spot[name] + disk, 6) if name in on_spot else None,
        )
        for name in node.instance_types
    }
    return replace(node, prices=prices, disk_usd=disk)


def _usd(calls: Sequence[Callable[[], float]]) -> Iterator[float]:
    """Prices from the list, asked at the same time if the API takes so many requests at once."""
    if len(calls) > BURST:
        return map(lambda call: call(), calls)  # noqa: C417 - a generator would end at the first error
    return map(Future.result, in_threads(*calls))


def _disk_usd(answers: Iterator[float]) -> float:
    """USD per hour of a MiB/s that a disk's size does not include; 0 with a warning if it is unknown."""
    try:
        return next(answers, 0.0) / MIB_OF_UNIT / HOURS_OF_MONTH
    except UNREADABLE as cause:
        warn(f"the cost estimate is without the disks' throughput (pricing:GetProducts: {error_reason(cause)})")
        return 0.0


def _ask_spot(region: str, nodes: Sequence[NodeSpec], zones: Collection[str]) -> dict[str, Future[dict[str, float]]]:
    """Spot prices by pool, of all zones of the pool."""
    on_spot = {node.pool: node.instance_types for node in nodes if node.spot_count}
    ec2 = client("ec2", region) if on_spot else None
    calls = {}
    for pool, types in on_spot.items():
        of_pool = sorted({zone for node in nodes if node.pool == pool for zone in node.zones})
        calls[pool] = partial(spot_usd, ec2, types, of_pool or zones)
    return dict(zip(calls, in_threads(*calls.values()), strict=True))


def _spot_prices(answer: Future[dict[str, float]]) -> dict[str, float]:
    try:
        return answer.result()
    except UNREADABLE as cause:
        reason = f"ec2:DescribeSpotPriceHistory: {error_reason(cause)}"
        warn(f"spot prices are not available ({reason}); using on-demand prices")
        return {}


def estimate(*nodes: NodeSpec) -> float | None:
    """Maximum USD per hour of all instances, None where a price is unknown.

    Of several types the most expensive counts, and for an unknown spot price the on-demand price. The disks' size, NAT
    gateway and traffic are not included.
    """
    total = 0.0
    for node in _counted(nodes):
        if node.prices is None:
            return None
        prices = node.prices.values()
        total += node.on_demand_count * max(price.on_demand for price in prices)
        total += node.spot_count * max(price.on_demand if price.spot is None else price.spot for price in prices)
    return round(total, 4)


def _counted(nodes: Sequence[NodeSpec]) -> list[NodeSpec]:
    return [node for node in nodes if node.max_count and not node.shares]


def check(limit: float, *nodes: NodeSpec) -> None:
    """Raise a SettingError if the nodes cost more than `limit` USD per hour; 0 disables the check."""
    if not limit:
        return
    estimated = estimate(*nodes)
    if estimated is None:
        types = " and ".join(" or ".join(node.instance_types) for node in nodes if node.max_count and not node.prices)
        hint = "grant the caller pricing:GetProducts, or set it to 0, which means unlimited"
        raise SettingError("max_hourly_usd", limit, f"can't be checked without the prices of {types}", hint)
    if estimated <= limit:
        return
    counted = _counted(nodes)
    problem = f"is below the {estimated:g} USD per hour of {' and '.join(map(str, counted))}"
    most_expensive = max(counted, key=lambda node: (bool(node.pool), estimate(node) or 0))
    pool = most_expensive.pool
    fewer = f"fewer ({counts_of(pool)}) or smaller instances" if pool else "a smaller instance"
    raise SettingError("max_hourly_usd", limit, problem, f"raise it, or use {fewer}")


def lines(*nodes: NodeSpec) -> list[str]:
    """Lines for the head, each pool that can have nodes, and all: instances and the most that they cost."""
    texts = []
    for node in _counted(nodes):
        markets = {"on spot": node.spot_count, "on demand": node.on_demand_count}
        market = " and ".join(f"{count} {name}" for name, count in markets.items() if count)
        market = f"in {node.reservation}" if node.reservation else market
        instances = f"{node.max_count} x {' or '.join(node.instance_types)}"
        instances += " (CPU workers)" if node.pool and not node.task.gpus else ""
        own = [f"{len(node.efa_cards)} EFA each"] if node.efa_cards else []
        own += [f"{node.local_disk_gb:,} GB local disks"] if node.local_disk_gb else []
        instances += f" with {' and '.join(own)}" if own else ""
        cost = f"{_cost(node)}{', as it is paid up front' if node.is_in_block else ''}"
        texts.append(f"{f'pool {node.pool}' if node.pool else 'head'}: {instances}, {market}, {cost}")
    return [*texts, f"all instances: {_cost(*nodes)}"]


def _cost(*nodes: NodeSpec) -> str:
    usd = estimate(*nodes)
    return "cost unknown" if usd is None else f"at most {usd:.2f} USD per hour"


def spot_usd(ec2: Any, instance_types: Collection[str], zones: Collection[str]) -> dict[str, float]:
    """Current spot price by instance type, in the most expensive zone; types without one are left out."""
    answer = ec2.describe_spot_price_history(
        InstanceTypes=list(instance_types),
        ProductDescriptions=["Linux/UNIX"],
        Filters=[{"Name": "availability-zone", "Values": list(zones)}],
        # With a start of now, EC2 returns the current prices, whenever they last changed.
        StartTime=datetime.now(UTC),
    )
    # Of a type's prices, the last and highest stays.
    return dict(sorted((item["InstanceType"], float(item["SpotPrice"])) for item in answer["SpotPriceHistory"]))


def hourly_usd(prices: Any, region: str, instance_type: str) -> float:
    """On-demand price of an instance type in USD; LookupError unless the list has exactly one."""
    return usd(prices, region, Product("AmazonEC2", "Hrs", {**PRODUCT, "instanceType": instance_type}))


def usd(prices: Any, region: str, product: Product) -> float:
    """Price of a unit of a product in USD; LookupError unless the list has exactly one."""
    wanted = {**product.attributes, "regionCode": region}
    filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in wanted.items()]
    products = prices.get_products(ServiceCode=product.service, Filters=filters)["PriceList"]
    offers = [offer for found in products for offer in json.loads(found)["terms"].get("OnDemand", {}).values()]
    dimensions = [dimension for offer in offers for dimension in offer["priceDimensions"].values()]
    # 0 is a product that is not sold on demand.
    distinct = {float(item["pricePerUnit"]["USD"]) for item in dimensions if item["unit"] == product.unit} - {0}
    if len(distinct) != 1:
        what = product.attributes.get("instanceType", product.attributes.get("productFamily"))
        raise LookupError(f"{len(distinct)} prices of {what} in {region}")
    return distinct.pop()
