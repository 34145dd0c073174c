"""What the stack's instances cost an hour, from AWS's public price list.

The list is served in a few regions alone, which is why boto3 asks: the AWS provider asks in the stack's own.
https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/using-price-list-query-api.html
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import boto3
import pulumi
import pulumi_aws as aws
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from infra.errors import SettingError
from infra.references import NodeSpec

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


def look_up(region: str, instance_types: Collection[str]) -> dict[str, float]:
    """USD an hour of one instance of each type, on demand.

    Where the price list can't be asked, or doesn't know them all, it says so once and returns nothing.
    """
    try:
        client = price_list()
        return {name: hourly_usd(client, region, name) for name in instance_types}
    except (BotoCoreError, ClientError, LookupError) as cause:
        reason = " ".join(str(cause).split())
        pulumi.log.warn(f"the price list (pricing:GetProducts) gave no estimate of the costs ({reason}); going on")
        return {}


def estimate(*nodes: NodeSpec) -> float | None:
    """USD an hour of all instances, None where a price is not known; disks, NAT gateway and traffic come on top."""
    costs = [node.max_count * node.usd for node in nodes if node.usd is not None]
    return round(sum(costs), 4) if len(costs) == len(nodes) else None


def check(limit: float, *nodes: NodeSpec) -> None:
    """Refuse with a SettingError what would cost more than `limit` USD an hour; 0 is no limit."""
    estimated = estimate(*nodes)
    if not limit or (estimated is not None and estimated <= limit):
        return
    if estimated is None:
        hint = "let the caller read the price list (pricing:GetProducts), or set it to 0 for no limit"
        raise SettingError("maxHourlyUsd", limit, "can't be checked, as AWS gives no price", hint)
    instances = " and ".join(f"{node.max_count} x {node.instance_type}" for node in nodes if node.max_count)
    problem = f"is below the {estimated:g} USD an hour that {instances} cost"
    hint = "raise it, or give fewer (workerCount, maxWorkers) or smaller instances"
    raise SettingError("maxHourlyUsd", limit, problem, hint)


def price_list() -> Any:
    """Client of the price list, with the credentials of the environment or of the stack's `aws:profile`."""
    session = boto3.Session(profile_name=aws.config.profile)
    impatient = Config(connect_timeout=5, read_timeout=10, retries={"total_max_attempts": 2})
    return session.client("pricing", region_name=PRICE_LIST_REGION, config=impatient)


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
