"""Cost of a month with the default workers, idle, and asleep, by part, at list prices on demand.

Traffic, logs, S3, the metrics of runs and the size of the workers' disks are extra.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from infra.config import prices
from infra.config.args import RayClusterArgs
from infra.config.prices import Product
from infra.config.together import in_threads
from infra.definitions import nat
from infra.errors import error_reason, warn
from infra.types import Location, NodeSpec, Scale
from ray_on_ecs.contract import HOURS_OF_MONTH, WORKERS, per_hour_and_month

# https://aws.amazon.com/ebs/pricing/, /vpc/pricing/, /privatelink/pricing/ and /ec2/pricing/on-demand/
DISK = Product("AmazonEC2", "GB-Mo", {"productFamily": "Storage", "volumeApiName": "gp3"})
NAT_GATEWAY = Product(
    "AmazonEC2", "Hrs", {"productFamily": "NAT Gateway", "group": "NGW:NatGateway", "operation": "NatGateway"}
)
NAT_INSTANCE = Product("AmazonEC2", "Hrs", {**prices.PRODUCT, "instanceType": nat.INSTANCE_TYPE})
# For each zone of an endpoint.
ENDPOINT = Product(
    "AmazonVPC", "Hrs", {"productFamily": "VpcEndpoint", "group": "VPCE:VpcEndpoint", "operation": "VpcEndpoint"}
)
# A public IPv4 address has this price in every region: https://aws.amazon.com/vpc/pricing/
ADDRESS_USD = 0.005
# The following are of a month, without the account's free tier.
# The image's compressed layers in ECR, of which later builds share most. https://aws.amazon.com/ecr/pricing/
IMAGE_GB, ECR_USD = 3.3, 0.10
# The hosted zone of AWS Cloud Map's namespace. https://aws.amazon.com/cloud-map/pricing/ and /route53/pricing/
ZONE_USD = 0.50
# A GB of FSx for Lustre, as infra/file_system.py creates it, in us-west-2. https://aws.amazon.com/fsx/lustre/pricing/
LUSTRE_USD = 0.145
# A metric, which costs only the hours in which it has values; a metric in an alarm, and in one of high resolution; and
# a dashboard. https://aws.amazon.com/cloudwatch/pricing/
METRIC_USD, ALARM_USD, FAST_ALARM_USD, DASHBOARD_USD = 0.30, 0.10, 0.30, 3.0
# Metrics of Container Insights for the cluster, and for each service and task family with a task in the awsvpc mode.
# https://docs.aws.amazon.com/AmazonCloudWatch/latest/monitoring/Container-Insights-metrics-ECS.html
OF_CLUSTER, OF_SERVICE = 11, 13 + 8
# Metrics that the head publishes for a kind of worker, and those in its two scaling alarms; with GPUs there is one
# more. Metrics of the GPUs' utilization, and those in the other alarms.
OF_KIND, IN_SHORT_ALARM, IN_IDLE_ALARM = 4, 5, 7
OF_GPUS, IN_OTHER_ALARMS = 2, 2
# Metrics in the alarm that puts the head to sleep, and one more in that of a silent head; and in the two alarms of its
# NAT instance: the request, and the head's instances, running and wanted.
IN_SLEEP_ALARMS, IN_NAT_ALARMS = 2 + 1, 2 * 3
# Parts that end while the head sleeps.
AWAKE = ("head", "disks", "NAT instance")
END = "`pulumi destroy` ends it"

Parts = Mapping[str, float | None]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """USD per hour without workers by part, None where a price is unknown: awake, and asleep if the head sleeps."""

    idle: Parts
    asleep: Parts | None = None


def ask(args: RayClusterArgs, location: Location) -> dict[str, Future[float]]:
    """Start to ask for the prices of disks and network, by part; an existing network costs only its endpoints."""
    products = {"disks": DISK}
    if location.endpoints:
        products["VPC endpoints"] = ENDPOINT
    elif args.nat_gateway and not location.existing:
        products |= {"NAT instance": NAT_INSTANCE} if args.nat_instance else {"NAT gateway": NAT_GATEWAY}
    try:
        price_list = prices.client("pricing", prices.PRICE_LIST_REGION)
    except prices.UNREADABLE:  # prices.py warns, and the head has no price
        return {}
    calls = [partial(prices.usd, price_list, location.region, product) for product in products.values()]
    return dict(zip(products, in_threads(*calls), strict=True))


def look_up(
    args: RayClusterArgs,
    location: Location,
    nodes: Mapping[str, NodeSpec],
    scales: Mapping[str, Scale],
    asked: Mapping[str, Future[float]],
) -> Costs | None:
    """Cost of what runs without workers, with a warning for each part whose price is unknown.

    `asked` are the prices that `ask` has asked for. Without the head's price the cost is None.
    """
    head = nodes["head"]
    if not head.prices:  # there is a warning, and the other prices are in the same list; China's are in CNY
        return None
    idle: dict[str, float | None] = {"head": max(price.on_demand for price in head.prices.values())}
    endpoints = len(location.endpoints) * max(1, len(location.worker_zones))
    disks_gib = head.disk_gib + (nat.DISK_GIB if "NAT instance" in asked else 0)
    costs: dict[str, Callable[[float], float]] = {
        "disks": lambda usd: disks_gib * usd / HOURS_OF_MONTH,
        "VPC endpoints": lambda usd: endpoints * usd,
        "NAT gateway": lambda usd: usd + ADDRESS_USD,
        "NAT instance": lambda usd: usd + ADDRESS_USD,
    }
    idle |= {part: _usd(part, price, costs[part]) for part, price in asked.items()}
    sleeps = args.sleep_after_minutes > 0
    alarms = _alarms(nodes, scales, sleeps=sleeps, nat_alarms=sleeps and "NAT instance" in asked)
    of_sleep = METRIC_USD * sleeps
    idle["CloudWatch"] = (alarms + of_sleep) / HOURS_OF_MONTH + _metrics(nodes, scales, _staying(scales))
    if not args.image_uri:
        idle["image"] = IMAGE_GB * ECR_USD / HOURS_OF_MONTH
    idle["service discovery"] = ZONE_USD / HOURS_OF_MONTH
    if args.fsx_lustre_gib:
        idle["FSx for Lustre"] = args.fsx_lustre_gib * LUSTRE_USD / HOURS_OF_MONTH
    rounded = {part: usd and round(usd, 6) for part, usd in idle.items()}
    if not sleeps:
        return Costs(idle=rounded)
    asleep = {part: usd for part, usd in rounded.items() if part not in AWAKE}
    return Costs(idle=rounded, asleep=asleep | {"CloudWatch": round(alarms / HOURS_OF_MONTH, 6)})


def _usd(part: str, price: Future[float], cost: Callable[[float], float]) -> float | None:
    try:
        return cost(price.result())
    except prices.UNREADABLE as cause:
        warn(f"the idle cost is without {part} (pricing:GetProducts: {error_reason(cause)})")
        return None


def _alarms(nodes: Mapping[str, NodeSpec], scales: Mapping[str, Scale], *, sleeps: bool, nat_alarms: bool) -> float:
    """USD per month of alarms and dashboard, which cost the same asleep."""
    metrics = IN_OTHER_ALARMS + IN_SLEEP_ALARMS * sleeps + IN_NAT_ALARMS * nat_alarms
    for kind, scale in scales.items():
        if scale.max_count:
            metrics += IN_SHORT_ALARM
        if scale.idle_minutes and scale.min_count < scale.max_count:
            metrics += IN_IDLE_ALARM + (nodes[kind].task.gpus > 0)
    return ALARM_USD * metrics + FAST_ALARM_USD * sleeps + DASHBOARD_USD


def _metrics(nodes: Mapping[str, NodeSpec], scales: Mapping[str, Scale], workers: Mapping[str, int]) -> float:
    """USD per hour of the metrics that have values while the head and these numbers of workers are up."""
    published = sum(OF_KIND + (nodes[kind].task.gpus > 0) for kind, scale in scales.items() if scale.max_count)
    kinds = [nodes[kind].task for kind, count in workers.items() if count]
    of_gpus = OF_GPUS if any(task.gpus for task in kinds) else 0
    metrics = OF_CLUSTER + OF_SERVICE * (1 + len(kinds)) + published + of_gpus
    return METRIC_USD * metrics / HOURS_OF_MONTH


def _staying(scales: Mapping[str, Scale]) -> dict[str, int]:
    """Numbers of workers that the idle stop leaves, by kind."""
    return {kind: scale.min_count if scale.idle_minutes else scale.initial_count for kind, scale in scales.items()}


def lines(costs: Costs | None, nodes: Mapping[str, NodeSpec], scales: Mapping[str, Scale]) -> list[str]:
    """Lines for a month with the default workers, idle, and asleep: the sum and its parts.

    They are equal in each preview, whatever runs and EC2's Spot prices are. Workers that the first `pulumi up` starts
    beyond those that stay have lines apart, as they stop once they are idle.
    """
    if costs is None:
        return []
    staying, texts = _staying(scales), []
    if count := scales[WORKERS].default_job_count:
        training = {**staying, WORKERS: count}
        more = _metrics(nodes, scales, training) - _metrics(nodes, scales, staying)
        parts = {part: usd + more if part == "CloudWatch" and usd else usd for part, usd in costs.idle.items()}
        texts.append(_line("training", parts, training, nodes))
    texts.append(_line("idle", costs.idle, staying, nodes))
    if costs.asleep is not None:
        texts.append(_line("asleep", costs.asleep, {}, nodes))
    for kind, scale in scales.items():
        if more_workers := scale.initial_count - staying[kind]:
            part, usd = _workers(more_workers, nodes[kind])
            cost = "price unknown" if usd is None else f"{usd:.2f} USD an hour"
            until = f"until idle for {scale.idle_minutes} minutes"
            texts.append(f"the first `pulumi up` also starts {part} ({cost}) {until}")
    return [*texts, *_reserved(nodes)]


def _reserved(nodes: Mapping[str, NodeSpec]) -> list[str]:
    """Lines for reservations, which are billed apart from the stack.

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/capacity-reservations-pricing-billing.html
    """
    texts = []
    for reservation, node in {node.reservation: node for node in nodes.values() if node.reservation}.items():
        if not reservation.count:
            continue
        if reservation.is_block:
            texts.append(f"{reservation} is paid up front, and its instances cost nothing more but their disks")
            continue
        prices_usd = [price.on_demand - node.disk_usd for price in (node.prices or {}).values()]
        cost = per_hour_and_month(reservation.count * max(prices_usd)) if prices_usd else "of unknown price"
        payer = f", to account {reservation.payer}," if reservation.payer else ""
        instances = f"{reservation.count} x {node.instance_types[0]}"
        texts.append(
            f"{reservation} ({instances}) is billed{payer} also without instances and after `pulumi destroy`: {cost}, "
            "of which instances in it are a part; `aws ec2 cancel-capacity-reservation` ends it"
        )
    return texts


def _line(state: str, parts: Parts, workers: Mapping[str, int], nodes: Mapping[str, NodeSpec]) -> str:
    """Sum and parts of a month with these numbers of workers; the sum is that of the rounded parts."""
    named = [*parts.items(), *(_workers(count, nodes[kind]) for kind, count in workers.items() if count)]
    of_month = [(part, usd if usd is None else round(usd * HOURS_OF_MONTH, 2)) for part, usd in named]
    total = math.fsum(usd for _, usd in of_month if usd is not None)
    least = "at least " if any(usd is None for _, usd in of_month) else ""
    listed = " + ".join(f"{part} {'of unknown price' if usd is None else f'{usd:,.2f}'}" for part, usd in of_month)
    return f"month {state}: {least}{total:,.2f} USD ({total / HOURS_OF_MONTH:.2f} an hour) = {listed}"


def _workers(count: int, node: NodeSpec) -> tuple[str, float | None]:
    """Workers and their price on demand: the highest of several types, and above those on spot."""
    usd = max((price.on_demand for price in (node.prices or {}).values()), default=None)
    at_most = " at most" if usd is not None and (node.spot_count or len(node.instance_types) > 1) else ""
    return f"{count} x {' or '.join(node.instance_types)}{at_most}", usd and count * usd
