"""Instance prices: on demand from the AWS Price List API, on spot from EC2's price history.

The Price List API has endpoints in only a few regions, and the AWS provider calls the stack's region: hence boto3.
https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/using-price-list-query-api.html
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import boto3
import pulumi
import pulumi_aws as aws
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from infra.errors import SettingError
from infra.types import NodeSpec, Price

PRICE_LIST_REGION = "us-east-1"
# Linux without licences, on demand, on shared tenancy; without unused reservations and capacity blocks, which have
# prices of the same type: this leaves one price per type.
PRODUCT = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",
    "marketoption": "OnDemand",
}


def look_up(region: str, *nodes: NodeSpec, zones: Collection[str] = (), spot: bool = True) -> list[NodeSpec]:
    """Nodes with their on-demand prices, and with spot prices if `spot` is true and they have Spot Instances.

    `zones` are those of nodes whose zone the state keeps.
    Without all on-demand prices, the nodes are returned unchanged, with one warning.
    """
    names = sorted({name for node in nodes for name in node.instance_types})
    try:
        client = price_list()
        on_demand = {name: hourly_usd(client, region, name) for name in names}
    except (BotoCoreError, ClientError, LookupError) as cause:
        pulumi.log.warn(
            f"cost estimate is not available from the price list (pricing:GetProducts: {_line(cause)}); continuing"
        )
        return list(nodes)
    return [replace(node, prices=_prices(region, node, on_demand, node.zones or zones, spot=spot)) for node in nodes]


def _prices(
    region: str, node: NodeSpec, on_demand: Mapping[str, float], zones: Collection[str], *, spot: bool
) -> dict[str, Price]:
    spot_prices: dict[str, float] = {}
    if spot and node.spot_count:
        try:
            spot_prices = spot_usd(ec2(region), node.instance_types, zones)
        except (BotoCoreError, ClientError) as cause:
            pulumi.log.warn(
                f"spot prices are not available (ec2:DescribeSpotPriceHistory: {_line(cause)}); using on-demand prices"
            )
    return {name: Price(on_demand=on_demand[name], spot=spot_prices.get(name)) for name in node.instance_types}


def estimate(*nodes: NodeSpec) -> float | None:
    """Maximum USD per hour of all instances, None where a price is unknown.

    Of several types the most expensive counts, and for an unknown spot price the on-demand price. Disks, NAT gateway
    and traffic are not included.
    """
    total = 0.0
    for node in nodes:
        if node.prices is None:
            return None
        prices = node.prices.values()
        total += node.on_demand_count * max(price.on_demand for price in prices)
        total += node.spot_count * max(price.on_demand if price.spot is None else price.spot for price in prices)
    return round(total, 4)


def check(limit: float, *nodes: NodeSpec) -> None:
    """Raise a SettingError if the nodes cost more than `limit` USD per hour; 0 disables the check."""
    estimated = estimate(*nodes)
    if not limit or (estimated is not None and estimated <= limit):
        return
    if estimated is None:
        hint = "grant the caller pricing:GetProducts, or set it to 0 for no limit"
        raise SettingError("maxHourlyUsd", limit, "can't be checked without prices", hint)
    instances = " and ".join(str(node) for node in nodes if node.max_count)
    problem = f"is below the {estimated:g} USD per hour of {instances}"
    hint = "raise it, or use fewer (workerCount, maxWorkers, cpuWorkerCount, maxCpuWorkers) or smaller instances"
    raise SettingError("maxHourlyUsd", limit, problem, hint)


def ec2(region: str) -> Any:
    """EC2 client, with the credentials of the price list's."""
    return _client("ec2", region)


def spot_usd(client: Any, instance_types: Collection[str], zones: Collection[str]) -> dict[str, float]:
    """Current spot price by instance type, in the most expensive zone; types without one are left out."""
    answer = client.describe_spot_price_history(
        InstanceTypes=list(instance_types),
        ProductDescriptions=["Linux/UNIX"],
        Filters=[{"Name": "availability-zone", "Values": list(zones)}],
        # With a start of now, EC2 returns the current prices, whenever they last changed.
        StartTime=datetime.now(UTC),
    )
    prices: dict[str, float] = {}
    for entry in answer["SpotPriceHistory"]:
        instance_type = entry["InstanceType"]
        prices[instance_type] = max(float(entry["SpotPrice"]), prices.get(instance_type, 0.0))
    return prices


def price_list() -> Any:
    """Price List client, with the credentials of the environment or of the stack's `aws:profile`."""
    return _client("pricing", PRICE_LIST_REGION)


def hourly_usd(prices: Any, region: str, instance_type: str) -> float:
    """On-demand price of an instance type in USD; LookupError unless the list has exactly one."""
    product = {**PRODUCT, "instanceType": instance_type, "regionCode": region}
    filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in product.items()]
    products = prices.get_products(ServiceCode="AmazonEC2", Filters=filters)["PriceList"]
    # 0 is a product that is not sold on demand.
    distinct = {_on_demand(json.loads(product)) for product in products} - {0}
    if len(distinct) != 1:
        raise LookupError(f"{len(distinct)} prices of {instance_type} in {region}")
    return distinct.pop()


def _on_demand(product: dict[str, Any]) -> float:
    """Price in the single dimension of a product's on-demand offer, 0 without an offer."""
    offers = product["terms"].get("OnDemand", {}).values()
    dimensions = (dimension for offer in offers for dimension in offer["priceDimensions"].values())
    return sum(float(dimension["pricePerUnit"]["USD"]) for dimension in dimensions)


def _client(service: str, region: str) -> Any:
    session = boto3.Session(profile_name=aws.config.profile)
    # Prices are optional, so a preview without internet access must not wait for boto3's default retries.
    config = Config(connect_timeout=5, read_timeout=10, retries={"total_max_attempts": 2})
    return session.client(service, region_name=region, config=config)


def _line(cause: Exception) -> str:
    return " ".join(str(cause).split())
