"""Where the stack runs: the region, a zone that offers the instance types, and an existing network if one is given.

The calls are plain ones, as their answers shape what is planned: awsx.ec2.Vpc takes no outputs for its zones.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

import pulumi
import pulumi_aws as aws

from infra.config.settings import Settings
from infra.config.validation import DOCKER_BRIDGE
from infra.errors import SettingError, error_reason
from infra.references import ExistingNetwork, Location
from infra.tags import CLUSTER_TAG, PROJECT_TAG, STACK_TAG, TASKS_GROUP, ZONE_TAG, ZONES_TAG

# https://www.pulumi.com/registry/packages/aws/installation-configuration/
ALLOWED = "aws:allowedAccountIds"
# How DHCP options name the resolver that each VPC has, and that knows its private names.
VPC_RESOLVERS = {"AmazonProvidedDNS", "169.254.169.253"}
# The ID that EC2 gives where a VPC has none.
NO_DHCP_OPTIONS = "default"
# The zones in which each instance type is offered.
Offerings = dict[str, set[str]]


@dataclass(frozen=True, kw_only=True)
class Remembered:
    """A stack that is up, by the tags of its security group.

    Attributes:
        group_id: The security group.
        stack: The stack's name at its last `pulumi up`.
        cluster: The ECS cluster.
        vpc_id: The VPC.
        zone: The zone of its instances.
        zones: The zones in which the VPC has subnets, if the VPC is the stack's own.
    """

    group_id: str
    stack: str
    cluster: str
    vpc_id: str
    zone: str
    zones: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Whose credentials these are, and what they lead to: account, region, and its partition, such as aws-us-gov."""

    account: str
    region: str
    partition: str


def locate(
    settings: Settings,
    caller: Caller,
    up: Remembered | None,
    given: ExistingNetwork | None,
    others: Sequence[Remembered] = (),
    opts: pulumi.InvokeOptions | None = None,
) -> Location:
    """Ask AWS where the stack can run.

    Args:
        settings: The settings.
        caller: Account, region and partition.
        up: The stack as it is up, or None.
        given: A network of the same program, which does not exist yet.
        others: The other stacks in this account and region.
        opts: The provider to ask.

    Raises:
        SettingError: It can't run where the settings say, or can't move there.
        RunError: AWS can't be asked.
    """
    if up and not given:
        _check_network_stays(settings, up, opts)
    region = caller.region
    existing = given or (get_existing_network(settings, caller, opts) if settings.vpc_id else None)
    before = up or _renamed(others)
    stays = (before.zone,) if before else ()
    wanted = (tuple(existing.subnets) if existing else settings.availability_zones) or stays
    offered = offerings(settings, region, wanted, opts)
    zones = tuple(common_zones(settings, offered, region)) if offered else wanted
    if existing:
        _check_subnets_zones(settings, existing, zones)
        return Location(**vars(caller), worker_zones=wanted, zones=zones, existing=existing)
    if not up and before and not {before.zone, *settings.availability_zones} <= {*zones} & {*before.zones}:
        before = None  # this is a new stack, which needs other zones than the others
    subnets = before.zones if before else zones
    usable = [each for each in subnets if each in zones]
    chosen = choose_zones(settings, usable, before, offered, caller.account)
    # awsx puts the NAT gateway into the first zone. Later the order stays: by it awsx numbers the subnets.
    ordered = subnets if before else (chosen[0], *(each for each in subnets if each != chosen[0]))
    return Location(**vars(caller), worker_zones=chosen, zones=ordered)


def remember(prefix: str, opts: pulumi.InvokeOptions | None = None) -> tuple[Remembered | None, list[Remembered]]:
    """Ask EC2 for the security groups of all clusters with these names; their tags say where they are.

    Returns:
        This stack if it is up, and the other stacks.

    Raises:
        RunError: EC2 can't be asked, two stacks have this name, or the group of this one lacks the tags.
    """
    suffix = f"-{prefix}-{TASKS_GROUP}"
    filters = [
        aws.ec2.GetSecurityGroupsFilterArgs(name="tag-key", values=[CLUSTER_TAG]),
        aws.ec2.GetSecurityGroupsFilterArgs(name="tag:Name", values=[f"*{suffix}"]),
    ]
    try:
        found = aws.ec2.get_security_groups(filters=filters, opts=opts)
        groups = [aws.ec2.get_security_group(id=each, opts=opts) for each in found.ids]
    except Exception as error:
        what = f"AWS can't be asked whether the stack is up (ec2:DescribeSecurityGroups: {error_reason(error)})"
        raise pulumi.RunError(f"aws:region: {what}; let the caller ask, or try again") from error
    # The pattern also finds a cluster whose name only ends like this one's.
    groups = [each for each in groups if each.tags.get("Name") == f"{each.tags.get(STACK_TAG)}{suffix}"]
    name = (pulumi.get_project(), pulumi.get_stack())
    own = [each for each in groups if (each.tags.get(PROJECT_TAG), each.tags[STACK_TAG]) == name]
    if len(own) > 1:
        which = " and ".join(f"{each.id} in {each.vpc_id}" for each in own)
        raise pulumi.RunError(
            f"stack: two stacks of the name {pulumi.get_stack()} are up in this account and region, with the security "
            f"groups {which}; `pulumi destroy` one of them, or delete what is left of a lost one (docs/updates.md)"
        )
    for each in own:
        if ZONE_TAG not in each.tags:
            raise pulumi.RunError(
                f"stack: its security group {each.id} lacks the tag {ZONE_TAG}, which says where it is; restore it, or "
                "`pulumi destroy` first"
            )
    others = [each for each in groups if each not in own and ZONE_TAG in each.tags]
    return (_remembered(own[0]) if own else None), [_remembered(each) for each in others]


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
    """The place of the other stacks with a VPC of theirs, if it is the same for all.

    After `pulumi stack rename` the tags still have the old name: one of the others is this stack, and has to stay where
    it is. A new stack can be there as well. Where the others differ, check_state refuses to move a renamed stack.
    """
    places = {(each.zone, each.zones): each for each in others if each.zones}
    return next(iter(places.values())) if len(places) == 1 else None


def _check_network_stays(settings: Settings, at_present: Remembered, opts: pulumi.InvokeOptions | None) -> None:
    """Refuse what would need another network: what runs in this one keeps it from being deleted, and its addresses."""
    is_own = bool(at_present.zones)
    hint = "change it back, or `pulumi destroy` first"
    if settings.vpc_id != ("" if is_own else at_present.vpc_id):
        where = "a VPC of its own" if is_own else at_present.vpc_id
        raise SettingError("vpcId", settings.vpc_id, f"is another network than the stack's, {where}", hint)
    if is_own:
        try:
            cidr = aws.ec2.get_vpc(id=at_present.vpc_id, opts=opts).cidr_block
        except Exception as error:
            what = f"the stack's VPC {at_present.vpc_id} can't be looked up (ec2:DescribeVpcs: {error_reason(error)})"
            raise pulumi.RunError(f"vpcCidr: {what}; let the caller ask, or try again") from error
        if ipaddress.ip_network(cidr) != ipaddress.ip_network(settings.vpc_cidr):
            raise SettingError("vpcCidr", settings.vpc_cidr, f"is another network than the stack's, {cidr}", hint)


def ask_caller(opts: pulumi.InvokeOptions | None = None) -> Caller:
    """Ask the AWS provider who asks.

    This is the first question, and the one that fails without credentials.

    Raises:
        RunError: AWS can't be asked, or the credentials are of an account that the stack is not in.
    """
    try:
        caller = Caller(
            account=aws.get_caller_identity(opts=opts).account_id,
            region=aws.get_region(opts=opts).region,
            partition=aws.get_partition(opts=opts).partition,
        )
    except Exception as error:  # The SDK raises a bare Exception for whatever the provider answers.
        if refused := re.search(r"account ID not allowed: (\d{12})", str(error), re.I):
            raise wrong_account(refused[1], " or ".join(_allowed_accounts()) or "another") from error
        hint = (
            "sign in, and set aws:region with `pulumi config set aws:region us-west-2`; a region that the account has "
            "not enabled needs `aws account enable-region --region-name REGION`"
        )
        raise pulumi.RunError(f"aws:region: AWS can't be asked ({error_reason(error)}); {hint}") from error
    if not caller.account:  # Pulumi's answer in a preview
        problem = "the AWS provider has a configuration that is known only once `pulumi up` has made other resources"
        raise pulumi.RunError(f"provider: {problem}, and AWS is asked before that; give it plain values")
    return caller


def check_account(account: str) -> None:
    """Refuse credentials of another account than aws:allowedAccountIds; warn where that is not set.

    Raises:
        RunError: The account is not one of them.
    """
    allowed = _allowed_accounts()
    if not allowed:
        pulumi.log.warn(
            f"{ALLOWED}: is not set; with another account's credentials `pulumi up` would make a second stack there "
            f"and lose track of this one. Set it: `pulumi config set --path '{ALLOWED}[0]' {account}`"
        )
    elif account not in allowed:
        raise wrong_account(account, " or ".join(allowed))


def wrong_account(account: str, right: str) -> pulumi.RunError:
    """Error for credentials of an account that the stack is not in."""
    return pulumi.RunError(
        f"{ALLOWED}: the stack is in account {right}, and these credentials are of {account}; choose others with "
        "AWS_PROFILE or `pulumi config set aws:profile NAME`"
    )


def _allowed_accounts() -> list[str]:
    """The list, in which `pulumi config set --path` makes numbers of account IDs.

    Raises:
        RunError: It is not a list.
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
    return [str(each).zfill(12) for each in accounts]


def offerings(
    settings: Settings, region: str, wanted: Sequence[str], opts: pulumi.InvokeOptions | None = None
) -> Offerings:
    """Ask EC2 in which zones of the region it offers the instance types.

    Where it doesn't tell, zones that are given are taken as they are: the answer is empty. Local and Wavelength Zones
    (us-west-2-lax-1a) are left out: they sort first, and lack NAT gateways or GPU capacity.
    """
    types = {name for names in _kinds(settings).values() for name in names}
    try:
        found = aws.ec2.get_instance_type_offerings(
            location_type="availability-zone",
            filters=[{"name": "instance-type", "values": sorted(types)}],
            opts=opts,
        )
    except Exception as error:
        what = f"EC2 in {region} does not tell which zones offer which types (ec2:DescribeInstanceTypeOfferings"
        if wanted:
            pulumi.log.warn(f"{what}: {error_reason(error)}); going on in {', '.join(wanted)}")
            return {}
        raise pulumi.RunError(f"{what}: {error_reason(error)}); set availabilityZones to one that does") from error
    zones: Offerings = {name: set() for name in types}
    for name, zone in zip(found.instance_types, found.locations, strict=True):
        if re.fullmatch(f"{region}[a-z]", zone):
            zones[name].add(zone)
    return zones


def common_zones(settings: Settings, offered: Offerings, region: str) -> list[str]:
    """The zones that offer a type of each kind of node, of which there is at least one; SettingError otherwise."""
    found: list[set[str]] = []
    others: list[str] = []
    for key, names in _kinds(settings).items():
        of_kind = {zone for name in names for zone in offered[name]}
        if not of_kind:
            raise SettingError(
                key, ",".join(names), f"is not offered in {region}", "give another type or another region"
            )
        found.append(of_kind)
        if not set.intersection(*found):
            problem = f"is not offered together with {' and '.join(others)} in any zone of {region}"
            raise SettingError(key, ",".join(names), problem, "give another type or another region")
        others.append(" or ".join(names))
    return sorted(set.intersection(*found))


def choose_zones(
    settings: Settings, zones: Sequence[str], at_present: Remembered | None, offered: Offerings, account: str
) -> tuple[str, ...]:
    """Choose the zones: those of the setting, or that of the stack that is up, or for a new stack any.

    Args:
        settings: The settings.
        zones: Those to choose from.
        at_present: Where the stack is up, or None.
        offered: Where each type is offered.
        account: The account, by which a new stack's zone is chosen.

    Raises:
        SettingError: One is none of `zones`.
    """
    others = f"give one of {', '.join(zones)}" if zones else "give another type, or `pulumi destroy` first"
    for asked_for in settings.availability_zones:
        if asked_for in zones:
            continue
        if at_present and asked_for not in at_present.zones:
            problem = f"is none of the zones that the stack has subnets in, {', '.join(at_present.zones)}"
            raise SettingError("availabilityZones", asked_for, problem, others)
        hint = f"{others}, or leave it empty to have one chosen"
        raise SettingError("availabilityZones", asked_for, f"does not offer {_types(settings)}", hint)
    if settings.availability_zones:
        return settings.availability_zones
    if at_present and at_present.zone not in zones:
        problem = f"is empty, and {at_present.zone}, where the stack is up, does not offer {_types(settings)}"
        raise SettingError(
            "availabilityZones", "", problem, f"{others}, and the stack moves there" if zones else others
        )
    if at_present:
        return (at_present.zone,)
    most = max(_variety(settings, offered, zone) for zone in zones)
    return (_any_of([zone for zone in zones if _variety(settings, offered, zone) == most], account),)


def _variety(settings: Settings, offered: Offerings, zone: str) -> int:
    """How many of the workers' types a zone offers."""
    return sum(zone in offered.get(name, ()) for name in settings.worker_instance_types)


def _any_of(zones: Sequence[str], account: str) -> str:
    """Choose by the account's ID, since most of AWS's customers are in the first of the alphabet.

    The stack's name plays no part: it can change. Nor does the number of zones: one that is added moves few accounts.
    """
    return max(zones, key=lambda zone: hashlib.sha256(f"{account}{zone}".encode()).digest())


def get_existing_network(
    settings: Settings, caller: Caller, opts: pulumi.InvokeOptions | None = None
) -> ExistingNetwork:
    """Ask EC2 about an existing network; SettingError where it won't do."""
    _check_vpc(settings.vpc_id, caller, opts)
    subnets: dict[str, pulumi.Input[str]] = {}
    for subnet_id in settings.subnet_ids:
        zone = _subnets_zone(settings.vpc_id, subnet_id, caller.region, opts)
        if zone in subnets:
            problem = f"lies in {zone}, and so does {subnets[zone]}"
            raise SettingError("subnetIds", subnet_id, problem, "give one subnet of each zone")
        subnets[zone] = subnet_id
    return ExistingNetwork(vpc_id=settings.vpc_id, subnets=subnets)


def _subnets_zone(vpc_id: str, subnet_id: str, region: str, opts: pulumi.InvokeOptions | None) -> str:
    try:
        subnet = aws.ec2.get_subnet(id=subnet_id, opts=opts)
    except Exception as error:
        raise _unknown("subnetIds", subnet_id, region, error) from error
    if subnet.vpc_id != vpc_id:
        raise SettingError("subnetIds", subnet_id, f"is part of {subnet.vpc_id}", f"give a subnet of {vpc_id}")
    if subnet.map_public_ip_on_launch:
        pulumi.log.warn(
            f"subnetIds: {subnet_id} is meant for public addresses, which the stack's instances don't have; "
            "they reach AWS only if its route leads to a NAT gateway or to endpoints"
        )
    _warn_of_no_route(subnet_id, opts)
    return subnet.availability_zone


def _warn_of_no_route(subnet_id: str, opts: pulumi.InvokeOptions | None) -> None:
    """Point out a subnet whose route table leads nowhere: without endpoints its instances never join the cluster."""
    try:
        routes = aws.ec2.get_route_table(subnet_id=subnet_id, opts=opts).routes
    except Exception:  # also a subnet that has the VPC's main table, which goes by no association
        return
    if not any(each.cidr_block == "0.0.0.0/0" for each in routes):
        pulumi.log.warn(
            f"subnetIds: {subnet_id} has no route to the internet (0.0.0.0/0); instances join the cluster only if its "
            "VPC has endpoints for the services that they call (docs/accounts.md)"
        )


def _check_vpc(vpc_id: str, caller: Caller, opts: pulumi.InvokeOptions | None) -> None:
    """Workers find the head by a private DNS name: only the VPC's owner can add it, and both DNS switches must be on.

    https://docs.aws.amazon.com/Route53/latest/DeveloperGuide/hosted-zone-private-considerations.html
    """
    region = caller.region
    try:
        vpc = aws.ec2.get_vpc(id=vpc_id, opts=opts)
    except Exception as error:
        raise _unknown("vpcId", vpc_id, region, error) from error
    if vpc.owner_id != caller.account:
        problem = f"belongs to account {vpc.owner_id} and is shared with this one, which can't give it a DNS name"
        raise SettingError("vpcId", vpc_id, problem, "give a VPC of this account, or none for one of the stack's own")
    if not (vpc.enable_dns_support and vpc.enable_dns_hostnames):
        problem = "has DNS support or DNS host names off, and workers could not find the head"
        command = f"aws ec2 modify-vpc-attribute --region {region} --vpc-id {vpc_id} --enable-dns-hostnames"
        raise SettingError("vpcId", vpc_id, problem, f"turn both on ({command}, and --enable-dns-support)")
    if ipaddress.ip_network(vpc.cidr_block).overlaps(DOCKER_BRIDGE):
        pulumi.log.warn(
            f"vpcId: {vpc_id} ({vpc.cidr_block}) overlaps Docker's bridge {DOCKER_BRIDGE} on every instance, which "
            "can't reach these addresses"
        )
    _warn_of_own_dns(vpc_id, vpc.dhcp_options_id, opts)


def _warn_of_own_dns(vpc_id: str, dhcp_options_id: str, opts: pulumi.InvokeOptions | None) -> None:
    """The head's name is answered by the VPC's resolver, which a company's own DNS servers may pass questions on to."""
    if dhcp_options_id == NO_DHCP_OPTIONS:
        return
    try:
        servers = aws.ec2.get_vpc_dhcp_options(dhcp_options_id=dhcp_options_id, opts=opts).domain_name_servers
    except Exception as error:
        pulumi.log.warn(f"vpcId: the DNS servers of {vpc_id} can't be asked for ({error_reason(error)}); going on")
        return
    if servers and not VPC_RESOLVERS & set(servers):
        pulumi.log.warn(
            f"vpcId: {vpc_id} asks DNS servers of its own ({', '.join(servers)}); workers find the head only if these "
            "pass questions for *.internal on to the VPC's resolver"
        )


def _check_subnets_zones(settings: Settings, existing: ExistingNetwork, zones: Sequence[str]) -> None:
    for zone, subnet_id in existing.subnets.items():
        if zone not in zones:
            problem = f"lies in {zone}, which does not offer {_types(settings)}"
            which = subnet_id if isinstance(subnet_id, str) else zone
            raise SettingError("subnetIds", which, problem, f"give a subnet in one of {', '.join(zones)}")
    if settings.availability_zones not in ((), tuple(existing.subnets)):
        problem = f"does not fit the given subnets, which are in {', '.join(existing.subnets)}"
        hint = "give their zones in their order, or leave it empty"
        raise SettingError("availabilityZones", ",".join(settings.availability_zones), problem, hint)


def _kinds(settings: Settings) -> dict[str, tuple[str, ...]]:
    """The instance types of each kind of node, by their keys."""
    cpu_types = settings.cpu_worker_instance_types
    return {
        "headInstanceType": (settings.head_instance_type,),
        "workerInstanceTypes": settings.worker_instance_types,
        **({"cpuWorkerInstanceTypes": cpu_types} if cpu_types else {}),
    }


def _types(settings: Settings) -> str:
    return " and ".join(sorted({" or ".join(names) for names in _kinds(settings).values()}))


def _unknown(key: str, value: str, region: str, error: Exception) -> SettingError:
    return SettingError(
        key, value, f"could not be looked up in {region} ({error_reason(error)})", "give one of this region"
    )
