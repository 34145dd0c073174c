"""The stack's configuration: the only module that reads it.

The keys, their defaults and what they mean stand in Pulumi.yaml, the rules for their values in validation.py. What
only AWS can answer, such as whether a zone offers an instance type, is asked in plan.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeVar

import pulumi

from infra.config import validation
from infra.errors import SettingError
from infra.references import Alerts, WorkerScale

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The configuration of a stack, checked. Every default equals the one in Pulumi.yaml."""

    head_instance_type: str = "m5.xlarge"
    worker_instance_type: str = "g5.xlarge"
    head_ami_id: str = ""
    worker_ami_id: str = ""
    worker_count: int = 2
    min_workers: int = -1
    max_workers: int = 0
    idle_timeout_minutes: int = 0
    redeploy_workers: str = ""
    vpc_cidr: str = "10.0.0.0/16"
    vpc_id: str = ""
    subnet_id: str = ""
    availability_zone: str = ""
    image_uri: str = ""
    retain_bucket: bool = False
    data_buckets: tuple[str, ...] = ()
    root_volume_gib: int = 100
    log_retention_days: int = 30
    check_quotas: bool = True
    max_hourly_usd: float = 0.0
    alert_email: str = ""
    monthly_budget_usd: int = 500

    def __post_init__(self) -> None:
        """Refuse what cannot work, with a SettingError."""
        validation.instance_type("headInstanceType", self.head_instance_type)
        validation.instance_type("workerInstanceType", self.worker_instance_type)
        validation.ami_id("headAmiId", self.head_ami_id)
        validation.ami_id("workerAmiId", self.worker_ami_id)
        validation.worker_counts(self.worker_count, self.min_workers, self.max_workers)
        validation.idle_timeout_minutes(self.idle_timeout_minutes)
        validation.redeploy_workers(self.redeploy_workers)
        validation.vpc_cidr(self.vpc_cidr)
        validation.existing_network(self.vpc_id, self.subnet_id)
        validation.availability_zone(self.availability_zone)
        validation.image_uri(self.image_uri)
        validation.data_buckets(self.data_buckets)
        validation.root_volume_gib(self.root_volume_gib)
        validation.log_retention_days(self.log_retention_days)
        validation.max_hourly_usd(self.max_hourly_usd)
        validation.alert_email(self.alert_email)
        validation.monthly_budget_usd(self.monthly_budget_usd)

    @property
    def workers(self) -> WorkerScale:
        """The range that workerCount, minWorkers, maxWorkers and idleTimeoutMinutes describe together."""
        most = self.max_workers or self.worker_count
        return WorkerScale(
            min_count=self.worker_count if self.min_workers < 0 else self.min_workers,
            max_count=most,
            default_job_count=self.worker_count or most,
            idle_minutes=self.idle_timeout_minutes,
        )

    @property
    def alerts(self) -> Alerts:
        """What alertEmail and monthlyBudgetUsd describe together."""
        return Alerts(email=self.alert_email, monthly_usd=self.monthly_budget_usd)

    @classmethod
    def load(cls) -> Settings:
        """Read the stack's configuration; a key that is not set has its default."""
        read = _Reader()
        settings = cls(
            head_instance_type=read.string("headInstanceType", cls.head_instance_type),
            worker_instance_type=read.string("workerInstanceType", cls.worker_instance_type),
            head_ami_id=read.string("headAmiId", cls.head_ami_id),
            worker_ami_id=read.string("workerAmiId", cls.worker_ami_id),
            worker_count=read.integer("workerCount", cls.worker_count),
            min_workers=read.integer("minWorkers", cls.min_workers),
            max_workers=read.integer("maxWorkers", cls.max_workers),
            idle_timeout_minutes=read.integer("idleTimeoutMinutes", cls.idle_timeout_minutes),
            redeploy_workers=read.string("redeployWorkers", cls.redeploy_workers),
            vpc_cidr=read.string("vpcCidr", cls.vpc_cidr),
            vpc_id=read.string("vpcId", cls.vpc_id),
            subnet_id=read.string("subnetId", cls.subnet_id),
            availability_zone=read.string("availabilityZone", cls.availability_zone),
            image_uri=read.string("imageUri", cls.image_uri),
            retain_bucket=read.boolean("retainBucket", cls.retain_bucket),
            data_buckets=read.list("dataBuckets", cls.data_buckets),
            root_volume_gib=read.integer("rootVolumeGiB", cls.root_volume_gib),
            log_retention_days=read.integer("logRetentionDays", cls.log_retention_days),
            check_quotas=read.boolean("checkQuotas", cls.check_quotas),
            max_hourly_usd=read.number("maxHourlyUsd", cls.max_hourly_usd),
            alert_email=read.string("alertEmail", cls.alert_email),
            monthly_budget_usd=read.integer("monthlyBudgetUsd", cls.monthly_budget_usd),
        )
        read.refuse_unknown_keys()
        return settings


class _Reader:
    """Reads keys of the project, and knows which it has read."""

    def __init__(self) -> None:
        self._config = pulumi.Config()
        self._keys: set[str] = set()

    def string(self, key: str, default: str) -> str:
        self._keys.add(key)
        value = self._config.get(key)
        return default if value is None else value.strip()

    def list(self, key: str, default: tuple[str, ...]) -> tuple[str, ...]:
        parts = self.string(key, ",".join(default)).split(",")
        return tuple(each.strip() for each in parts if each.strip())

    def integer(self, key: str, default: int) -> int:
        return self._typed(self._config.get_int, key, default, "is no whole number", f"give one, such as {default}")

    def number(self, key: str, default: float) -> float:
        return self._typed(self._config.get_float, key, default, "is no number", f"give one, such as {default}")

    def boolean(self, key: str, default: bool) -> bool:
        problem = "is neither true nor false"
        return self._typed(self._config.get_bool, key, default, problem, "give one of the two")

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

    def _typed(self, get: Callable[[str], T | None], key: str, default: T, problem: str, hint: str) -> T:
        self._keys.add(key)
        try:
            value = get(key)
        except pulumi.ConfigTypeError as error:
            raise SettingError(key, error.value, problem, hint) from error
        return default if value is None else value
