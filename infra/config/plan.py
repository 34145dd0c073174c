"""Cluster plan: location, task sizes, prices and quotas, from the arguments and AWS's answers.

A cluster that cannot work is refused in a preview, before any resource exists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pulumi
import pulumi_aws as aws

from infra.config import docker, limits, lookups, prices, quotas, rules
from infra.config.args import RayClusterArgs
from infra.config.location import ask_caller, check_account, locate, network_of_program
from infra.definitions.addresses import private_addresses
from infra.definitions.sizing import InstanceType, TaskSize, cpu_worker_size, head_size, worker_size
from infra.definitions.user_data import machine_image
from infra.errors import SettingError, warn
from infra.tags import stack_tags
from infra.types import Location, NodeSpec, Scale


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Location, nodes and scales of a cluster.

    Attributes:
        nodes: Node specifications by kind, the head first: "head", "workers" and, with CPU workers, "cpu-workers".
        scales: Number of workers by kind.
        gpus: Number of GPUs that a job requests by default.
        image_uri: Training image, pinned by its digest where that is known; empty to build one.
        image_builder: `local` or `codebuild`; empty with an image.
        default_tags: Default tags of the AWS provider.
        image_problem: Reason why this machine can't build the image.
        network_problem: Reason why AWS would refuse another network.
    """

    location: Location
    nodes: Mapping[str, NodeSpec]
    scales: Mapping[str, Scale]
    gpus: int
    image_uri: pulumi.Input[str]
    image_builder: str
    default_tags: Mapping[str, str]
    image_problem: SettingError | None
    network_problem: SettingError | None

    @property
    def hourly_usd(self) -> float | None:
        """Maximum on-demand cost of the instances in USD per hour, None where a price is unknown.

        Spot prices change by the hour: an output with them would show a change in every preview.
        """
        return prices.estimate(*(replace(node, spot_count=0) for node in self.nodes.values()))


def make_plan(args: RayClusterArgs, prefix: str, opts: pulumi.InvokeOptions | None = None) -> Plan:
    """Plan a cluster: validate the arguments against AWS, find its zones and size the tasks.

    Args:
        args: The arguments.
        prefix: Name prefix of the cluster's components.
        opts: AWS provider for the calls.

    Raises:
        SettingError: An argument does not fit the account or region.
        Refusal: AWS can't be called.
    """
    caller = ask_caller(opts)
    if args.is_stack:
        check_account(caller.account)
    image_uri = lookups.check(args, caller, opts)
    image_builder, image_problem = ("", None) if args.image_uri else docker.choose(args.image_build)
    network_problem = None
    existing = network_of_program(args)
    if args.vpc_id and not existing:
        existing = lookups.existing_network(args, caller, opts)
    location = locate(args, caller, existing, opts)
    nodes = _nodes(args, location, opts)
    lookups.check_machine_images(args, nodes.values(), opts)
    if args.check_quotas:
        network_problem = quotas.check(
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
    rules.default_tags(tags, {*args.tags, "Name", *stack_tags()})
    limits.check(args, prefix, location, priced, tags)
    if not args.workers.max_count:
        warn("max_workers: is 0, like worker_count, so that no run can have a GPU; set it, e.g. to 2")
    scales = {"workers": args.workers, "cpu-workers": args.cpu_workers}
    return Plan(
        location=location,
        nodes=dict(zip(nodes, priced, strict=True)),
        scales={kind: scale for kind, scale in scales.items() if kind in nodes},
        gpus=args.workers.default_job_count * nodes["workers"].task.gpus,
        image_uri=image_uri,
        image_builder=image_builder,
        default_tags=tags,
        image_problem=image_problem,
        network_problem=network_problem,
    )


def _check_room(args: RayClusterArgs, nodes: int) -> None:
    """Refuse a VPC with too few addresses: in awsvpc mode a node takes one for its instance and one for its task.

    https://docs.aws.amazon.com/AmazonECS/latest/developerguide/task-networking-awsvpc.html
    """
    room = private_addresses(args.vpc_cidr)
    if room < 2 * nodes:
        problem = f"has {room} addresses per private subnet, too few for {nodes} nodes with two each"
        raise SettingError("vpc_cidr", args.vpc_cidr, problem, "use a larger CIDR block, e.g. 10.0.0.0/16")


def _nodes(args: RayClusterArgs, location: Location, opts: pulumi.InvokeOptions | None) -> dict[str, NodeSpec]:
    """Node specifications by kind. All but the workers are in one zone, the first."""
    max_workers = args.workers.max_count
    spot_count = max(max_workers - args.on_demand_workers, 0) if args.spot else 0
    usages = [usage for usage, count in (("on-demand", max_workers - spot_count), ("spot", spot_count)) if count]
    is_grouped = max_workers > 1 and not args.spread_zones

    def types(key: str, usages: Sequence[str] = ("on-demand",), *, grouped: bool = False) -> tuple[InstanceType, ...]:
        return lookups.instance_types(key, args.instance_types[key], location.region, usages, opts, grouped=grouped)

    def node(key: str, instances: tuple[InstanceType, ...], task: TaskSize, max_count: int) -> NodeSpec:
        ami_id = args.head_ami_id or machine_image(gpu=False)
        zones = location.worker_zones[:1]
        return NodeSpec(key=key, instances=instances, task=task, max_count=max_count, zones=zones, ami_id=ami_id)

    head = types(key := "head_instance_type")
    nodes = {"head": node(key, head, head_size(key, head), 1)}
    workers = types(key := "worker_instance_types", usages, grouped=is_grouped)
    _compare_gpus(workers)
    nodes["workers"] = replace(
        node(key, workers, worker_size(key, workers), max_workers),
        zones=location.worker_zones,
        spread=args.spread_zones,
        spot_count=spot_count,
        ami_id=args.worker_ami_id or machine_image(gpu=True),
    )
    if args.cpu_worker_instance_types:
        cpu_workers = types(key := "cpu_worker_instance_types")
        nodes["cpu-workers"] = node(key, cpu_workers, cpu_worker_size(key, cpu_workers), args.cpu_workers.max_count)
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
