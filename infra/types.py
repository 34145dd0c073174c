"""Value types that components exchange: locations, node specifications, scales and resource references."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pulumi

from infra.definitions.sizing import InstanceType, TaskSize, disk_throughput
from ray_on_ecs.contract import CPU_POOL, CPU_WORKERS, DEFAULT_POOL, WORKERS, reservation_name


def known(value: pulumi.Input[str]) -> str:
    """Plain value, or an empty string for an Output, which is unknown while Pulumi plans."""
    return value if isinstance(value, str) else ""


# Begin of a zone's name, e.g. us-west-2 of us-west-2c, and us-west-2- of the Local Zone us-west-2-lax-1a.
# https://docs.aws.amazon.com/local-zones/latest/ug/concepts-local-zones.html
REGION_OF_ZONE = re.compile(r"^[a-z]+(-[a-z]+)+-\d+-?")


def kind_of(pool: str, zone: str = "") -> str:
    """Kind of a pool's nodes, e.g. h100-workers; in a zone, h100-workers-c, or h100-workers-lax-1a in a Local Zone."""
    kind = {DEFAULT_POOL: WORKERS, CPU_POOL: CPU_WORKERS}.get(pool, f"{pool}-{WORKERS}")
    return f"{kind}-{REGION_OF_ZONE.sub('', zone)}" if zone else kind


@dataclass(frozen=True, kw_only=True)
class ExistingNetwork:
    """VPC that the stack does not create, its subnets by availability zone, and the zones whose subnet is public.

    The subnets of a VPC that the same program creates are not known yet, and taken to be private.
    """

    vpc_id: pulumi.Input[str]
    subnets: Mapping[str, pulumi.Input[str]]
    public_zones: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Account, region and partition (e.g. aws-us-gov) of the AWS provider."""

    account: str
    region: str
    partition: str

    def arn(self, service: str, resource: str) -> str:
        """ARN of a resource of this account and region."""
        return f"arn:{self.partition}:{service}:{self.region}:{self.account}:{resource}"


@dataclass(frozen=True, kw_only=True)
class Location(Caller):
    """Availability zones and network of a cluster.

    Attributes:
        zones: Zones with subnets.
        worker_zones: Zones of the default pool in order of preference, of which the first is the zone of the head and
            of pools without zones; empty if the state keeps the zone.
        suitable: Zones that offer all instance types of these nodes, and endpoints.
        candidates: The zones among them of which the first `pulumi up` chooses one.
        nat_zones: Zones that offer the type of a NAT instance, if there is one.
        existing: Existing network, or None if the cluster creates one.
        endpoints: Names of the endpoint services by AWS service, for a VPC without a NAT gateway.
    """

    zones: tuple[str, ...]
    worker_zones: tuple[str, ...] = ()
    suitable: tuple[str, ...] = ()
    candidates: tuple[str, ...] = ()
    nat_zones: tuple[str, ...] = ()
    existing: ExistingNetwork | None = None
    endpoints: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Price:
    """Price of an instance with its disk's throughput in USD per hour; `spot` is None if unknown or not requested."""

    on_demand: float
    spot: float | None = None


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """Capacity reservation: On-Demand, or a Capacity Block, which is paid up front and ends its instances.

    Attributes:
        id: ID, e.g. cr-0123456789abcdef0.
        is_block: True for a Capacity Block.
        zone: Its availability zone.
        count: Number of instances; 0 of one that has ended.
        payer: Account that pays for those that are not used; empty for the stack's own.
        placement_group: Name of the cluster placement group in which it was created; empty without one.
    """

    id: str
    is_block: bool
    zone: str
    count: int
    payer: str = ""
    placement_group: str = ""

    def __str__(self) -> str:
        return reservation_name(self.id, is_block=self.is_block)


@dataclass(frozen=True, kw_only=True)
class NodeSpec:
    """Specification of one kind of node.

    Attributes:
        key: Field of its instance types, for errors.
        instances: Instance types in order of preference.
        task: Size of a task, which fits each of the types.
        pool: Name of its pool; empty for the head.
        zones: Its availability zone, several if they are spread, or none for the zone that the state keeps.
        spread: True if its instances may be in several zones at a time.
        shares: True in other zones than the first of its pool, whose maximum it shares: costs and quotas count that.
        spot_count: Number of Spot Instances among max_count.
        prices: Price by instance type, or None if one is unknown.
        disk_gib: Size of the root volume.
        disk_usd: Part of each price that is the disk's.
        efa_cards: Network cards of an instance that have an EFA.
        reservation: Capacity reservation that has all its instances.
    """

    key: str
    instances: tuple[InstanceType, ...]
    task: TaskSize
    max_count: int
    zones: tuple[str, ...]
    pool: str = ""
    spread: bool = False
    shares: bool = False
    spot_count: int = 0
    ami_id: str = ""
    prices: Mapping[str, Price] | None = None
    disk_gib: int = 100
    disk_usd: float = 0.0
    efa_cards: tuple[int, ...] = ()
    reservation: Reservation | None = None

    @property
    def is_in_block(self) -> bool:
        """True in a Capacity Block, which is paid up front: an instance costs nothing more but its disk."""
        return self.reservation is not None and self.reservation.is_block

    @property
    def disk_throughput(self) -> int:
        """Throughput of the root volume in MiB/s."""
        return disk_throughput(self.instances)

    @property
    def local_disk_gb(self) -> int:
        """Size of the local disks for Docker's files, of the first type whose disks have the root volume's size."""
        sizes = (instance.local_disk_gb for instance in self.instances)
        return next((size for size in sizes if size * 10**9 >= self.disk_gib * 2**30), 0)

    @property
    def instance_types(self) -> tuple[str, ...]:
        """Names of the types, e.g. g5.xlarge."""
        return tuple(instance.name for instance in self.instances)

    @property
    def units(self) -> int:
        """Number of GPUs per node, or of CPUs without GPUs."""
        return self.task.gpus or self.task.vcpus

    @property
    def on_demand_count(self) -> int:
        """Number of on-demand instances."""
        return self.max_count - self.spot_count

    @property
    def gpu(self) -> str:
        """Name of the GPU, e.g. A10G; `A10G or L4` of unlike types, empty without GPUs."""
        return " or ".join(dict.fromkeys(instance.gpu_name for instance in self.instances if instance.gpus))

    def __str__(self) -> str:
        on_spot = f" ({self.spot_count} on spot)" if self.spot_count else ""
        return f"{self.max_count} x {' or '.join(self.instance_types)}{on_spot}"


@dataclass(frozen=True, kw_only=True)
class SecurityOptions:
    """IAM and KMS settings that all components share; infra/config/args.py describes them."""

    permissions_boundary: pulumi.Input[str] = ""
    role_path: str = "/"
    kms_key_arn: pulumi.Input[str] = ""
    task_policy_arns: Sequence[pulumi.Input[str]] = ()
    instance_policy_arns: Sequence[pulumi.Input[str]] = ()


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Number of nodes of one kind of worker.

    Attributes:
        initial_count: Desired count of the service when the first `pulumi up` creates it; later ones leave it alone.
        min_count: The idle stop scales in to this number.
        max_count: Jobs can scale out to this number.
        default_job_count: A job requests this number by default.
        idle_minutes: Idle time before the scale-in; 0 disables it.
    """

    initial_count: int
    min_count: int
    max_count: int
    default_job_count: int
    idle_minutes: int


@dataclass(frozen=True, kw_only=True)
class NetworkRef:
    """Zone of the head, subnets by zone, and security groups: that of EFA if a type has it.

    Instances and services depend on the whole component, `network`.
    """

    zone: pulumi.Input[str]
    subnets: Mapping[str, pulumi.Input[str]]
    tasks_group_id: pulumi.Output[str]
    instances_group_id: pulumi.Output[str]
    network: pulumi.Resource
    efa_group_id: pulumi.Input[str] = ""

    def zones(self, zones: Sequence[str]) -> Sequence[pulumi.Input[str]]:
        """Zones of a node, or the head's if it has not chosen any."""
        return zones or [self.zone]

    def subnets_in(self, zones: Sequence[str]) -> list[pulumi.Input[str]]:
        """Subnets of a node in its zones."""
        return [in_zone(self.subnets, zone) for zone in self.zones(zones)]


def in_zone(by_zone: Mapping[str, pulumi.Input[str]], zone: pulumi.Input[str]) -> pulumi.Input[str]:
    """Element of a zone, which may be an Output."""
    if isinstance(zone, str):
        return by_zone[zone]
    return pulumi.Output.all(zone, dict(by_zone)).apply(lambda pair: pair[1][pair[0]])


@dataclass(frozen=True, kw_only=True)
class ResourceRef:
    """Name and ARN of a resource, e.g. a bucket or a log group."""

    name: pulumi.Output[str]
    arn: pulumi.Output[str]


@dataclass(frozen=True, kw_only=True)
class ServiceRef:
    """Names of an ECS service and its cluster, for metrics and scaling."""

    cluster: pulumi.Output[str]
    name: pulumi.Output[str]
