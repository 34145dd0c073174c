"""Cost of a stack that no run uses: head, network, CloudWatch and the workers that stay, at list prices on demand.

Traffic, logs, S3, the image in ECR and the size of the workers' disks are extra.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

from infra.config import prices
from infra.config.together import in_threads
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
# Of a month, beyond the free tier of the account: a metric, a metric in an alarm, a dashboard.
# https://aws.amazon.com/cloudwatch/pricing/
METRIC_USD, ALARM_USD, DASHBOARD_USD = 0.30, 0.10, 3.0
# Metrics of Container Insights for the cluster, and for each service and task family with a task in the awsvpc mode.
# https://docs.aws.amazon.com/AmazonCloudWatch/latest/monitoring/Container-Insights-metrics-ECS.html
OF_CLUSTER, OF_SERVICE = 11, 13 + 8
# Metrics that the head publishes for a kind of worker, and those in its scaling alarms; and in the other alarms.
OF_KIND, ALARMS_OF_KIND, OTHER_ALARMS = 5, 13, 2
END = "`pulumi destroy` ends it"


def ask(location: Location, *, nat_gateway: bool) -> dict[str, Future[float]]:
    """Start to ask for the prices of the disk and the network, by part.

    Args:
        location: Region and network: an existing one costs this stack only its endpoints.
        nat_gateway: False for a network without one.
    """
    products = {"its disk": DISK}
    if location.endpoints:
        products["VPC endpoints"] = ENDPOINT
    elif nat_gateway and not location.existing:
        products["NAT gateway"] = NAT_GATEWAY
    try:
        price_list = prices.client("pricing", prices.PRICE_LIST_REGION)
    except prices.UNREADABLE:  # prices.py warns, and the head has no price
        return {}
    calls = [
        partial(prices.usd, price_list, location.region, product.unit, product.attributes, product.service)
        for product in products.values()
    ]
    return dict(zip(products, in_threads(*calls), strict=True))


def look_up(
    location: Location, nodes: Mapping[str, NodeSpec], scales: Mapping[str, Scale], asked: Mapping[str, Future[float]]
) -> dict[str, float | None] | None:
    """USD per hour of what runs without workers, by part; None for a part whose price is unknown, with a warning.

    Args:
        location: Location of the cluster.
        nodes: Nodes with prices, by kind; without the head's price the cost is None.
        scales: Numbers of workers by kind.
        asked: Prices that `ask` has asked for.
    """
    head = nodes["head"]
    if not head.prices:  # there is a warning, and the other prices are in the same list; China's are in CNY
        return None
    parts: dict[str, float | None] = {"head": max(price.on_demand for price in head.prices.values())}
    count = len(location.endpoints) * max(1, len(location.worker_zones))
    costs: dict[str, Callable[[float], float]] = {
        "its disk": lambda usd: head.disk_gib * usd / HOURS_OF_MONTH,
        "VPC endpoints": lambda usd: count * usd,
        "NAT gateway": lambda usd: usd + ADDRESS_USD,
    }
    parts |= {part: _usd(part, price, costs[part]) for part, price in asked.items()}
    parts["CloudWatch"] = _cloudwatch(scales)
    return {part: usd and round(usd, 4) for part, usd in parts.items()}


def _usd(part: str, price: Future[float], cost: Callable[[float], float]) -> float | None:
    try:
        return cost(price.result())
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
