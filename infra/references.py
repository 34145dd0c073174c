"""The values that the program hands to components, and components to one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pulumi

from infra.definitions.sizing import InstanceType, TaskSize


def known(value: pulumi.Input[str]) -> str:
    """The value, or nothing where it is an Output, which AWS can't be asked about."""
    return value if isinstance(value, str) else ""


@dataclass(frozen=True, kw_only=True)
class ExistingNetwork:
    """A VPC that the stack does not own, and its subnets that everything runs in, by their zones."""

    vpc_id: pulumi.Input[str]
    subnets: Mapping[str, pulumi.Input[str]]


@dataclass(frozen=True, kw_only=True)
class Location:
    """Where everything is.

    Attributes:
        partition: AWS's, with which ARNs begin.
        account: The account's ID.
        region: The region.
        worker_zones: The zones that the workers may be in, the preferred one first; everything else is in that one.
        zones: The zones that they could move to, those among them.
        existing: The network that is used, or None where the stack makes one of its own.
    """

    partition: str
    account: str
    region: str
    worker_zones: tuple[str, ...]
    zones: tuple[str, ...]
    existing: ExistingNetwork | None = None

    @property
    def zone(self) -> str:
        """The zone of the head and the CPU workers."""
        return self.worker_zones[0]


@dataclass(frozen=True, kw_only=True)
class Price:
    """Price of an instance, in USD an hour; None for spot where AWS was not asked, or would not say."""

    on_demand: float
    spot: float | None = None


@dataclass(frozen=True, kw_only=True)
class NodeSpec:
    """One kind of node.

    Attributes:
        key: The configuration key of its instance types, which errors name.
        instances: The facts of the types that it may be, the preferred one first.
        task: What one task takes of any of them.
        max_count: The most instances of it.
        zones: The zones that they may be in, the preferred one first.
        spread: Whether they may be in several zones at a time.
        spot_count: How many of them are spot instances.
        ami_id: The machine image.
        prices: What one instance of each type costs, or None where AWS would not say.
    """

    key: str
    instances: tuple[InstanceType, ...]
    task: TaskSize
    max_count: int
    zones: tuple[str, ...]
    spread: bool = False
    spot_count: int = 0
    ami_id: str = ""
    prices: Mapping[str, Price] | None = None

    @property
    def instance_types(self) -> tuple[str, ...]:
        """The types' names, such as g5.xlarge."""
        return tuple(each.name for each in self.instances)

    @property
    def on_demand_count(self) -> int:
        """How many of them are no spot instances."""
        return self.max_count - self.spot_count

    @property
    def moves(self) -> bool:
        """Whether a job that waits for workers may move them on to the next zone."""
        return len(self.zones) > 1 and not self.spread

    def __str__(self) -> str:
        on_spot = f" ({self.spot_count} on spot)" if self.spot_count else ""
        return f"{self.max_count} x {' or '.join(self.instance_types)}{on_spot}"


@dataclass(frozen=True, kw_only=True)
class AccountRules:
    """What the owners of an account ask of everything in it.

    Attributes:
        permissions_boundary: ARN of the policy that bounds every role, or nothing.
        role_path: The IAM path of every role.
        kms_key_arn: The key that everything stored is encrypted with, or nothing for AWS's own keys.
        task_policy_arns: ARNs of policies that the role of every task has, too.
        instance_policy_arns: The same for the role of every instance.
    """

    permissions_boundary: pulumi.Input[str] = ""
    role_path: str = "/"
    kms_key_arn: pulumi.Input[str] = ""
    task_policy_arns: Sequence[pulumi.Input[str]] = ()
    instance_policy_arns: Sequence[pulumi.Input[str]] = ()


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Number of GPU or CPU workers.

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
class Alerts:
    """Address for alarms and costs, or nothing, and the account's costs a month above which it gets mail."""

    email: str
    monthly_usd: int


@dataclass(frozen=True, kw_only=True)
class NetworkRef:
    """Where instances and tasks run; they start after `network` is complete, and are gone before any part of it."""

    subnets: Mapping[str, pulumi.Input[str]]
    tasks_group_id: pulumi.Output[str]
    instances_group_id: pulumi.Output[str]
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
