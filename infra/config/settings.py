"""The stack's configuration: the only module that reads it.

The keys, their defaults and what they mean stand in Pulumi.yaml, the rules for their values in validation.py. What
only AWS can answer, such as whether a zone offers an instance type, is asked in plan.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import pulumi

from infra.config import validation
from infra.errors import SettingError
from infra.references import Alerts, WorkerScale


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The configuration of a stack, checked. Every default equals the one in Pulumi.yaml."""

    head_instance_type: str = "m5.xlarge"
    worker_instance_type: str = "g5.xlarge"
    worker_count: int = 2
    min_workers: int = -1
    max_workers: int = 0
    idle_timeout_minutes: int = 0
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
        validation.worker_counts(self.worker_count, self.min_workers, self.max_workers)
        validation.idle_timeout_minutes(self.idle_timeout_minutes)
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
        config = pulumi.Config()
        return cls(
            head_instance_type=_string(config, "headInstanceType", cls.head_instance_type),
            worker_instance_type=_string(config, "workerInstanceType", cls.worker_instance_type),
            worker_count=_integer(config, "workerCount", cls.worker_count),
            min_workers=_integer(config, "minWorkers", cls.min_workers),
            max_workers=_integer(config, "maxWorkers", cls.max_workers),
            idle_timeout_minutes=_integer(config, "idleTimeoutMinutes", cls.idle_timeout_minutes),
            vpc_cidr=_string(config, "vpcCidr", cls.vpc_cidr),
            vpc_id=_string(config, "vpcId", cls.vpc_id),
            subnet_id=_string(config, "subnetId", cls.subnet_id),
            availability_zone=_string(config, "availabilityZone", cls.availability_zone),
            image_uri=_string(config, "imageUri", cls.image_uri),
            retain_bucket=_boolean(config, "retainBucket", cls.retain_bucket),
            data_buckets=_list(config, "dataBuckets", cls.data_buckets),
            root_volume_gib=_integer(config, "rootVolumeGiB", cls.root_volume_gib),
            log_retention_days=_integer(config, "logRetentionDays", cls.log_retention_days),
            check_quotas=_boolean(config, "checkQuotas", cls.check_quotas),
            max_hourly_usd=_number(config, "maxHourlyUsd", cls.max_hourly_usd),
            alert_email=_string(config, "alertEmail", cls.alert_email),
            monthly_budget_usd=_integer(config, "monthlyBudgetUsd", cls.monthly_budget_usd),
        )


def _string(config: pulumi.Config, key: str, default: str) -> str:
    value = config.get(key)
    return default if value is None else value.strip()


def _list(config: pulumi.Config, key: str, default: tuple[str, ...]) -> tuple[str, ...]:
    value = config.get(key)
    return default if value is None else tuple(each.strip() for each in value.split(",") if each.strip())


def _integer(config: pulumi.Config, key: str, default: int) -> int:
    try:
        value = config.get_int(key)
    except pulumi.ConfigTypeError as error:
        raise SettingError(key, error.value, "is no whole number", f"give one, such as {default}") from error
    return default if value is None else value


def _number(config: pulumi.Config, key: str, default: float) -> float:
    try:
        value = config.get_float(key)
    except pulumi.ConfigTypeError as error:
        raise SettingError(key, error.value, "is no number", f"give one, such as {default}") from error
    return default if value is None else value


def _boolean(config: pulumi.Config, key: str, default: bool) -> bool:
    try:
        value = config.get_bool(key)
    except pulumi.ConfigTypeError as error:
        raise SettingError(key, error.value, "is neither true nor false", "give one of the two") from error
    return default if value is None else value
