"""Zones of the pools in `worker_pools`: each offers a type of its pool, and the endpoints."""

from __future__ import annotations

from collections.abc import Sequence

from infra.config.args import RayClusterArgs
from infra.config.worker_pool import OWN_FIELDS, field_of
from infra.errors import SettingError
from infra.types import ExistingNetwork, Location

# Availability zones by instance type or endpoint service.
Offerings = dict[str, set[str]]


def check(
    args: RayClusterArgs,
    zones: Sequence[str],
    by_type: Offerings,
    by_service: Offerings,
    existing: ExistingNetwork | None,
) -> dict[str, tuple[str, ...]]:
    """Zones with subnets that offer one of a pool's types and the endpoints, by each pool that has no zones itself.

    Raises:
        SettingError: A pool has another zone, or there is none.
    """
    offers = {}
    for name, pool in args.pools.items():
        if name in OWN_FIELDS:
            continue
        types, field = " or ".join(pool.instance_types), field_of(name, "zones")
        offered = set[str]().union(*(by_type[each] for each in pool.instance_types)).intersection(*by_service.values())
        fit = tuple(zone for zone in zones if zone in offered)
        if not fit:
            problem = f"is not offered in {' or '.join(zones)}" + ("" if args.nat_gateway else " with VPC endpoints")
            hint = "check its spelling, or use another type" + (" or a subnet in another zone" if existing else "")
            raise SettingError(field_of(name, "instance_types"), ",".join(pool.instance_types), problem, hint)
        for zone in pool.zones:
            if zone not in zones:
                problem = "has no subnet in subnet_ids" if existing else "is not an availability zone of the region"
                raise SettingError(field, zone, problem, f"use {' or '.join(fit)}")
            if zone not in fit:
                raise SettingError(field, zone, f"does not offer {types}", f"use {' or '.join(fit)}, or another type")
        if not pool.zones:
            offers[name] = fit
    return offers


def check_without(args: RayClusterArgs, location: Location, zone: str) -> None:
    """Refuse a pool without zones whose types the cluster's zone does not offer, with a SettingError."""
    for name, offered in location.offers.items():
        if zone not in offered:
            types = " or ".join(args.pools[name].instance_types)
            problem = f"is empty, and the cluster's zone {zone} does not offer {types}"
            raise SettingError(field_of(name, "zones"), "", problem, f"use {' or '.join(offered)}")
