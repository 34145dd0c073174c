"""Temporary."""

from __future__ import annotations

import ipaddress

import pulumi
import pulumi_aws as aws

from infra.config import account
from infra.config.args import RayClusterArgs
from infra.config.location import Caller
from infra.config.rules import DOCKER_BRIDGE
from infra.errors import SettingError, error_reason
from infra.types import ExistingNetwork

VPC_RESOLVERS = {"AmazonProvidedDNS", "169.254.169.253"}
NO_DHCP_OPTIONS = "default"


def check(args: RayClusterArgs, caller: Caller, opts: pulumi.InvokeOptions | None = None) -> None:
    """Temporary."""
    account.check(args, caller.region, caller.account, opts)


def existing_network(args: RayClusterArgs, caller: Caller, opts: pulumi.InvokeOptions | None = None) -> ExistingNetwork:
    """Subnets of an existing VPC by zone; SettingError if VPC or subnets are unsuitable."""
    _check_vpc(args.vpc_id, caller, opts)
    subnets: dict[str, pulumi.Input[str]] = {}
    for subnet_id in args.subnet_ids:
        zone = _subnets_zone(args.vpc_id, subnet_id, caller.region, opts)
        if zone in subnets:
            problem = f"is in {zone}, like {subnets[zone]}"
            raise SettingError("subnetIds", subnet_id, problem, "use one subnet per zone")
        subnets[zone] = subnet_id
    return ExistingNetwork(vpc_id=args.vpc_id, subnets=subnets)


def _subnets_zone(vpc_id: object, subnet_id: object, region: str, opts: pulumi.InvokeOptions | None) -> str:
    try:
        subnet = aws.ec2.get_subnet(id=subnet_id, opts=opts)
    except Exception as error:
        raise _unknown("subnetIds", subnet_id, region, error) from error
    if subnet.vpc_id != vpc_id:
        raise SettingError("subnetIds", subnet_id, f"is part of {subnet.vpc_id}", f"use a subnet of {vpc_id}")
    if subnet.map_public_ip_on_launch:
        pulumi.log.warn(
            f"subnetIds: {subnet_id} is a public subnet, and the stack's instances have no public addresses; they "
            "reach AWS only if its route table leads to a NAT gateway or to VPC endpoints"
        )
    _warn_of_no_route(subnet_id, opts)
    return subnet.availability_zone


def _warn_of_no_route(subnet_id: object, opts: pulumi.InvokeOptions | None) -> None:
    """Warn about a subnet without a default route: without VPC endpoints its instances never join the cluster."""
    try:
        routes = aws.ec2.get_route_table(subnet_id=subnet_id, opts=opts).routes
    except Exception:  # also for the VPC's main route table, which has no association with the subnet
        return
    if not any(route.cidr_block == "0.0.0.0/0" for route in routes):
        pulumi.log.warn(
            f"subnetIds: {subnet_id} has no default route (0.0.0.0/0); instances join the cluster only if its VPC has "
            "endpoints for the services that they call (docs/accounts.md)"
        )


def _check_vpc(vpc_id: object, caller: Caller, opts: pulumi.InvokeOptions | None) -> None:
    """Check the VPC for a private DNS namespace, which needs its owner and both DNS attributes.

    https://docs.aws.amazon.com/Route53/latest/DeveloperGuide/hosted-zone-private-considerations.html
    """
    region = caller.region
    try:
        vpc = aws.ec2.get_vpc(id=vpc_id, opts=opts)
    except Exception as error:
        raise _unknown("vpcId", vpc_id, region, error) from error
    if vpc.owner_id != caller.account:
        problem = f"is shared by account {vpc.owner_id}, and only the owner can associate a private DNS namespace"
        raise SettingError("vpcId", vpc_id, problem, "use a VPC of this account, or leave it empty to create one")
    if not (vpc.enable_dns_support and vpc.enable_dns_hostnames):
        problem = "needs DNS support and DNS host names, by which workers find the head"
        command = f"aws ec2 modify-vpc-attribute --region {region} --vpc-id {vpc_id} --enable-dns-hostnames"
        raise SettingError("vpcId", vpc_id, problem, f"turn both on ({command}, and --enable-dns-support)")
    if ipaddress.ip_network(vpc.cidr_block).overlaps(DOCKER_BRIDGE):
        pulumi.log.warn(
            f"vpcId: {vpc_id} ({vpc.cidr_block}) overlaps Docker's bridge {DOCKER_BRIDGE} on every instance, which "
            "can't reach these addresses"
        )
    _warn_of_custom_dns(vpc_id, vpc.dhcp_options_id, opts)


def _warn_of_custom_dns(vpc_id: object, dhcp_options_id: str, opts: pulumi.InvokeOptions | None) -> None:
    """Warn about custom DNS servers, which resolve the head's name only if they forward to the VPC's resolver."""
    if dhcp_options_id == NO_DHCP_OPTIONS:
        return
    try:
        servers = aws.ec2.get_vpc_dhcp_options(dhcp_options_id=dhcp_options_id, opts=opts).domain_name_servers
    except Exception as error:
        pulumi.log.warn(f"vpcId: DHCP options of {vpc_id} could not be read ({error_reason(error)}); continuing")
        return
    if servers and not VPC_RESOLVERS & set(servers):
        pulumi.log.warn(
            f"vpcId: {vpc_id} uses custom DNS servers ({', '.join(servers)}); workers find the head only if these "
            "forward queries for *.internal to the VPC's resolver"
        )


def _unknown(key: str, value: str, region: str, error: Exception) -> SettingError:
    return SettingError(
        key, value, f"could not be looked up in {region} ({error_reason(error)})", "use one of this region"
    )
