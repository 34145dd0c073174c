"""Cluster plan: location, task sizes, prices and quotas, from the arguments and AWS's answers.

A cluster that cannot work is refused in a preview, before any resource exists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pulumi
import pulumi_aws as aws

from infra.config import docker, limits, lookups, prices, quotas
from infra.config.args import RayClusterArgs
from infra.config.location import ask_caller, check_account, locate, network_of_program
from infra.definitions.addresses import private_addresses
from infra.definitions.sizing import InstanceType, cpu_worker_size, head_size, worker_size
from infra.definitions.user_data import ami_parameter
from infra.errors import SettingError, error_reason, warn
from infra.types import Location, NodeSpec, Scale


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Location, nodes and scales of a cluster.

    Attributes:
        nodes: Node specifications by kind, the head first: "head", "workers" and, with CPU workers, "cpu-workers".
        scales: Number of workers by kind.
        gpus: Number of GPUs that a job requests by default.
        default_tags: Default tags of the AWS provider.
    """

    location: Location
    nodes: Mapping[str, NodeSpec]
    scales: Mapping[str, Scale]
    gpus: int
    default_tags: Mapping[str, str]

    @property
    def hourly_usd(self) -> float | None:
        """Maximum on-demand cost of the instances in USD per hour, None where a price is unknown.

        Spot prices change by the hour: an output with them would show a change in every preview.
        """
        return prices.estimate(*(replace(node, spot_count=0) for node in self.nodes.values()))


def make_plan(args: RayClusterArgs, opts: pulumi.InvokeOptions | None = None) -> Plan:
    """Plan a cluster: validate the arguments against AWS, find its zones and size the tasks.

    Args:
        args: The arguments.
        opts: AWS provider for the calls.

    Raises:
        SettingError: An argument does not fit the account or region.
        Refusal: AWS can't be called.
    """
    caller = ask_caller(opts)
    if args.is_stack:
        check_account(caller.account)
    lookups.check(args, caller, opts)
    if not args.image_uri:
        docker.check(is_up=lambda: quotas.is_deployed(opts))
    existing = network_of_program(args)
    if args.vpc_id and not existing:
        existing = lookups.existing_network(args, caller, opts)
    location = locate(args, caller, existing, opts)
    nodes = _nodes(args, location, opts)
    if args.check_quotas:
        quotas.check(
            caller.region,
            *nodes.values(),
            new_network=not existing,
            nat_gateway=args.nat_gateway,
            opts=opts,
        )
    priced = prices.look_up(caller.region, *nodes.values(), zones=location.suitable, spot=args.max_hourly_usd > 0)
    prices.check(args.max_hourly_usd, *priced)
    if not existing:
        _check_room(args, sum(node.max_count for node in priced))
    tags = aws.get_default_tags(opts=opts).tags
    limits.check(args, location, priced, tags)
    scales = {"workers": args.workers, "cpu-workers": args.cpu_workers}
    return Plan(
        location=location,
        nodes=dict(zip(nodes, priced, strict=True)),
        scales={kind: scale for kind, scale in scales.items() if kind in nodes},
        gpus=args.workers.default_job_count * nodes["workers"].task.gpus,
        default_tags=tags,
    )


def _check_room(args: RayClusterArgs, nodes: int) -> None:
    """Refuse a VPC with too few addresses: in awsvpc mode a node takes one for its instance and one for its task.

    https://docs.aws.amazon.com/AmazonECS/latest/developerguide/task-networking-awsvpc.html
    """
    room = private_addresses(args.vpc_cidr)
    if room < 2 * nodes:
        problem = f"has {room} addresses per private subnet, too few for {nodes} nodes with two each"
        raise SettingError("vpc_cidr", args.vpc_cidr, problem, "use a larger CIDR block, e.g. 10.0.0.0/16")


def get_instance_types(
    key: str, names: Sequence[str], region: str, opts: pulumi.InvokeOptions | None = None
) -> tuple[InstanceType, ...]:
    """EC2's description of the instance types in a field."""
    return tuple(get_instance_type(key, name, region, opts) for name in names)


def get_instance_type(key: str, name: str, region: str, opts: pulumi.InvokeOptions | None = None) -> InstanceType:
    """EC2's description of an instance type in a field."""
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


def _nodes(args: RayClusterArgs, location: Location, opts: pulumi.InvokeOptions | None) -> dict[str, NodeSpec]:
    """Node specifications by kind. All but the workers are in one zone, the first."""
    types = {key: get_instance_types(key, names, location.region, opts) for key, names in args.instance_types.items()}
    _compare_gpus(types["worker_instance_types"])
    max_workers = args.workers.max_count
    ami_id = args.head_ami_id or _newest_ami("head_ami_id", opts, gpu=False)
    nodes = {
        "head": NodeSpec(
            key="head_instance_type",
            instances=types["head_instance_type"],
            task=head_size("head_instance_type", types["head_instance_type"]),
            max_count=1,
            zones=location.worker_zones[:1],
            ami_id=ami_id,
        ),
        "workers": NodeSpec(
            key="worker_instance_types",
            instances=types["worker_instance_types"],
            task=worker_size("worker_instance_types", types["worker_instance_types"]),
            max_count=max_workers,
            zones=location.worker_zones,
            spread=args.spread_zones,
            spot_count=max(max_workers - args.on_demand_workers, 0) if args.spot else 0,
            ami_id=args.worker_ami_id or _newest_ami("worker_ami_id", opts, gpu=True),
        ),
    }
    key = "cpu_worker_instance_types"
    if key in types:
        nodes["cpu-workers"] = NodeSpec(
            key=key,
            instances=types[key],
            task=cpu_worker_size(key, types[key]),
            max_count=args.cpu_workers.max_count,
            zones=location.worker_zones[:1],
            ami_id=ami_id,
        )
    return nodes


def _compare_gpus(instances: Sequence[InstanceType]) -> None:
    """Warn about types with different GPUs: synchronous training is as fast as the slowest."""
    gpus = {instance.name: f"{instance.gpu_name} with {instance.gpu_memory_mib // 1024} GiB" for instance in instances}
    if len(set(gpus.values())) > 1:
        mixed = ", ".join(f"{name} has {gpu}" for name, gpu in gpus.items())
        warn(
            f"worker_instance_types: {mixed}; a run on both is as fast as the slower GPU, with the memory of the "
            "smaller one"
        )
