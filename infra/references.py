"""The values that the program hands to components, and components to one another."""

from __future__ import annotations

from dataclasses import dataclass

import pulumi

from infra.definitions.sizing import InstanceType, TaskSize


@dataclass(frozen=True, kw_only=True)
class ExistingNetwork:
    """A VPC that somebody else keeps, and the subnet of it that everything runs in."""

    vpc_id: str
    subnet_id: str
    zone: str


@dataclass(frozen=True, kw_only=True)
class Location:
    """Where everything is.

    Attributes:
        partition: AWS's, with which ARNs begin.
        account: The account's ID.
        region: The region.
        zone: The zone of all instances.
        zones: The zones that they could move to, this one among them.
        existing: The network that is used, or None where the stack makes one of its own.
    """

    partition: str
    account: str
    region: str
    zone: str
    zones: tuple[str, ...]
    existing: ExistingNetwork | None = None


@dataclass(frozen=True, kw_only=True)
class NodeSpec:
    """One kind of node.

    Attributes:
        key: The configuration key of its instance type, which errors name.
        instance: The facts of that type.
        task: What one task takes of it.
        max_count: The most instances of it.
        ami_id: The machine image, or nothing for AWS's newest one for ECS.
        usd: What one instance costs an hour on demand, or None where AWS would not say.
    """

    key: str
    instance: InstanceType
    task: TaskSize
    max_count: int
    ami_id: str = ""
    usd: float | None = None

    @property
    def instance_type(self) -> str:
        """The type's name, such as g5.xlarge."""
        return self.instance.name

    @property
    def vcpus(self) -> int:
        """The vCPUs of all its instances."""
        return self.max_count * self.instance.vcpus


@dataclass(frozen=True, kw_only=True)
class WorkerScale:
    """How many GPU instances there are, and what changes their number.

    Attributes:
        min_count: So many are there when no job requests any.
        max_count: So many there are at most.
        default_job_count: So many a job requests by default.
        idle_minutes: After so many minutes without progress there are none at all, until a job requests some; 0 leaves
            them.
    """

    min_count: int
    max_count: int
    default_job_count: int
    idle_minutes: int

    @property
    def autoscaled(self) -> bool:
        """Whether AWS changes the number; otherwise it is `max_count`, and changes with `pulumi up` alone."""
        return self.max_count > 0 and (self.min_count < self.max_count or self.idle_minutes > 0)

    @property
    def initial_count(self) -> int:
        """The number that the stack begins with, and below which AWS never goes."""
        return 0 if self.autoscaled and self.idle_minutes else self.min_count


@dataclass(frozen=True, kw_only=True)
class Alerts:
    """Who hears of alarms and costs, if anybody, and which costs of the account a month are to be heard of."""

    email: str
    monthly_usd: int


@dataclass(frozen=True, kw_only=True)
class NetworkRef:
    """Where instances and tasks run; they start after `network` is complete, and are gone before any part of it."""

    subnet_id: pulumi.Output[str]
    security_group_id: pulumi.Output[str]
    network: pulumi.Resource


@dataclass(frozen=True, kw_only=True)
class ResourceRef:
    """A bucket, a log group or a cluster: by its name for those who use it, by its ARN for policies."""

    name: pulumi.Output[str]
    arn: pulumi.Output[str]


@dataclass(frozen=True, kw_only=True)
class ServiceRef:
    """An ECS service, by the two names that its metrics and its scaling go by."""

    cluster: pulumi.Output[str]
    name: pulumi.Output[str]
