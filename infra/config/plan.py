"""Cluster plan: location, task sizes, prices and quotas, from the arguments and AWS's answers.

A cluster that cannot work is refused in a preview, before any resource exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import pulumi
import pulumi_aws as aws

from infra.config import (
    docker,
    efa,
    file_systems,
    idle_cost,
    limits,
    lookups,
    prices,
    quotas,
    reservations,
    rules,
)
from infra.config.args import RayClusterArgs
from infra.config.file_systems import FileSystemPlan
from infra.config.idle_cost import Costs
from infra.config.location import ask_caller, check_account, locate, network_of_program
from infra.definitions.addresses import private_addresses
from infra.definitions.sizing import InstanceType, beside_mountpoint, cpu_size, worker_size
from infra.definitions.user_data import machine_image
from infra.errors import SettingError, warn
from infra.tags import stack_tags
from infra.types import Location, NodeSpec, Reservation, Scale, kind_of, known
from ray_on_ecs.contract import CAPACITY_BLOCK, CPU_POOL, DEFAULT_POOL, SETTINGS, WORKERS, field_of


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Location, nodes and scales of a cluster.

    Attributes:
        nodes: Node specifications by kind: "head", "workers", which is the default pool's first zone, "workers-b" in
            another, "cpu-workers" if there are CPU workers, then "h100-workers" of each pool in `worker_pools`.
        scales: Number of workers by kind; the minimum and the initial number are in a pool's first zone.
        gpus: Number of GPUs that a job requests by default, in the default pool.
        image_uri: Training image, pinned by its digest where that is known; empty to build one.
        image_builder: `local` or `codebuild`; empty with an image.
        default_tags: Default tags of the AWS provider.
        file_systems: File systems that all nodes mount.
        costs: USD per hour without workers, by part; None without the head's price.
        image_problem: Reason why this machine can't build the image.
        network_problem: Reason why AWS would refuse another network.
        ended: Errors of reservations that get no more instances.
    """

    location: Location
    nodes: Mapping[str, NodeSpec]
    scales: Mapping[str, Scale]
    gpus: int
    image_uri: pulumi.Input[str]
    image_builder: str
    default_tags: Mapping[str, str]
    file_systems: FileSystemPlan
    costs: Costs | None
    image_problem: SettingError | None
    network_problem: SettingError | None
    ended: Sequence[SettingError] = ()

    @property
    def hourly_usd(self) -> float | None:
        """Maximum on-demand cost of the instances in USD per hour, None where a price is unknown.

        Spot prices change by the hour: an output with them would show a change in every preview.
        """
        return prices.estimate(*(replace(node, spot_count=0) for node in self.nodes.values()))

    @property
    def idle_cost(self) -> str:
        """Cost of a month with the default workers, idle, and asleep, and the command that ends it."""
        lines = idle_cost.lines(self.costs, self.nodes, self.scales)
        return "; ".join([*(lines or ["unknown without prices"]), idle_cost.END])


def make_plan(args: RayClusterArgs, prefix: str, opts: pulumi.InvokeOptions | None = None) -> Plan:
    """Plan a cluster: validate the arguments against AWS, find its zones and size the tasks."""
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
    reserved, ended = reservations.look_up(args, caller, opts)
    nodes = _nodes(args, location, reserved, opts)
    if args.mounts:
        nodes = {kind: replace(node, task=beside_mountpoint(node.task)) for kind, node in nodes.items()}
    reservations.check_zones(nodes, location.zones)
    lookups.check_machine_images(args, nodes.values(), opts)
    existing_file_systems = file_systems.look_up(args, prefix, location, nodes, opts)
    if args.check_quotas:
        network_problem = quotas.check(
            caller.region,
            *nodes.values(),
            new_network=not existing,
            nat_gateway=args.nat_gateway,
            nat_instance=args.nat_instance,
            opts=opts,
        )
    asked = idle_cost.ask(args, location)
    priced = prices.look_up(caller.region, *nodes.values(), zones=location.suitable, spot=args.max_hourly_usd > 0)
    prices.check(args.max_hourly_usd, *priced)
    if not existing:
        _check_room(args, priced, len(location.endpoints))
    tags = aws.get_default_tags(opts=opts).tags
    rules.default_tags(tags, {*args.tags, "Name", *stack_tags()})
    nodes = dict(zip(nodes, priced, strict=True))
    scales = {kind: args.scale(node.pool) for kind, node in nodes.items() if node.pool}
    scales |= {kind: replace(scales[kind], initial_count=0, min_count=0) for kind in scales if nodes[kind].shares}
    limits.check(args, prefix, location, nodes, scales, tags)
    _warn_of_unused(args, nodes)
    costs = idle_cost.look_up(args, location, nodes, scales, asked)
    if pulumi.runtime.is_dry_run():
        for line in [*prices.lines(*priced), *idle_cost.lines(costs, nodes, scales)]:
            pulumi.log.info(line)
    return Plan(
        location=location,
        nodes=nodes,
        scales=scales,
        gpus=args.scale(DEFAULT_POOL).default_job_count * nodes[WORKERS].task.gpus,
        image_uri=image_uri,
        image_builder=image_builder,
        default_tags=tags,
        file_systems=existing_file_systems,
        costs=costs,
        image_problem=image_problem,
        network_problem=network_problem,
        ended=ended,
    )


def _warn_of_unused(args: RayClusterArgs, nodes: Mapping[str, NodeSpec]) -> None:
    """Warn about pools that can't have a node; about the default pool only if no other pool has GPUs."""
    if not any(node.max_count and node.task.gpus for node in nodes.values()):
        warn("max_workers: is 0, like worker_count, so that no run can have a GPU; set it, e.g. to 2")
    for name, pool in args.pools.items():
        if name not in SETTINGS and not pool.most:
            field = field_of(name, "max")
            warn(f"{field}: is 0, like initial and min, so that no run can use the pool; set it, e.g. to 2")


def _check_room(args: RayClusterArgs, nodes: Sequence[NodeSpec], endpoints: int) -> None:
    """Refuse a VPC with too few addresses: in awsvpc mode a node takes one for its instance and one for its task.

    A VPC endpoint and a new file system take one each.

    The zone that the state keeps may be that of any other node.
    https://docs.aws.amazon.com/AmazonECS/latest/developerguide/task-networking-awsvpc.html
    """
    zones = {zone for node in nodes for zone in node.zones} or {""}
    most = max(sum(node.max_count for node in nodes if zone in (node.zones or [zone])) for zone in zones)
    room = private_addresses(args.vpc_cidr) - endpoints - bool(args.fsx_lustre_gib)
    if room < 2 * most:
        beside = f" beside {endpoints} VPC endpoints" if endpoints else ""
        problem = f"has {room} addresses per private subnet{beside}, too few for {most} nodes with two each"
        raise SettingError("vpc_cidr", args.vpc_cidr, problem, "use a larger CIDR block, e.g. 10.0.0.0/16")


def _nodes(
    args: RayClusterArgs,
    location: Location,
    reserved: Mapping[str, Reservation],
    opts: pulumi.InvokeOptions | None,
) -> dict[str, NodeSpec]:
    """Node specifications by kind. A pool without zones is in the head's, which is the first of the default pool.

    A kind with a zone has its letter, so that another order of a pool's zones replaces nothing. Only the default pool's
    first zone has none.
    """
    here, key = location.worker_zones[:1], "head_instance_type"
    of_head = lookups.instance_types(key, [args.head_instance_type], location.region, ["on-demand"])
    questions = {name: _types(args, name, location.region, reserved.get(name)) for name in args.pools}
    answers = lookups.ask_all([*of_head, *chain(*questions.values())], opts)
    instances = _described(args, of_head, answers)
    head = NodeSpec(
        key=key,
        instances=instances,
        task=cpu_size(key, instances),
        max_count=1,
        zones=here,
        ami_id=args.head_ami_id or machine_image(gpu=False),
        disk_gib=args.root_volume_gib,
    )
    nodes = {"head": head}
    for name, pool in args.pools.items():
        node, zones = _node(args, name, _described(args, questions[name], answers)), pool.zones
        spread = args.spread_zones and name == DEFAULT_POOL
        public = _public_subnets(location, location.worker_zones if name == DEFAULT_POOL else zones or here)
        cards = efa.cards(name, pool, node.instances, spread=spread, public=public)
        node = replace(node, efa_cards=cards, reservation=reserved.get(name))
        if name == DEFAULT_POOL:
            first, zones = (location.worker_zones, ()) if args.spread_zones else (here, location.worker_zones[1:])
            nodes[WORKERS] = replace(node, zones=first, spread=args.spread_zones)
        elif not zones:
            nodes[kind_of(name)] = replace(node, zones=here)
        for zone in zones:
            shares = name == DEFAULT_POOL or zone != zones[0]
            nodes[kind_of(name, zone)] = replace(node, zones=(zone,), shares=shares)
    return nodes


def _described(
    args: RayClusterArgs, questions: Sequence[lookups.Question], answers: Iterator[Any]
) -> tuple[InstanceType, ...]:
    """Instance types, without their local disks under a key of the account: these have the hardware's alone.

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/data-protection.html#encryption-rest
    """
    found = lookups.described(questions, answers)
    return tuple(replace(instance, local_disk_gb=0) for instance in found) if args.kms_key_arn else found


def _public_subnets(location: Location, zones: Sequence[str]) -> list[str]:
    """Subnets of an existing VPC in these zones that assign public addresses."""
    existing = location.existing
    return [known(existing.subnets[zone]) for zone in zones if zone in existing.public_zones] if existing else []


def _types(args: RayClusterArgs, name: str, region: str, reservation: Reservation | None) -> list[lookups.Question]:
    """Questions for the instance types of a pool."""
    pool = args.pools[name]
    markets = {"on-demand": pool.most - pool.spot_count, "spot": pool.spot_count}
    usages = [market for market, count in markets.items() if count]
    if reservation and reservation.is_block:
        usages = [CAPACITY_BLOCK]
    is_grouped = pool.most > 1 and name != CPU_POOL and not (args.spread_zones and name == DEFAULT_POOL)
    is_grouped = is_grouped and not reservation
    field = field_of(name, "instance_types")
    return lookups.instance_types(field, pool.instance_types, region, usages, grouped=is_grouped)


def _node(args: RayClusterArgs, name: str, instances: tuple[InstanceType, ...]) -> NodeSpec:
    """Specification of a pool's nodes, without their zone; types without GPUs make CPU workers."""
    pool, key = args.pools[name], field_of(name, "instance_types")
    has_gpus = name == DEFAULT_POOL or (name != CPU_POOL and any(instance.gpu_name for instance in instances))
    task = (worker_size if has_gpus else cpu_size)(key, instances)
    if has_gpus:
        _compare_gpus(name, key, instances)
    return NodeSpec(
        key=key,
        pool=name,
        instances=instances,
        task=task,
        max_count=pool.most,
        zones=(),
        spot_count=pool.spot_count,
        ami_id=(args.worker_ami_id if has_gpus else args.head_ami_id) or machine_image(gpu=has_gpus),
        disk_gib=pool.root_volume_gib or args.root_volume_gib,
    )


def _compare_gpus(pool: str, key: str, instances: Sequence[InstanceType]) -> None:
    """Refuse types with different GPUs, or warn in the default pool: training is as fast as the slowest."""
    gpus = {instance.name: f"{instance.gpu_name} with {instance.gpu_memory_mib // 1024} GiB" for instance in instances}
    if len(set(gpus.values())) == 1:
        return
    mixed = ", ".join(f"{name} has {gpu}" for name, gpu in gpus.items())
    if pool == DEFAULT_POOL:
        warn(f"{key}: {mixed}; a run on both is as fast as the slower GPU, with the memory of the smaller one")
        return
    problem = f"are not equal: {mixed}"
    raise SettingError(key, ",".join(gpus), problem, "use types with the same GPU, and a pool for each GPU")
