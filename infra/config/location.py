"""Region and availability zones of a stack.

The calls return plain values instead of Outputs, since awsx.ec2.Vpc takes no Output for its zones.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pulumi
import pulumi_aws as aws

from infra.config.lookups import existing_network
from infra.config.settings import Settings
from infra.errors import SettingError, error_reason
from infra.tags import CLUSTER_TAG, PROJECT_TAG, STACK_TAG, TASKS_GROUP, ZONE_TAG, ZONES_TAG
from infra.types import ExistingNetwork, Location

# https://www.pulumi.com/registry/packages/aws/installation-configuration/
ALLOWED = "aws:allowedAccountIds"
# Availability zones by instance type.
Offerings = dict[str, set[str]]


@dataclass(frozen=True, kw_only=True)
class Remembered:
    """Deployed stack, from the tags of its security group.

    Attributes:
        group_id: ID of the tasks' security group.
        stack: Name of the stack at its last `pulumi up`.
        cluster: Name of the ECS cluster.
        zone: Availability zone of the head.
        zones: Availability zones of the VPC's subnets, in awsx's order; empty for an existing VPC.
    """

    group_id: str
    stack: str
    cluster: str
    vpc_id: str
    zone: str
    zones: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Account, region and partition (e.g. aws-us-gov) of the AWS provider."""

    account: str
    region: str
    partition: str


def locate(
    settings: Settings,
    caller: Caller,
    up: Remembered | None,
    network: ExistingNetwork | None,
    others: Sequence[Remembered] = (),
    opts: pulumi.InvokeOptions | None = None,
) -> Location:
    """Choose the availability zones.

    Args:
        settings: The validated settings.
        caller: Account, region and partition.
        up: The deployed stack, None before the first `pulumi up`.
        network: Network that the same program creates, so EC2 does not know it yet.
        others: Other stacks in this account and region.
        opts: AWS provider for the calls.

    Raises:
        SettingError: The stack can't run in the settings' zones, or can't move there.
        RunError: AWS can't be called.
    """
    if up and not network:
        _check_network_stays(settings, up, opts)
    region = caller.region
    existing = network
    if settings.vpc_id and not network:
        existing = existing_network(settings, caller, opts)
    before = up or _renamed(others)
    preferred = tuple(existing.subnets) if existing else settings.availability_zones
    if before and not preferred:
        preferred = (before.zone,)
    offered = offerings(settings, region, preferred, opts)
    zones = tuple(common_zones(settings, offered, region)) if offered else preferred
    if existing:
        _check_subnets_zones(settings, existing, zones)
        return Location(**vars(caller), worker_zones=preferred, zones=zones, existing=existing)
    if not up and before and not {before.zone, *settings.availability_zones} <= {*zones} & {*before.zones}:
        before = None  # a new stack, which requires other zones than the existing stacks
    subnets = before.zones if before else zones
    usable = [zone for zone in subnets if zone in zones]
    chosen = choose_zones(settings, usable, before, offered, caller.account)
    # awsx puts the single NAT gateway into the first zone, and numbers the subnets in this order: it must not change
    # once they exist.
    ordered = subnets if before else (chosen[0], *(zone for zone in subnets if zone != chosen[0]))
    return Location(**vars(caller), worker_zones=chosen, zones=ordered)


def remember(prefix: str, opts: pulumi.InvokeOptions | None = None) -> tuple[Remembered | None, list[Remembered]]:
    """Find deployed stacks by the tags of their security groups.

    Returns:
        This stack, None if it is not up; and the other stacks with clusters of this name.

    Raises:
        RunError: EC2 can't be called, two stacks have this name, or this stack's group lacks the tags.
    """
    suffix = f"-{prefix}-{TASKS_GROUP}"
    filters = [
        aws.ec2.GetSecurityGroupsFilterArgs(name="tag-key", values=[CLUSTER_TAG]),
        aws.ec2.GetSecurityGroupsFilterArgs(name="tag:Name", values=[f"*{suffix}"]),
    ]
    try:
        ids = aws.ec2.get_security_groups(filters=filters, opts=opts).ids
        groups = [aws.ec2.get_security_group(id=group_id, opts=opts) for group_id in ids]
    except Exception as error:
        raise pulumi.RunError(
            "aws:region: the stack's security group could not be looked up (ec2:DescribeSecurityGroups: "
            f"{error_reason(error)}); grant the caller that action, or try again"
        ) from error
    # The wildcard also matches clusters whose names only end in this one's.
    groups = [group for group in groups if group.tags.get("Name") == f"{group.tags.get(STACK_TAG)}{suffix}"]
    name = (pulumi.get_project(), pulumi.get_stack())
    own = [group for group in groups if (group.tags.get(PROJECT_TAG), group.tags[STACK_TAG]) == name]
    if len(own) > 1:
        duplicates = " and ".join(f"{group.id} in {group.vpc_id}" for group in own)
        raise pulumi.RunError(
            f"stack: two stacks named {pulumi.get_stack()} are up in this account and region, with the security groups "
            f"{duplicates}; `pulumi destroy` one of them, or delete orphaned resources (docs/updates.md)"
        )
    for group in own:
        if ZONE_TAG not in group.tags:
            raise pulumi.RunError(
                f"stack: security group {group.id} lacks the tag {ZONE_TAG}, from which the stack's zone is read; "
                "restore it, or `pulumi destroy` first"
            )
    others = [group for group in groups if group not in own and ZONE_TAG in group.tags]
    return (_remembered(own[0]) if own else None), [_remembered(group) for group in others]


def _remembered(group: aws.ec2.GetSecurityGroupResult) -> Remembered:
    tags = group.tags
    return Remembered(
        group_id=group.id,
        stack=tags[STACK_TAG],
        cluster=tags[CLUSTER_TAG],
        vpc_id=group.vpc_id,
        zone=tags[ZONE_TAG],
        zones=tuple(tags.get(ZONES_TAG, "").split()),
    )


def _renamed(others: Sequence[Remembered]) -> Remembered | None:
    """Zones of the other stacks with a created VPC, if all have the same.

    After `pulumi stack rename` the tags still have the old name: one of the others is this stack, and must keep its
    zones. A new stack can use them as well. If the others differ, check_state refuses to move a renamed stack.
    """
    places = {(stack.zone, stack.zones): stack for stack in others if stack.zones}
    return next(iter(places.values())) if len(places) == 1 else None


def _check_network_stays(settings: Settings, up: Remembered, opts: pulumi.InvokeOptions | None) -> None:
    """Refuse another VPC or CIDR block: both would replace a network that EC2 can't delete while instances use it."""
    is_own = bool(up.zones)
    hint = "change it back, or `pulumi destroy` first"
    if settings.vpc_id != ("" if is_own else up.vpc_id):
        network = "the VPC that it created" if is_own else up.vpc_id
        raise SettingError("vpcId", settings.vpc_id, f"differs from the stack's network, {network}", hint)
    if is_own:
        try:
            cidr = aws.ec2.get_vpc(id=up.vpc_id, opts=opts).cidr_block
        except Exception as error:
            raise pulumi.RunError(
                f"vpcCidr: the stack's VPC {up.vpc_id} could not be looked up (ec2:DescribeVpcs: "
                f"{error_reason(error)}); grant the caller that action, or try again"
            ) from error
        if ipaddress.ip_network(cidr) != ipaddress.ip_network(settings.vpc_cidr):
            raise SettingError("vpcCidr", settings.vpc_cidr, f"differs from the stack's network, {cidr}", hint)


def ask_caller(opts: pulumi.InvokeOptions | None = None) -> Caller:
    """Account, region and partition of the AWS provider: the first call, which fails without credentials.

    Raises:
        RunError: AWS can't be called, or refuses the account (aws:allowedAccountIds).
    """
    try:
        caller = Caller(
            account=aws.get_caller_identity(opts=opts).account_id,
            region=aws.get_region(opts=opts).region,
            partition=aws.get_partition(opts=opts).partition,
        )
    except Exception as error:  # The SDK raises a bare Exception for every error of the provider.
        refused = re.search(r"account ID not allowed: (\d{12})", str(error), re.I)
        if refused:
            raise wrong_account(refused[1], " or ".join(_allowed_accounts()) or "another") from error
        hint = (
            "sign in, and set the region with `pulumi config set aws:region us-west-2`; enable an opt-in region with "
            "`aws account enable-region --region-name REGION`"
        )
        raise pulumi.RunError(f"aws:region: AWS could not be called ({error_reason(error)}); {hint}") from error
    if not caller.account:  # in a preview, Pulumi answers so for a provider with unknown configuration
        problem = "the AWS provider's configuration must be known while Pulumi plans, and depends on other resources"
        raise pulumi.RunError(f"provider: {problem}; use plain values")
    return caller


def check_account(account: str) -> None:
    """Compare the account with aws:allowedAccountIds; warn if that is not set.

    Raises:
        RunError: The account is not allowed.
    """
    allowed = _allowed_accounts()
    if not allowed:
        pulumi.log.warn(
            f"{ALLOWED}: is not set; with another account's credentials `pulumi up` would create a second stack there "
            f"and lose track of this one. Set it: `pulumi config set --path '{ALLOWED}[0]' {account}`"
        )
    elif account not in allowed:
        raise wrong_account(account, " or ".join(allowed))


def wrong_account(account: str, expected: str) -> pulumi.RunError:
    """Error for credentials of another account than the stack's."""
    return pulumi.RunError(
        f"{ALLOWED}: the stack is in account {expected}, and these credentials are of {account}; choose others with "
        "AWS_PROFILE or `pulumi config set aws:profile NAME`"
    )


def _allowed_accounts() -> list[str]:
    """Account IDs of aws:allowedAccountIds; `pulumi config set --path` stores them as numbers.

    Raises:
        RunError: The value is not a list.
    """
    text = pulumi.Config("aws").get("allowedAccountIds") or "[]"
    try:
        accounts = json.loads(text)
    except ValueError:
        accounts = None
    if not isinstance(accounts, list):
        raise pulumi.RunError(
            f"{ALLOWED}: {text} is not a list; `pulumi config rm {ALLOWED}`, then `pulumi config set --path "
            f"'{ALLOWED}[0]' {text}`"
        )
    return [str(account).zfill(12) for account in accounts]


def offerings(
    settings: Settings, region: str, preferred: Sequence[str], opts: pulumi.InvokeOptions | None = None
) -> Offerings:
    """Availability zones of the region by instance type.

    If EC2 denies the call, the result is empty, and zones in `preferred` are taken unchecked. Local and Wavelength
    Zones (us-west-2-lax-1a) are left out: they sort first, and lack NAT gateways or GPU capacity.
    """
    types = {name for names in _kinds(settings).values() for name in names}
    try:
        offered = aws.ec2.get_instance_type_offerings(
            location_type="availability-zone",
            filters=[{"name": "instance-type", "values": sorted(types)}],
            opts=opts,
        )
    except Exception as error:
        problem = (
            f"instance type offerings of {region} could not be read (ec2:DescribeInstanceTypeOfferings: "
            f"{error_reason(error)})"
        )
        if preferred:
            pulumi.log.warn(f"{problem}; continuing in {', '.join(preferred)}")
            return {}
        raise pulumi.RunError(f"{problem}; set availabilityZones to a zone that offers the types") from error
    zones: Offerings = {name: set() for name in types}
    for name, zone in zip(offered.instance_types, offered.locations, strict=True):
        if re.fullmatch(f"{region}[a-z]", zone):
            zones[name].add(zone)
    return zones


def common_zones(settings: Settings, offered: Offerings, region: str) -> list[str]:
    """Zones that offer at least one type of every kind of node; SettingError if there are none."""
    common: set[str] | None = None
    others: list[str] = []
    for key, names in _kinds(settings).items():
        zones = {zone for name in names for zone in offered[name]}
        if not zones:
            problem = f"is not offered in {region}"
            raise SettingError(key, ",".join(names), problem, "use another type or another region")
        common = zones if common is None else common & zones
        if not common:
            problem = f"is not offered together with {' and '.join(others)} in any zone of {region}"
            raise SettingError(key, ",".join(names), problem, "use another type or another region")
        others.append(" or ".join(names))
    return sorted(common or ())


def choose_zones(
    settings: Settings, zones: Sequence[str], up: Remembered | None, offered: Offerings, account: str
) -> tuple[str, ...]:
    """Zones of the workers: availabilityZones, else the deployed stack's zone, else one of `zones`.

    Args:
        settings: The validated settings.
        zones: Zones with subnets that offer all instance types.
        up: The deployed stack, None before the first `pulumi up`.
        offered: Zones by instance type.
        account: Account ID, from which a new stack's zone is derived.

    Raises:
        SettingError: A zone is not one of `zones`.
    """
    hint = f"use one of {', '.join(zones)}" if zones else "use another type, or `pulumi destroy` first"
    for zone in settings.availability_zones:
        if zone in zones:
            continue
        if up and zone not in up.zones:
            problem = f"is not one of the zones of the stack's subnets, {', '.join(up.zones)}"
            raise SettingError("availabilityZones", zone, problem, hint)
        problem = f"does not offer {_types(settings)}"
        raise SettingError("availabilityZones", zone, problem, f"{hint}, or leave it empty to have one chosen")
    if settings.availability_zones:
        return settings.availability_zones
    if up and up.zone not in zones:
        problem = f"is empty, and the stack's zone {up.zone} does not offer {_types(settings)}"
        if zones:
            hint += ", and the stack moves there"
        raise SettingError("availabilityZones", "", problem, hint)
    if up:
        return (up.zone,)
    # More types in a zone mean more capacity pools, for on-demand and spot alike.
    types_offered = [offered.get(name, set()) for name in settings.worker_instance_types]
    variety = Counter(zone for type_zones in types_offered for zone in type_zones)
    most_types = max(variety[zone] for zone in zones)
    best = [zone for zone in zones if variety[zone] == most_types]
    # By a hash of the account, since most AWS customers use the first zone of the alphabet. The stack's name, which can
    # change, is not in the hash; a zone that AWS adds moves few accounts.
    return (max(best, key=lambda zone: hashlib.sha256(f"{account}{zone}".encode()).digest()),)


def _check_subnets_zones(settings: Settings, existing: ExistingNetwork, zones: Sequence[str]) -> None:
    for zone, subnet_id in existing.subnets.items():
        if zone not in zones:
            problem = f"is in {zone}, which does not offer {_types(settings)}"
            value = subnet_id if isinstance(subnet_id, str) else zone
            raise SettingError("subnetIds", value, problem, f"use a subnet in one of {', '.join(zones)}")
    if settings.availability_zones not in ((), tuple(existing.subnets)):
        problem = f"must be the zones of subnetIds, {', '.join(existing.subnets)}"
        hint = "use their zones in the same order, or leave it empty"
        raise SettingError("availabilityZones", ",".join(settings.availability_zones), problem, hint)


def _kinds(settings: Settings) -> dict[str, tuple[str, ...]]:
    """Instance types of each kind of node, by configuration key."""
    kinds = {"headInstanceType": (settings.head_instance_type,), "workerInstanceTypes": settings.worker_instance_types}
    if settings.cpu_worker_instance_types:
        kinds["cpuWorkerInstanceTypes"] = settings.cpu_worker_instance_types
    return kinds


def _types(settings: Settings) -> str:
    """Instance types of all kinds of nodes, for messages."""
    return " and ".join(sorted({" or ".join(names) for names in _kinds(settings).values()}))
