"""How a VPC's addresses are cut, as awsx does it: a block for each zone, all of one size."""

from __future__ import annotations

import ipaddress
import math

# AWS's smallest subnet, for the NAT gateway alone.
PUBLIC_PREFIX = 28
# AWS keeps these addresses of each subnet to itself.
# https://docs.aws.amazon.com/vpc/latest/userguide/subnet-sizing.html
RESERVED_ADDRESSES = 5


def private_prefix(vpc_cidr: str, zones: int) -> int:
    """Return the length of a private subnet's prefix: half of its zone's block, the other half holds the public one."""
    return ipaddress.IPv4Network(vpc_cidr).prefixlen + math.ceil(math.log2(zones)) + 1


def private_addresses(vpc_cidr: str, zones: int) -> int:
    """Return how many addresses a private subnet has for instances and tasks."""
    return 2 ** (32 - private_prefix(vpc_cidr, zones)) - RESERVED_ADDRESSES
