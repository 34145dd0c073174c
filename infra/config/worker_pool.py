"""Pools of workers: the keys of a pool in `worker_pools`, and the fields that describe the pools `default` and `cpu`.

`from __future__ import annotations` would turn the rules, which are in the annotations, into strings.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Annotated, Any

import pulumi

from infra.config import rules
from infra.config.fields import checked, from_text, later
from infra.errors import Refusal, SettingError, warn
from infra.types import Scale
from ray_on_ecs.contract import CPU_WORKERS, DEFAULT_POOL, SETTINGS, field_of, key_of

FIELD = "worker_pools"
NAME = r"[a-z]([a-z0-9-]{0,30}[a-z0-9])?"
# Names of pools that the cluster's own fields describe, of the head, of the CPU workers' label, and a part of the names
# of services.
RESERVED = (*SETTINGS, "head", CPU_WORKERS, "ray")
# Fields of the cluster that one may expect in a pool.
OF_CLUSTER = (
    *("check_quotas", "environment", "idle_timeout_minutes", "max_hourly_usd", "spread_zones", "subnet_ids", "tags"),
    "worker_ami_id",
)


@dataclass(frozen=True, kw_only=True)
class WorkerPoolArgs:
    """Pool of equal workers. RayClusterArgs checks it, since its messages have the pool's name."""

    instance_types: Annotated[Sequence[str], rules.not_empty] = ()
    """EC2 instance types in order of preference, all with the same GPUs, or all without for CPU workers; required."""
    zones: Sequence[str] = ()
    """Zones in order of preference, e.g. us-west-2c, each with a subnet; by default the cluster's."""
    min: Annotated[int, rules.at_least_0] = 0
    """Minimum number of workers, kept by the idle scale-in."""
    initial: Annotated[int, rules.at_least_0] = 0
    """Initial number of workers, one per instance, at least min; a run's default, which is max if this is 0."""
    max: Annotated[int, rules.at_least_0] = 0
    """Maximum number of workers in all zones together, at least initial and min; 0 means the larger of these."""
    spot: bool = False
    """Run the workers on Spot Instances (cheaper; two-minute interruption notice)."""
    on_demand: Annotated[int, rules.at_least_0] = 0
    """Number of workers kept on demand when spot is true, in the first zone."""
    root_volume_gib: Annotated[int, rules.pool_volume] = 0
    """Root EBS volume of each instance in GiB; 0 means the cluster's root_volume_gib."""
    efa: Annotated[str, rules.efa] = "false"
    """EFA network: true, false, or auto: on if max is above 1 and all types have the same EFA interfaces."""
    capacity_reservation_id: Annotated[str, rules.reservation_id] = ""
    """On-Demand Capacity Reservation or Capacity Block that has all instances, e.g. cr-0123456789abcdef0."""

    def scale(self, idle_minutes: int) -> Scale:
        """Number of workers, in the pool's first zone."""
        initial = max(self.initial, self.min)
        return Scale(
            initial_count=initial,
            min_count=self.min,
            max_count=self.most,
            # A pool that starts without workers can still grow to its maximum for a job.
            default_job_count=initial or self.most,
            idle_minutes=idle_minutes,
        )

    @property
    def most(self) -> int:
        """Maximum number of workers."""
        return self.max or max(self.initial, self.min)

    @property
    def spot_count(self) -> int:
        """Number of Spot Instances among them."""
        return max(self.most - self.on_demand, 0) if self.spot else 0


class Pools(dict[str, WorkerPoolArgs]):
    """Checked value of `worker_pools`: pools by name."""


def pool_defaults() -> dict[str, Any]:
    """Default of each key of a pool."""
    return {item.name: item.default for item in fields(WorkerPoolArgs)}


def counts_of(pool: str) -> str:
    """Fields of a pool's number of workers, for the way out of a message."""
    return f"{field_of(pool, 'max')} and {field_of(pool, 'initial')}"


def check_pools(value: Any) -> Pools:
    """Pools by name, in alphabetical order: Pulumi keeps no order of a configuration object."""
    if isinstance(value, pulumi.Output):
        raise later(FIELD)
    if not isinstance(value, Mapping):
        raise SettingError(FIELD, value, "is not an object", "use one with a pool for each name")
    for name in value:
        if not isinstance(name, str) or not re.fullmatch(NAME, name):
            hint = (
                "use up to 32 lower-case letters, digits and hyphens, first a letter and last not a hyphen, e.g. h100"
            )
            raise SettingError(FIELD, name, "is not a name of a pool", hint)
        if name in RESERVED:
            hint = f"its key is {field_of(name, 'instance_types')}" if name in SETTINGS else "use another name"
            raise SettingError(FIELD, name, "is a reserved name", hint)
    return Pools({name: _check_pool(f"{FIELD}.{name}", value[name]) for name in sorted(value)})


def _check_pool(path: str, given: Any) -> WorkerPoolArgs:
    if isinstance(given, pulumi.Output):
        raise later(path)
    if isinstance(given, WorkerPoolArgs):
        given = vars(given)
    if not isinstance(given, Mapping):
        raise SettingError(path, given, "is not an object", "use one with instance_types and max")
    defaults = pool_defaults()
    _check_keys(path, given, defaults)
    if "instance_types" not in given:
        raise Refusal(f"{path}.instance_types", "is missing; use a family and a size, e.g. g5.xlarge")
    annotations = WorkerPoolArgs.__annotations__
    values = {
        key: checked(f"{path}.{key}", given.get(key, default), default, annotations[key])
        for key, default in defaults.items()
    }
    return WorkerPoolArgs(**values)


def _check_keys(path: str, given: Mapping[Any, Any], known: Collection[str]) -> None:
    """Refuse all unknown keys, in the spelling of `known`: an error of a field would rewrite the unknown key."""
    unknown = [str(key) for key in given if key not in known]
    hints = {key: _hint(key, known) for key in unknown}
    every = f"use {', '.join(known)}"
    if len(unknown) == 1:
        [key] = unknown
        raise pulumi.RunError(f"{path}.{key}: unknown key of a pool; {hints[key] or every}")
    if unknown:
        texts = [f"{key} ({hint})" if hint else key for key, hint in hints.items()]
        raise pulumi.RunError(f"{path}: unknown keys of a pool: {', '.join(texts)}; {every}")


def _hint(unknown: str, known: Collection[str]) -> str:
    """Way out for an unknown key: the nearest key of a pool, or that it is the cluster's; empty without either."""
    folded = _folded(unknown)
    if folded in map(_folded, OF_CLUSTER):
        return "it is a key of the cluster, and holds for all pools"
    spelled = {_folded(key): key for key in known}
    # As in the keys of the pools `default` and `cpu`.
    meant = {_folded(field): spelled[_folded(key)] for own in SETTINGS.values() for key, field in own.items()} | spelled
    alike = [name for name in spelled if folded.startswith(name) or name.endswith(folded)]
    nearest = [folded] if folded in meant else alike or get_close_matches(folded, meant, n=1)
    return f"did you mean {meant[nearest[0]]}?" if nearest else ""


def _folded(key: str) -> str:
    return key.replace("_", "").replace("-", "").lower()


def combinations(pools: Mapping[str, WorkerPoolArgs]) -> None:
    """Refuse keys of a pool that contradict each other, and warn about pools that nothing distinguishes."""
    alike: dict[Any, str] = {}
    for name, pool in pools.items():
        for key in ("initial", "min"):
            number, field = getattr(pool, key), field_of(name, key)
            if pool.max and pool.max < number:
                hint = f"raise it, or lower {field}"
                raise SettingError(field_of(name, "max"), pool.max, f"must be at least {field} ({number})", hint)
        on_demand, spot = field_of(name, "on_demand"), field_of(name, "spot")
        if pool.on_demand and not pool.spot:
            hint = "set both or neither: without spot all workers run on demand"
            raise SettingError(on_demand, pool.on_demand, f"requires {spot}", hint)
        if pool.most and pool.on_demand > pool.most:
            problem = f"must not exceed the maximum of {pool.most} workers"
            raise SettingError(on_demand, pool.on_demand, problem, f"lower it, or raise {field_of(name, 'max')}")
        if not pool.most:
            continue
        if pool.capacity_reservation_id:
            _check_reserved(name, pool)
        default = pools[DEFAULT_POOL]
        disk, zones = pool.root_volume_gib or default.root_volume_gib, pool.zones or default.zones[:1]
        how = (pool.spot, pool.on_demand, pool.efa, pool.capacity_reservation_id)
        key = (frozenset(pool.instance_types), frozenset(zones), disk, *how)
        other = alike.setdefault(key, name)
        if other != name:
            warn(
                f"{field_of(name, 'instance_types')}: are those of the pool {other}, in the same zones and market; one "
                "pool with the workers of both serves the same runs"
            )


def _check_reserved(name: str, pool: WorkerPoolArgs) -> None:
    """Refuse what no instance of one reservation can have."""
    field, value = field_of(name, "capacity_reservation_id"), pool.capacity_reservation_id
    types, zones, spot = (field_of(name, key) for key in ("instance_types", "zones", "spot"))
    if pool.spot:
        hint = f"set {spot} to false, and use another pool for Spot Instances"
        raise SettingError(field, value, f"cannot be combined with {spot}: EC2 sells them apart", hint)
    if len(pool.instance_types) > 1:
        problem = f"has one instance type, and {types} has {len(pool.instance_types)}"
        raise SettingError(field, value, problem, "leave that of the reservation, and use another pool for the others")
    if len(pool.zones) > 1:
        problem = f"is in one zone, and {zones} has {len(pool.zones)}"
        raise SettingError(field, value, problem, "leave that of the reservation, and use another pool for the others")


def pools_from_object(value: Any) -> Any:
    """Configuration object with the names of fields in place of its keys, and values in place of texts.

    `pulumi config set --path` stores true, false and integers as such and all else as text, and YAML may quote them. A
    list may be a text, separated by commas, as in the other keys.
    """
    if not isinstance(value, Mapping):
        return value
    defaults = {key_of(field): (field, default) for field, default in pool_defaults().items()}

    def read(name: str, pool: Any) -> Any:
        if not isinstance(pool, Mapping):
            return pool
        _check_keys(f"{key_of(FIELD)}.{name}", pool, defaults)
        fields = [(*defaults[key], value) for key, value in pool.items()]
        return {
            field: from_text(field_of(name, field), value, default) if isinstance(value, str) else value
            for field, default, value in fields
        }

    return {name: read(name, pool) for name, pool in value.items()}
