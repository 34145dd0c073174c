"""Cluster plan: location, task sizes, prices and quotas, from the settings and AWS's answers.

A cluster that cannot work is refused in a preview, before any resource exists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pulumi
import pulumi_aws as aws

from infra.config import identity, lookups, prices, quotas
from infra.config.location import Remembered, ask_caller, locate, remember
from infra.config.settings import Settings
from infra.definitions.sizing import InstanceType, cpu_worker_size, head_size, worker_size
from infra.definitions.subnets import private_addresses
from infra.definitions.user_data import machine_image
from infra.errors import SettingError
from infra.types import ExistingNetwork, Location, NodeSpec, Scale

ON_DEMAND = "on-demand"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Location, nodes and scales of a cluster.

    Attributes:
        cpu_worker: None without CPU workers.
        scales: Number of workers by kind, "workers" or "cpu-workers".
        image_uri: Training image, pinned by its digest where that is known; empty to build one.
        gpus: Number of GPUs that a job requests by default.
        identity: Values that can't change while the stack is up.
        up: The deployed stack, None before the first `pulumi up`.
        default_tags: Default tags of the AWS provider.
    """

    location: Location
    head: NodeSpec
    worker: NodeSpec
    cpu_worker: NodeSpec | None
    scales: Mapping[str, Scale]
    gpus: int
    image_uri: pulumi.Input[str] = ""
    identity: Mapping[str, str] = field(default_factory=dict)
    up: Remembered | None = None
    default_tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def region(self) -> str:
        """Region of the cluster."""
        return self.location.region

    @property
    def nodes(self) -> dict[str, NodeSpec]:
        """Node specifications by kind, the head first."""
        nodes = {"head": self.head, "workers": self.worker}
        if self.cpu_worker:
            nodes["cpu-workers"] = self.cpu_worker
        return nodes

    @property
    def hourly_usd(self) -> float | None:
        """Maximum on-demand cost of the instances in USD per hour, None where a price is unknown.

        Spot prices change by the hour: an output with them would show a change in every preview.
        """
        return prices.estimate(*(replace(node, spot_count=0) for node in self.nodes.values()))


def make_plan(
    settings: Settings,
    prefix: str,
    network: ExistingNetwork | None = None,
    opts: pulumi.InvokeOptions | None = None,
) -> Plan:
    """Plan a cluster: validate the settings against AWS, choose zones and size the tasks.

    Args:
        settings: The validated settings.
        prefix: Name prefix of the cluster's components.
        network: Network that the same program creates, in place of the settings'.
        opts: AWS provider for the calls.

    Raises:
        SettingError: A setting does not fit the account or region.
        RunError: AWS can't be called, or the stack is up elsewhere.
    """
    caller = ask_caller(opts)
    region = caller.region
    up, others = remember(prefix, opts)
    identity.check_roles(settings, caller, prefix, opts)
    image_uri = lookups.check(settings, caller, opts)
    location = locate(settings, caller, up, network, others, opts)
    nodes = [_head(settings, location, opts), _worker(settings, location, opts)]
    if settings.cpu_worker_instance_types:
        nodes.append(_cpu_worker(settings, location, nodes[0].ami_id, opts))
    lookups.check_machine_images(settings, nodes, opts)
    if settings.check_quotas:
        new_network = not (up or location.existing)
        quotas.check(region, *nodes, new_network=new_network, nat_gateway=settings.nat_gateway, opts=opts)
    head, worker, *cpu_workers = nodes = prices.look_up(region, *nodes, spot=settings.max_hourly_usd > 0)
    prices.check(settings.max_hourly_usd, *nodes)
    _check_room(settings, location, sum(node.max_count for node in nodes))
    scales = {"workers": settings.workers}
    if cpu_workers:
        scales["cpu-workers"] = settings.cpu_workers
    return Plan(
        location=location,
        head=head,
        worker=worker,
        cpu_worker=next(iter(cpu_workers), None),
        scales=scales,
        gpus=settings.workers.default_job_count * worker.task.gpus,
        image_uri=image_uri,
        identity=identity.identity(settings, location, network),
        up=up,
        default_tags=aws.get_default_tags(opts=opts).tags,
    )


def _check_room(settings: Settings, location: Location, nodes: int) -> None:
    """Refuse a VPC with too few addresses: in awsvpc mode a node takes one for its instance and one for its task.

    https://docs.aws.amazon.com/AmazonECS/latest/developerguide/task-networking-awsvpc.html
    """
    zones = len(location.zones)
    room = private_addresses(settings.vpc_cidr, zones)
    if not location.existing and room < 2 * nodes:
        problem = f"has {room} addresses per private subnet ({zones} zones), too few for {nodes} nodes with two each"
        raise SettingError("vpcCidr", settings.vpc_cidr, problem, "use a larger CIDR block, e.g. 10.0.0.0/16")


def _head(settings: Settings, location: Location, opts: pulumi.InvokeOptions | None) -> NodeSpec:
    key = "headInstanceType"
    instances = lookups.instance_types(key, [settings.head_instance_type], location.region, [ON_DEMAND], opts)
    return NodeSpec(
        key=key,
        instances=instances,
        task=head_size(key, instances),
        max_count=1,
        zones=(location.zone,),
        ami_id=settings.head_ami_id or machine_image(gpu=False),
    )


def _worker(settings: Settings, location: Location, opts: pulumi.InvokeOptions | None) -> NodeSpec:
    key = "workerInstanceTypes"
    max_count = settings.workers.max_count
    spot_count = max(max_count - settings.on_demand_workers, 0) if settings.spot else 0
    usages = [usage for usage, count in ((ON_DEMAND, max_count - spot_count), ("spot", spot_count)) if count]
    instances = lookups.instance_types(
        key,
        settings.worker_instance_types,
        location.region,
        usages,
        opts,
        grouped=max_count > 1 and not settings.spread_zones,
    )
    _compare_gpus(key, instances)
    return NodeSpec(
        key=key,
        instances=instances,
        task=worker_size(key, instances),
        max_count=max_count,
        zones=location.worker_zones,
        spread=settings.spread_zones,
        spot_count=spot_count,
        ami_id=settings.worker_ami_id or machine_image(gpu=True),
    )


def _compare_gpus(key: str, instances: Sequence[InstanceType]) -> None:
    """Warn about types with different GPUs: synchronous training is as fast as the slowest."""
    gpus = {instance.name: f"{instance.gpu_name} with {instance.gpu_memory_mib // 1024} GiB" for instance in instances}
    if len(set(gpus.values())) > 1:
        mixed = ", ".join(f"{name} has {gpu}" for name, gpu in gpus.items())
        pulumi.log.warn(
            f"{key}: {mixed}; a run on both is as fast as the slower GPU, with the memory of the smaller one"
        )


def _cpu_worker(settings: Settings, location: Location, ami_id: str, opts: pulumi.InvokeOptions | None) -> NodeSpec:
    key = "cpuWorkerInstanceTypes"
    instances = lookups.instance_types(key, settings.cpu_worker_instance_types, location.region, [ON_DEMAND], opts)
    return NodeSpec(
        key=key,
        instances=instances,
        task=cpu_worker_size(key, instances),
        max_count=settings.cpu_workers.max_count,
        zones=(location.zone,),
        ami_id=ami_id,
    )
