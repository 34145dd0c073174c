"""What the stack's instances cost an hour, from AWS's public price list, and what EC2 asks for spot instances now.

The list is served in a few regions alone, which is why boto3 asks: the AWS provider asks in the stack's own.
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
from infra.references import NodeSpec, Price

PRICE_LIST_REGION = "us-east-1"
# On-demand Linux without licences, on shared hardware, neither a reservation that stands idle nor a block of capacity
# that is paid for beforehand: one price a type.
PRODUCT = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",
    "marketoption": "OnDemand",
}


def look_up(region: str, *nodes: NodeSpec, spot: bool = True) -> list[NodeSpec]:
    """The nodes with their prices, on demand and, where they have spot instances and `spot` is true, on spot.

    Where a price on demand can't be asked for, or is not known, it says so once, and all are left as they are.
    """
    names = sorted({name for node in nodes for name in node.instance_types})
    try:
        client = price_list()
        on_demand = {name: hourly_usd(client, region, name) for name in names}
    except (BotoCoreError, ClientError, LookupError) as cause:
        pulumi.log.warn(
            f"the price list (pricing:GetProducts) gave no estimate of the costs ({_line(cause)}); going on"
        )
        return list(nodes)
    return [replace(node, prices=_prices(region, node, on_demand, spot=spot)) for node in nodes]


def _prices(region: str, node: NodeSpec, on_demand: Mapping[str, float], *, spot: bool) -> dict[str, Price]:
    now: dict[str, float] = {}
    if spot and node.spot_count:
        try:
            now = spot_usd(ec2(region), node.instance_types, node.zones)
        except (BotoCoreError, ClientError) as cause:
            what = f"EC2 gave no spot prices (ec2:DescribeSpotPriceHistory: {_line(cause)})"
            pulumi.log.warn(f"{what}; going on with those of on-demand instances")
    return {name: Price(on_demand=on_demand[name], spot=now.get(name)) for name in node.instance_types}


def estimate(*nodes: NodeSpec) -> float | None:
    """USD an hour of all instances at most, None where a price is not known.

    Of several types the dearest counts, and of a spot instance whose price is not known the one on demand. Disks, NAT
    gateway and traffic come on top.
    """
    total = 0.0
    for node in nodes:
        if node.prices is None:
            return None
        prices = node.prices.values()
        total += node.on_demand_count * max(each.on_demand for each in prices)
        total += node.spot_count * max(each.on_demand if each.spot is None else each.spot for each in prices)
    return round(total, 4)


def check(limit: float, *nodes: NodeSpec) -> None:
    """Refuse with a SettingError what would cost more than `limit` USD an hour; 0 disables the check."""
    estimated = estimate(*nodes)
    if not limit or (estimated is not None and estimated <= limit):
        return
    if estimated is None:
        hint = "let the caller read the price list (pricing:GetProducts), or set it to 0 for no limit"
        raise SettingError("maxHourlyUsd", limit, "can't be checked, as AWS gives no price", hint)
    instances = " and ".join(str(node) for node in nodes if node.max_count)
    problem = f"is below the {estimated:g} USD an hour that {instances} cost"
    hint = "raise it, or give fewer (workerCount, maxWorkers, cpuWorkerCount, maxCpuWorkers) or smaller instances"
    raise SettingError("maxHourlyUsd", limit, problem, hint)


def ec2(region: str) -> Any:
    """Client of EC2, with the same credentials."""
    return _client("ec2", region)


def spot_usd(client: Any, instance_types: Collection[str], zones: Collection[str]) -> dict[str, float]:
    """The present price of a spot instance of each type, in the dearest of the zones; EC2 knows none for some."""
    answer = client.describe_spot_price_history(
        InstanceTypes=list(instance_types),
        ProductDescriptions=["Linux/UNIX"],
        Filters=[{"Name": "availability-zone", "Values": list(zones)}],
        # The prices that hold now, whenever they last changed.
        StartTime=datetime.now(UTC),
    )
    prices: dict[str, float] = {}
    for each in answer["SpotPriceHistory"]:
        prices[each["InstanceType"]] = max(float(each["SpotPrice"]), prices.get(each["InstanceType"], 0.0))
    return prices


def price_list() -> Any:
    """Client of the price list, with the credentials of the environment or of the stack's `aws:profile`."""
    return _client("pricing", PRICE_LIST_REGION)


def hourly_usd(prices: Any, region: str, instance_type: str) -> float:
    """Price of one instance; LookupError where the list has none, or several."""
    wanted = {**PRODUCT, "instanceType": instance_type, "regionCode": region}
    filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in wanted.items()]
    products = prices.get_products(ServiceCode="AmazonEC2", Filters=filters)["PriceList"]
    found = {price for product in products if (price := _on_demand(json.loads(product)))}
    if len(found) != 1:
        raise LookupError(f"{len(found)} prices of {instance_type} in {region}")
    return found.pop()


def _on_demand(product: dict[str, Any]) -> float:
    """The one dimension of the one offer that an on-demand product has; 0 where it can't be had on demand."""
    offers = product["terms"].get("OnDemand", {}).values()
    dimensions = (dimension for offer in offers for dimension in offer["priceDimensions"].values())
    return sum(float(dimension["pricePerUnit"]["USD"]) for dimension in dimensions)


def _client(service: str, region: str) -> Any:
    session = boto3.Session(profile_name=aws.config.profile)
    impatient = Config(connect_timeout=5, read_timeout=10, retries={"total_max_attempts": 2})
    return session.client(service, region_name=region, config=impatient)


def _line(cause: Exception) -> str:
    return " ".join(str(cause).split())
