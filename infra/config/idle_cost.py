"""Cost of a stack that no run uses: head, network, CloudWatch and the workers that stay, at list prices on demand.

Traffic, logs, S3, the image in ECR and the size of the workers' disks are extra.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from infra.config import prices
from infra.errors import error_reason, warn
from infra.types import Location, NodeSpec, Scale
from ray_on_ecs.contract import HOURS_OF_MONTH, per_hour_and_month


class Product(NamedTuple):
    """Product of the AWS Price List: service, unit, and the attributes that leave one price per region."""

    service: str
    unit: str
    attributes: Mapping[str, str]


# https://aws.amazon.com/ebs/pricing/, /vpc/pricing/ and /privatelink/pricing/
DISK = Product("AmazonEC2", "GB-Mo", {"productFamily": "Storage", "volumeApiName": "gp3"})
NAT_GATEWAY = Product(
    "AmazonEC2", "Hrs", {"productFamily": "NAT Gateway", "group": "NGW:NatGateway", "operation": "NatGateway"}
)
# For each zone of an endpoint.
ENDPOINT = Product(
    "AmazonVPC", "Hrs", {"productFamily": "VpcEndpoint", "group": "VPCE:VpcEndpoint", "operation": "VpcEndpoint"}
)
# A public IPv4 address has this price in every region: https://aws.amazon.com/vpc/pricing/
ADDRESS_USD = 0.005
# Of a month, beyond the free tier of the account: a metric, a metric in an alarm, a dashboard. Container Insights has
# metrics of the cluster, and of each service and task family with a task. https://aws.amazon.com/cloudwatch/pricing/
METRIC_USD, ALARM_USD, DASHBOARD_USD = 0.30, 0.10, 3.0
OF_CLUSTER, OF_SERVICE = 8, 11 + 6
# Metrics that the head publishes for a kind of worker, and those in its scaling alarms; and in the other alarms.
OF_KIND, ALARMS_OF_KIND, OTHER_ALARMS = 5, 13, 2
END = "`pulumi destroy` ends it"


def look_up(
    region: str, location: Location, nodes: Mapping[str, NodeSpec], scales: Mapping[str, Scale], *, nat_gateway: bool
) -> dict[str, float | None] | None:
    """USD per hour of what runs without workers, by part; None for a part whose price is unknown, with a warning.

    Args:
        region: The region.
        location: Its network: an existing one costs this stack only its endpoints.
        nodes: Nodes with prices, by kind; without the head's price the cost is None.
        scales: Numbers of workers by kind.
        nat_gateway: False for a network without one.
    """
    head = nodes["head"]
    if not head.prices:  # there is a warning, and the other prices are in the same list; China's are in CNY
        return None
    parts: dict[str, float | None] = {"head": max(price.on_demand for price in head.prices.values())}
    parts["its disk"] = _usd(region, "its disk", DISK, lambda usd: head.disk_gib * usd / HOURS_OF_MONTH)
    if location.endpoints:
        count = len(location.endpoints) * max(1, len(location.worker_zones))
        parts["VPC endpoints"] = _usd(region, "VPC endpoints", ENDPOINT, lambda usd: count * usd)
    elif nat_gateway and not location.existing:
        parts["NAT gateway"] = _usd(region, "NAT gateway", NAT_GATEWAY, lambda usd: usd + ADDRESS_USD)
    parts["CloudWatch"] = _cloudwatch(scales)
    return {part: usd and round(usd, 4) for part, usd in parts.items()}


def _usd(region: str, part: str, product: Product, cost: Callable[[float], float]) -> float | None:
    try:
        price_list = prices.client("pricing", prices.PRICE_LIST_REGION)
        return cost(prices.usd(price_list, region, product.unit, product.attributes, product.service))
    except prices.UNREADABLE as cause:
        warn(f"the idle cost is without {part} (pricing:GetProducts: {error_reason(cause)})")
        return None


def _cloudwatch(scales: Mapping[str, Scale]) -> float:
    kinds = sum(scale.max_count > 0 for scale in scales.values())
    with_tasks = 1 + sum(_staying(scale) > 0 for scale in scales.values())
    metrics = OF_CLUSTER + OF_SERVICE * with_tasks + OF_KIND * kinds
    alarms = OTHER_ALARMS + ALARMS_OF_KIND * kinds
    return (METRIC_USD * metrics + ALARM_USD * alarms + DASHBOARD_USD) / HOURS_OF_MONTH


def _staying(scale: Scale) -> int:
    """Number of workers that the idle stop leaves."""
    return scale.min_count if scale.idle_minutes else scale.initial_count


def describe(
    parts: Mapping[str, float | None] | None, nodes: Mapping[str, NodeSpec], scales: Mapping[str, Scale]
) -> str:
    """The cost in words, and the command that ends it; equal in each preview, whatever runs and EC2's Spot prices are.

    Workers that the first `pulumi up` starts beyond those that stay are named apart, as they stop once they are idle.
    """
    if parts is None:
        return f"unknown without prices; {END}"
    total = sum(usd for usd in parts.values() if usd is not None)
    listed = [f"{part} {usd:.2f}" for part, usd in parts.items() if usd is not None]
    unknown = [part for part, usd in parts.items() if usd is None]
    started = []
    for kind, scale in scales.items():
        node, staying = nodes[kind], _staying(scale)
        usd = max((price.on_demand for price in (node.prices or {}).values()), default=None)
        if staying and usd is None:
            unknown.append(_workers(staying, node))
        elif staying and usd is not None:
            total += staying * usd
            listed.append(f"{_workers(staying, node)} {_at_most(node)}{staying * usd:.2f}")
        if more := scale.initial_count - staying:
            cost = "price unknown" if usd is None else f"{_at_most(node)}{more * usd:.2f} USD an hour"
            started.append(f"{_workers(more, node)} ({cost}) until idle for {scale.idle_minutes} minutes")
    texts = [f"{per_hour_and_month(total)} while idle: {', '.join(listed)}"]
    if unknown:
        texts.append(f"the price of {' and '.join(unknown)} is unknown")
    if started:
        texts.append(f"the first `pulumi up` also starts {' and '.join(started)}")
    return "; ".join([*texts, END])


def _workers(count: int, node: NodeSpec) -> str:
    return f"{count} x {' or '.join(node.instance_types)}"


def _at_most(node: NodeSpec) -> str:
    """Words before a price on demand: it is the highest of several types, and above those on spot."""
    return "at most " if node.spot_count or len(node.instance_types) > 1 else ""
