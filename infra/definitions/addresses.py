"""Address blocks of the subnets in a VPC's CIDR block.

Each availability zone has one eighth of it for its private subnet, by the letter at its end: so a zone that AWS adds
later gets a block that is free. The last eighth has the public subnet.
"""

from __future__ import annotations

import ipaddress

# us-east-1f is the last zone that AWS has today.
ZONE_LETTERS = "abcdefg"
# The smallest subnet that AWS allows; it contains only the NAT gateway or instance.
PUBLIC_PREFIX = 28
# Addresses of each subnet that AWS reserves.
# https://docs.aws.amazon.com/vpc/latest/userguide/subnet-sizing.html
RESERVED_ADDRESSES = 5


def private_block(vpc_cidr: str, zone: str) -> str:
    """CIDR block of the private subnet in a zone, e.g. us-west-2b."""
    return str(_eighths(vpc_cidr)[ZONE_LETTERS.index(zone[-1])])


def public_block(vpc_cidr: str) -> str:
    """CIDR block of the public subnet."""
    return str(list(_eighths(vpc_cidr)[-1].subnets(new_prefix=PUBLIC_PREFIX))[-1])


def private_addresses(vpc_cidr: str) -> int:
    """Number of addresses for instances and tasks in a private subnet."""
    return _eighths(vpc_cidr)[0].num_addresses - RESERVED_ADDRESSES


def _eighths(vpc_cidr: str) -> list[ipaddress.IPv4Network]:
    return list(ipaddress.IPv4Network(vpc_cidr).subnets(prefixlen_diff=3))
