"""Where the stack runs: the region, a zone that offers the instance types, and an existing network if one is given.

The calls are plain ones, as their answers shape what is planned: awsx.ec2.Vpc takes no outputs for its zones.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

import pulumi
import pulumi_aws as aws

from infra.config.settings import Settings
from infra.errors import SettingError, error_reason
from infra.references import ExistingNetwork, Location
from infra.tags import SECURITY_GROUP, ZONE, ZONES, stack_tags

# How DHCP options name the resolver that each VPC has, and that knows its private names.
VPC_RESOLVERS = {"AmazonProvidedDNS", "169.254.169.253"}
# The ID that EC2 gives where a VPC has none.
NO_DHCP_OPTIONS = "default"
# The zones in which each instance type is offered.
Offerings = dict[str, set[str]]


@dataclass(frozen=True, kw_only=True)
class Remembered:
    """Where the stack is up: its VPC, the zone of its instances, and the zones with subnets if the VPC is its own."""

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
    settings: Settings, caller: Caller, at_present: Remembered | None, given: ExistingNetwork | None
) -> Location:
    """Ask AWS where the stack can run.

    Args:
        settings: The settings.
        caller: Who asks.
        at_present: Where it is up, or None.
        given: A network that the same program makes, which nobody can be asked about yet.

    Raises:
        SettingError: It can't run where it is told to, or can't move there.
        RunError: AWS can't be asked.
    """
    if at_present and not given:
        _check_network_stays(settings, at_present)
    region = caller.region
    existing = given or (get_existing_network(settings, region) if settings.vpc_id else None)
    remembered = (at_present.zone,) if at_present else ()
    wanted = (tuple(existing.subnets) if existing else settings.availability_zones) or remembered
    offered = offerings(settings, region, wanted)
    zones = tuple(common_zones(settings, offered, region)) if offered else wanted
    if existing:
        _check_subnets_zones(settings, existing, zones)
        return Location(**vars(caller), worker_zones=wanted, zones=zones, existing=existing)
    with_subnets = at_present.zones if at_present else zones
    chosen = choose_zones(settings, [each for each in with_subnets if each in zones], at_present, offered)
    return Location(**vars(caller), worker_zones=chosen, zones=with_subnets)


def remember(prefix: str) -> Remembered | None:
    """Ask EC2 for the security group of the cluster whose names begin with `prefix`: its tags say where that is.

    Returns:
        Where it is, or None where it is not up.

    Raises:
        RunError: EC2 can't be asked, or there are several such groups, or one without these tags.
    """
    try:
        found = aws.ec2.get_security_groups(tags=stack_tags())
        groups = [aws.ec2.get_security_group(id=each) for each in found.ids]
    except Exception as error:
        what = f"AWS can't be asked whether the stack is up (ec2:DescribeSecurityGroups: {error_reason(error)})"
        raise pulumi.RunError(f"aws:region: {what}; let the caller ask, or try again") from error
    groups = [each for each in groups if each.tags.get("Name") == f"{prefix}-network-{SECURITY_GROUP}"]
    name = f"{pulumi.get_project()}, {pulumi.get_stack()}"
    if len(groups) > 1:
        which = " and ".join(f"{each.id} in {each.vpc_id}" for each in groups)
        raise pulumi.RunError(
            f"stack: several stacks of this name ({name}) are up in this account and region, with the security groups "
            f"{which}; give each a name of its own, or delete what is left of a lost one"
        )
    if not groups:
        return None
    if ZONE not in groups[0].tags:
        raise pulumi.RunError(
            f"stack: its security group {groups[0].id} has no tag {ZONE!r} that says where it is; `pulumi destroy` "
            f"first, or tag it with {ZONE} and, for a VPC of its own, {ZONES}, with blanks between them"
        )
    tags = groups[0].tags
    return Remembered(vpc_id=groups[0].vpc_id, zone=tags[ZONE], zones=tuple(tags.get(ZONES, "").split()))


def _check_network_stays(settings: Settings, at_present: Remembered) -> None:
    """Refuse what would need another network: what runs in this one keeps it from being deleted, and its addresses."""
    is_own = bool(at_present.zones)
    hint = "change it back, or `pulumi destroy` first (or rename this stack, if another of its name is up there)"
    if settings.vpc_id != ("" if is_own else at_present.vpc_id):
        where = "a VPC of its own" if is_own else at_present.vpc_id
        raise SettingError("vpcId", settings.vpc_id, f"is another network than the stack's, {where}", hint)
    if is_own:
        try:
            cidr = aws.ec2.get_vpc(id=at_present.vpc_id).cidr_block
        except Exception as error:
            what = f"the stack's VPC {at_present.vpc_id} can't be looked up (ec2:DescribeVpcs: {error_reason(error)})"
            raise pulumi.RunError(f"vpcCidr: {what}; let the caller ask, or try again") from error
        if ipaddress.ip_network(cidr) != ipaddress.ip_network(settings.vpc_cidr):
            raise SettingError("vpcCidr", settings.vpc_cidr, f"is another network than the stack's, {cidr}", hint)


def ask_caller() -> Caller:
    """Ask the AWS provider who asks.

    This is the first question, and the one that fails without credentials.
    """
    try:
        return Caller(
            account=aws.get_caller_identity().account_id,
            region=aws.get_region().region,
            partition=aws.get_partition().partition,
        )
    except Exception as error:  # The SDK raises a bare Exception for whatever the provider answers.
        hint = "sign in, and set aws:region with `pulumi config set aws:region us-west-2`"
        raise pulumi.RunError(f"aws:region: AWS can't be asked ({error_reason(error)}); {hint}") from error


def offerings(settings: Settings, region: str, wanted: Sequence[str]) -> Offerings:
    """Ask EC2 in which zones of the region it offers the instance types.

    Where it doesn't tell, zones that are given are taken as they are: the answer is empty. Local and Wavelength Zones
    (us-west-2-lax-1a) are left out: they sort first, and lack NAT gateways or GPU capacity.
    """
    types = {name for names in _kinds(settings).values() for name in names}
    try:
        found = aws.ec2.get_instance_type_offerings(
            location_type="availability-zone", filters=[{"name": "instance-type", "values": sorted(types)}]
        )
    except Exception as error:
        what = f"EC2 in {region} does not tell which zones offer which types (ec2:DescribeInstanceTypeOfferings"
        if wanted:
            pulumi.log.warn(f"{what}: {error_reason(error)}); going on in {', '.join(wanted)}")
            return {}
        raise pulumi.RunError(f"{what}: {error_reason(error)}); set availabilityZone to one that does") from error
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
    settings: Settings, zones: Sequence[str], at_present: Remembered | None, offered: Offerings
) -> tuple[str, ...]:
    """Choose the zones: those of the setting, or that of the stack that is up, or for a new stack any.

    Args:
        settings: The settings.
        zones: Those to choose from.
        at_present: Where the stack is up, or None.
        offered: Where each type is offered.

    Raises:
        SettingError: One is none of `zones`.
    """
    others = f"give one of {', '.join(zones)}" if zones else "give another type, or `pulumi destroy` first"
    for asked_for in settings.availability_zones:
        if asked_for in zones:
            continue
        if at_present and asked_for not in at_present.zones:
            problem = f"is none of the zones that the stack has subnets in, {', '.join(at_present.zones)}"
            raise SettingError("availabilityZone", asked_for, problem, others)
        hint = f"{others}, or leave it empty to have one chosen"
        raise SettingError("availabilityZone", asked_for, f"does not offer {_types(settings)}", hint)
    if settings.availability_zones:
        return settings.availability_zones
    if at_present and at_present.zone not in zones:
        problem = f"is empty, and {at_present.zone}, where the stack is up, does not offer {_types(settings)}"
        raise SettingError("availabilityZone", "", problem, f"{others}, and the stack moves there" if zones else others)
    if at_present:
        return (at_present.zone,)
    most = max(_variety(settings, offered, zone) for zone in zones)
    return (_any_of([zone for zone in zones if _variety(settings, offered, zone) == most]),)


def _variety(settings: Settings, offered: Offerings, zone: str) -> int:
    """How many of the workers' types a zone offers."""
    return sum(zone in offered.get(name, ()) for name in settings.worker_instance_types)


def _any_of(zones: Sequence[str]) -> str:
    """Choose by the stack's name: the first in the alphabet is where everybody else is."""
    name = f"{pulumi.get_project()}-{pulumi.get_stack()}"
    return zones[int(hashlib.sha256(name.encode()).hexdigest(), 16) % len(zones)]


def get_existing_network(settings: Settings, region: str) -> ExistingNetwork:
    """Ask EC2 about an existing network; SettingError where it won't do."""
    _check_vpc(settings.vpc_id, region)
    subnets: dict[str, pulumi.Input[str]] = {}
    for subnet_id in settings.subnet_ids:
        zone = _subnets_zone(settings.vpc_id, subnet_id, region)
        if zone in subnets:
            problem = f"lies in {zone}, and so does {subnets[zone]}"
            raise SettingError("subnetId", subnet_id, problem, "give one subnet of each zone")
        subnets[zone] = subnet_id
    return ExistingNetwork(vpc_id=settings.vpc_id, subnets=subnets)


def _subnets_zone(vpc_id: str, subnet_id: str, region: str) -> str:
    try:
        subnet = aws.ec2.get_subnet(id=subnet_id)
    except Exception as error:
        raise _unknown("subnetId", subnet_id, region, error) from error
    if subnet.vpc_id != vpc_id:
        raise SettingError("subnetId", subnet_id, f"is part of {subnet.vpc_id}", f"give a subnet of {vpc_id}")
    if subnet.map_public_ip_on_launch:
        pulumi.log.warn(
            f"subnetId: {subnet_id} is meant for public addresses, which the stack's instances don't have; "
            "they reach AWS only if its route leads to a NAT gateway or to endpoints"
        )
    return subnet.availability_zone


def _check_vpc(vpc_id: str, region: str) -> None:
    """The workers find the head by a private DNS name, which answers only where the VPC has both DNS switches on."""
    try:
        vpc = aws.ec2.get_vpc(id=vpc_id)
    except Exception as error:
        raise _unknown("vpcId", vpc_id, region, error) from error
    if not (vpc.enable_dns_support and vpc.enable_dns_hostnames):
        problem = "has DNS support or DNS host names off, and workers could not find the head"
        command = f"aws ec2 modify-vpc-attribute --region {region} --vpc-id {vpc_id} --enable-dns-hostnames"
        raise SettingError("vpcId", vpc_id, problem, f"turn both on ({command}, and --enable-dns-support)")
    _warn_of_own_dns(vpc_id, vpc.dhcp_options_id)


def _warn_of_own_dns(vpc_id: str, dhcp_options_id: str) -> None:
    """The head's name is answered by the VPC's resolver, which a company's own DNS servers may pass questions on to."""
    if dhcp_options_id == NO_DHCP_OPTIONS:
        return
    try:
        servers = aws.ec2.get_vpc_dhcp_options(dhcp_options_id=dhcp_options_id).domain_name_servers
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
            raise SettingError("subnetId", which, problem, f"give a subnet in one of {', '.join(zones)}")
    if settings.availability_zones not in ((), tuple(existing.subnets)):
        problem = f"does not fit the given subnets, which are in {', '.join(existing.subnets)}"
        hint = "give their zones in their order, or leave it empty"
        raise SettingError("availabilityZone", ",".join(settings.availability_zones), problem, hint)


def _kinds(settings: Settings) -> dict[str, tuple[str, ...]]:
    """The instance types of each kind of node, by their keys."""
    helpers = {"helperInstanceType": settings.helper_instance_types} if settings.helper_instance_types else {}
    return {
        "headInstanceType": (settings.head_instance_type,),
        "workerInstanceType": settings.worker_instance_types,
        **helpers,
    }


def _types(settings: Settings) -> str:
    return " and ".join(sorted({" or ".join(names) for names in _kinds(settings).values()}))


def _unknown(key: str, value: str, region: str, error: Exception) -> SettingError:
    return SettingError(
        key, value, f"could not be looked up in {region} ({error_reason(error)})", "give one of this region"
    )
