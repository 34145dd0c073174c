"""The stack's configuration: the only module that reads it.

The keys, their defaults and what they mean stand in Pulumi.yaml, the rules for their values in validation.py. What
only AWS can answer, such as whether a zone offers an instance type, is asked in plan.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, TypeVar

import pulumi

from infra.config import validation
from infra.errors import SettingError
from infra.references import Alerts, Scale

T = TypeVar("T")
# Keys that are not their fields' names in camel case: some take several values by comma, and Pulumi.yaml says one.
KEYS = {
    "worker_instance_types": "workerInstanceType",
    "helper_instance_types": "helperInstanceType",
    "availability_zones": "availabilityZone",
    "subnet_ids": "subnetId",
    "root_volume_gib": "rootVolumeGiB",
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The configuration of a stack, checked. Every default equals the one in Pulumi.yaml."""

    head_instance_type: str = "m5.xlarge"
    worker_instance_types: tuple[str, ...] = ("g5.xlarge",)
    head_ami_id: str = ""
    worker_ami_id: str = ""
    worker_count: int = 2
    min_workers: int = 0
    max_workers: int = 0
    idle_timeout_minutes: int = 30
    spot: bool = False
    on_demand_workers: int = 0
    helper_instance_types: tuple[str, ...] = ()
    helper_count: int = 0
    min_helpers: int = 0
    max_helpers: int = 0
    redeploy_workers: str = ""
    vpc_cidr: str = "10.0.0.0/16"
    vpc_id: str = ""
    subnet_ids: tuple[str, ...] = ()
    availability_zones: tuple[str, ...] = ()
    spread_zones: bool = False
    nat_gateway: bool = True
    image_uri: str = ""
    registry_secret_arn: str = ""
    retain_bucket: bool = False
    data_buckets: tuple[str, ...] = ()
    root_volume_gib: int = 100
    log_retention_days: int = 30
    check_quotas: bool = True
    max_hourly_usd: float = 0.0
    alert_email: str = ""
    monthly_budget_usd: int = 500
    tags: Mapping[str, str] = field(default_factory=dict)
    permissions_boundary: str = ""
    role_path: str = "/"
    kms_key_arn: str = ""

    def __post_init__(self) -> None:
        """Refuse what cannot work, with a SettingError."""
        validation.instance_types("headInstanceType", (self.head_instance_type,))
        validation.instance_types("workerInstanceType", self.worker_instance_types)
        validation.ami_id("headAmiId", self.head_ami_id)
        validation.ami_id("workerAmiId", self.worker_ami_id)
        validation.counts("Worker", self.worker_count, self.min_workers, self.max_workers)
        validation.idle_timeout_minutes(self.idle_timeout_minutes)
        validation.on_demand_workers(self.on_demand_workers, self.workers.max_count, spot=self.spot)
        if self.helper_instance_types:
            validation.instance_types("helperInstanceType", self.helper_instance_types)
        validation.counts("Helper", self.helper_count, self.min_helpers, self.max_helpers)
        validation.helpers(self.helper_instance_types, self.helpers.max_count)
        validation.redeploy_workers(self.redeploy_workers)
        validation.vpc_cidr(self.vpc_cidr)
        validation.existing_network(self.vpc_id, self.subnet_ids)
        validation.availability_zones(self.availability_zones)
        validation.spread_zones(self.spread_zones, max(len(self.availability_zones), len(self.subnet_ids)))
        validation.image_uri(self.image_uri)
        validation.nat_gateway(self.nat_gateway, self.vpc_id, self.image_uri)
        validation.registry_secret_arn(self.registry_secret_arn, self.image_uri)
        validation.data_buckets(self.data_buckets)
        validation.root_volume_gib(self.root_volume_gib)
        validation.log_retention_days(self.log_retention_days)
        validation.max_hourly_usd(self.max_hourly_usd)
        validation.alert_email(self.alert_email)
        validation.monthly_budget_usd(self.monthly_budget_usd)
        validation.tags(self.tags)
        validation.permissions_boundary(self.permissions_boundary)
        validation.role_path(self.role_path)
        validation.kms_key_arn(self.kms_key_arn)

    @property
    def workers(self) -> Scale:
        """Number of workers by workerCount, minWorkers, maxWorkers and idleTimeoutMinutes."""
        return _scale(self.worker_count, self.min_workers, self.max_workers, self.idle_timeout_minutes)

    @property
    def helpers(self) -> Scale:
        """Number of helpers by helperCount, minHelpers, maxHelpers and idleTimeoutMinutes."""
        return _scale(self.helper_count, self.min_helpers, self.max_helpers, self.idle_timeout_minutes)

    @property
    def alerts(self) -> Alerts:
        """What alertEmail and monthlyBudgetUsd describe together."""
        return Alerts(email=self.alert_email, monthly_usd=self.monthly_budget_usd)

    @classmethod
    def load(cls) -> Settings:
        """Read the stack's configuration; a key that is not set has its default."""
        read = _Reader()
        defaults = cls()
        given = {each.name: read.field(key_of(each.name), getattr(defaults, each.name)) for each in fields(cls)}
        read.refuse_unknown_keys()
        return cls(**given)


def _scale(count: int, fewest: int, most: int, idle_minutes: int) -> Scale:
    return Scale(
        initial_count=count,
        min_count=fewest,
        max_count=most or count,
        default_job_count=count or most,
        idle_minutes=idle_minutes,
    )


def key_of(field_name: str) -> str:
    """Return the configuration key of a field of Settings."""
    first, *rest = field_name.split("_")
    return KEYS.get(field_name) or first + "".join(word.title() for word in rest)


class _Reader:
    """Reads keys of the project, and knows which it has read."""

    def __init__(self) -> None:
        self._config = pulumi.Config()
        self._keys: set[str] = set()

    def field(self, key: str, default: Any) -> Any:
        """Read a key as what its default is."""
        self._keys.add(key)
        match default:
            case bool():
                problem = "is neither true nor false"
                return self._typed(self._config.get_bool, key, default, problem, "give one of the two")
            case int():
                hint = f"give one, such as {default}"
                return self._typed(self._config.get_int, key, default, "is no whole number", hint)
            case float():
                return self._typed(self._config.get_float, key, default, "is no number", f"give one, such as {default}")
            case tuple():
                return self._list(key, default)
            case dict():
                return self._pairs(key)
        value = self._config.get(key)
        return default if value is None else value.strip()

    def refuse_unknown_keys(self) -> None:
        """Refuse a key that nobody reads, with a RunError: Pulumi itself takes a misspelt one in silence."""
        prefix = f"{pulumi.get_project()}:"
        for name in pulumi.runtime.get_config_env():
            key = name.removeprefix(prefix)
            if key != name and key not in self._keys:
                nearest = get_close_matches(key, sorted(self._keys), n=1)
                hint = f"did you mean {nearest[0]}?" if nearest else "Pulumi.yaml lists them all."
                # Without its value, which may be a secret.
                raise pulumi.RunError(
                    f"{key}: is no setting of this project; {hint} Remove it: `pulumi config rm {key}`"
                )

    def _list(self, key: str, default: tuple[str, ...]) -> tuple[str, ...]:
        value = self._config.get(key)
        if value is None:
            return default
        return tuple(each.strip() for each in value.split(",") if each.strip())

    def _pairs(self, key: str) -> dict[str, str]:
        pairs = [each.partition("=") for each in self._list(key, ())]
        for name, equals, value in pairs:
            if not equals:
                raise SettingError(key, name + value, "has no =", "give key=value, several with commas between them")
        return {name.strip(): value.strip() for name, _, value in pairs}

    def _typed(self, get: Callable[[str], T | None], key: str, default: T, problem: str, hint: str) -> T:
        try:
            value = get(key)
        except pulumi.ConfigTypeError as error:
            raise SettingError(key, error.value, problem, hint) from error
        return default if value is None else value
