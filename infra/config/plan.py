"""Cluster plan: location, task sizes, prices and quotas, from the settings and AWS's answers.

A cluster that cannot work is refused in a preview, before any resource exists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pulumi
import pulumi_aws as aws

from infra.config import account, identity, prices, quotas
from infra.config.location import Remembered, ask_caller, locate, remember
from infra.config.settings import Settings
from infra.definitions.sizing import InstanceType, cpu_worker_size, head_size, worker_size
from infra.definitions.subnets import private_addresses
from infra.definitions.user_data import ami_parameter
from infra.errors import SettingError, error_reason
from infra.types import ExistingNetwork, Location, NodeSpec, Scale, known


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Location, nodes and scales of a cluster.

    Attributes:
        cpu_worker: None without CPU workers.
        scales: Number of workers by kind, "workers" or "cpu-workers".
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
    image_uri = known(settings.image_uri)
    if image_uri and "@" not in image_uri:
        pulumi.log.warn(
            f"imageUri: the tag of {image_uri} is mutable, so instances may run different images; pin it with "
            "repository@sha256:digest"
        )
    account.check(settings, region, caller.account, opts)
    location = locate(settings, caller, up, network, others, opts)
    nodes = [_head(settings, location, opts), _worker(settings, location, opts)]
    if settings.cpu_worker_instance_types:
        nodes.append(_cpu_worker(settings, location, nodes[0].ami_id, opts))
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


def get_instance_types(
    key: str, names: Sequence[str], region: str, opts: pulumi.InvokeOptions | None = None
) -> tuple[InstanceType, ...]:
    """EC2's description of the instance types in a configuration key."""
    return tuple(get_instance_type(key, name, region, opts) for name in names)


def get_instance_type(key: str, name: str, region: str, opts: pulumi.InvokeOptions | None = None) -> InstanceType:
    """EC2's description of an instance type in a configuration key."""
    try:
        described = aws.ec2.get_instance_type(instance_type=name, opts=opts)
    except Exception as error:  # The SDK raises a bare Exception for every error of the provider.
        problem = f"could not be looked up in {region} ({error_reason(error)})"
        raise SettingError(key, name, problem, "use an instance type that this region offers") from error
    gpu = described.gpuses[0] if described.gpuses else None
    return InstanceType(
        name=name,
        vcpus=described.default_vcpus,
        memory_mib=described.memory_size,
        architectures=tuple(described.supported_architectures),
        gpus=sum(gpu.count for gpu in described.gpuses),
        gpu_name=gpu.name if gpu else "",
        gpu_memory_mib=gpu.memory_size if gpu else 0,
        gpu_manufacturer=gpu.manufacturer if gpu else "",
    )


def _newest_ami(key: str, opts: pulumi.InvokeOptions | None, *, gpu: bool) -> str:
    """ID of the latest Amazon ECS-optimized AMI, from its public SSM parameter."""
    name = ami_parameter(gpu=gpu)
    try:
        # `value` is a secret output, which would hide the whole launch template in previews.
        return aws.ssm.get_parameter(name=name, opts=opts).insecure_value
    except Exception as error:
        problem = f"is empty, and the latest AMI could not be read (ssm:GetParameter of {name}: {error_reason(error)})"
        raise SettingError(key, "", problem, "grant the caller that action, or use an AMI ID") from error


def _head(settings: Settings, location: Location, opts: pulumi.InvokeOptions | None) -> NodeSpec:
    key = "headInstanceType"
    instances = get_instance_types(key, [settings.head_instance_type], location.region, opts)
    return NodeSpec(
        key=key,
        instances=instances,
        task=head_size(key, instances),
        max_count=1,
        zones=(location.zone,),
        ami_id=settings.head_ami_id or _newest_ami("headAmiId", opts, gpu=False),
    )


def _worker(settings: Settings, location: Location, opts: pulumi.InvokeOptions | None) -> NodeSpec:
    key = "workerInstanceTypes"
    instances = get_instance_types(key, settings.worker_instance_types, location.region, opts)
    _compare_gpus(key, instances)
    max_count = settings.workers.max_count
    return NodeSpec(
        key=key,
        instances=instances,
        task=worker_size(key, instances),
        max_count=max_count,
        zones=location.worker_zones,
        spread=settings.spread_zones,
        spot_count=max(max_count - settings.on_demand_workers, 0) if settings.spot else 0,
        ami_id=settings.worker_ami_id or _newest_ami("workerAmiId", opts, gpu=True),
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
    instances = get_instance_types(key, settings.cpu_worker_instance_types, location.region, opts)
    return NodeSpec(
        key=key,
        instances=instances,
        task=cpu_worker_size(key, instances),
        max_count=settings.cpu_workers.max_count,
        zones=(location.zone,),
        ami_id=ami_id,
    )
