"""Subnet sizes of a VPC: awsx divides its CIDR block into equal blocks, one per availability zone."""

from __future__ import annotations

import ipaddress
import math

# The smallest subnet that AWS allows; it contains only the NAT gateway.
PUBLIC_PREFIX = 28
# Addresses of each subnet that AWS reserves.
# https://docs.aws.amazon.com/vpc/latest/userguide/subnet-sizing.html
RESERVED_ADDRESSES = 5


def private_prefix(vpc_cidr: str, zones: int) -> int:
    """Prefix length of a private subnet: half of its zone's block, since the other half contains the public subnet."""
    return ipaddress.IPv4Network(vpc_cidr).prefixlen + math.ceil(math.log2(zones)) + 1


def private_addresses(vpc_cidr: str, zones: int) -> int:
    """Number of addresses for instances and tasks in a private subnet."""
    return 2 ** (32 - private_prefix(vpc_cidr, zones)) - RESERVED_ADDRESSES
