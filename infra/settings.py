"""The stack's configuration: the only module that reads it.

The keys, their defaults and what they mean stand in Pulumi.yaml. What only AWS can answer, such as whether a zone
offers an instance type, is asked in plan.py.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

import pulumi

SMALLEST_ROOT_VOLUME_GIB = 50
LARGEST_ROOT_VOLUME_GIB = 16384
# The only periods that CloudWatch Logs takes.
# https://docs.aws.amazon.com/AmazonCloudWatchLogs/latest/APIReference/API_PutRetentionPolicy.html
RETENTION_DAYS = (
    1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731, 1096, 1827, 2192, 2557, 2922, 3288, 3653,
)  # fmt: skip
# Docker's own bridge on every instance: addresses of a VPC in this range are never reached from there.
DOCKER_BRIDGE = ipaddress.IPv4Network("172.17.0.0/16")


class SettingError(pulumi.RunError):
    """A configuration value that cannot work; as a RunError it ends the program with this line and no traceback."""

    def __init__(self, key: str, value: object, rule: str, way_out: str) -> None:
        """Say which key holds which value, the rule that it breaks, and what to give instead."""
        super().__init__(f"{key}: {value!r} {rule}; {way_out}")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The configuration of a stack, checked. Every default equals the one in Pulumi.yaml."""

    head_instance_type: str = "m5.xlarge"
    worker_instance_type: str = "g5.xlarge"
    worker_count: int = 2
    vpc_cidr: str = "10.0.0.0/16"
    availability_zone: str = ""
    image_uri: str = ""
    retain_bucket: bool = False
    root_volume_gib: int = 100
    log_retention_days: int = 30

    def __post_init__(self) -> None:
        """Refuse what cannot work, with a SettingError."""
        _check_instance_type("headInstanceType", self.head_instance_type)
        _check_instance_type("workerInstanceType", self.worker_instance_type)
        _check_worker_count(self.worker_count)
        _check_vpc_cidr(self.vpc_cidr)
        _check_availability_zone(self.availability_zone)
        _check_image_uri(self.image_uri)
        _check_root_volume(self.root_volume_gib)
        _check_log_retention(self.log_retention_days)

    @classmethod
    def load(cls) -> Settings:
        """Read the stack's configuration; a key that is not set has its default."""
        config = pulumi.Config()
        return cls(
            head_instance_type=_string(config, "headInstanceType", cls.head_instance_type),
            worker_instance_type=_string(config, "workerInstanceType", cls.worker_instance_type),
            worker_count=_integer(config, "workerCount", cls.worker_count),
            vpc_cidr=_string(config, "vpcCidr", cls.vpc_cidr),
            availability_zone=_string(config, "availabilityZone", cls.availability_zone),
            image_uri=_string(config, "imageUri", cls.image_uri),
            retain_bucket=_boolean(config, "retainBucket", cls.retain_bucket),
            root_volume_gib=_integer(config, "rootVolumeGiB", cls.root_volume_gib),
            log_retention_days=_integer(config, "logRetentionDays", cls.log_retention_days),
        )


def _string(config: pulumi.Config, key: str, default: str) -> str:
    value = config.get(key)
    return default if value is None else value.strip()


def _integer(config: pulumi.Config, key: str, default: int) -> int:
    try:
        value = config.get_int(key)
    except pulumi.ConfigTypeError as error:
        raise SettingError(key, error.value, "is no whole number", f"give one, such as {default}") from error
    return default if value is None else value


def _boolean(config: pulumi.Config, key: str, default: bool) -> bool:
    try:
        value = config.get_bool(key)
    except pulumi.ConfigTypeError as error:
        raise SettingError(key, error.value, "is neither true nor false", "give one of the two") from error
    return default if value is None else value


def _check_instance_type(key: str, value: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9-]*\.[a-z0-9-]+", value):
        raise SettingError(key, value, "is no EC2 instance type", "give a family and a size, such as g5.xlarge")


def _check_worker_count(value: int) -> None:
    if value < 0:
        way_out = "give the number of GPU instances, or 0 to keep the stack without any"
        raise SettingError("workerCount", value, "is below 0", way_out)


def _check_vpc_cidr(value: str) -> None:
    way_out = "give an IPv4 network of /16 to /24, such as 10.0.0.0/16"
    try:
        network = ipaddress.IPv4Network(value)
    except ValueError as error:
        raise SettingError("vpcCidr", value, f"is no IPv4 network ({error})", way_out) from error
    if not 16 <= network.prefixlen <= 24:
        rule = "is outside /16 (AWS's largest VPC) to /24 (the smallest with room for a cluster)"
        raise SettingError("vpcCidr", value, rule, way_out)
    if network.overlaps(DOCKER_BRIDGE):
        raise SettingError("vpcCidr", value, f"overlaps Docker's bridge {DOCKER_BRIDGE} on every instance", way_out)


def _check_availability_zone(value: str) -> None:
    if value and not re.fullmatch(r"[a-z]+(-[a-z0-9]+)+", value):
        way_out = "give one such as us-west-2a, or leave it empty to have one chosen"
        raise SettingError("availabilityZone", value, "is no name of an availability zone", way_out)


def _check_image_uri(value: str) -> None:
    if value and ("://" in value or not re.fullmatch(r"[a-z0-9][\w./:@-]*", value)):
        way_out = (
            "give registry/repository:tag or registry/repository@sha256:digest, or leave it empty to build docker/"
        )
        raise SettingError("imageUri", value, "is no image reference", way_out)


def _check_root_volume(value: int) -> None:
    if not SMALLEST_ROOT_VOLUME_GIB <= value <= LARGEST_ROOT_VOLUME_GIB:
        rule = f"is outside {SMALLEST_ROOT_VOLUME_GIB} (machine image and training image) to {LARGEST_ROOT_VOLUME_GIB}"
        raise SettingError("rootVolumeGiB", value, rule, "give the size of the root disk in GiB, such as 100")


def _check_log_retention(value: int) -> None:
    if value not in RETENTION_DAYS:
        way_out = f"give one of {', '.join(map(str, RETENTION_DAYS))}"
        raise SettingError("logRetentionDays", value, "is no period that CloudWatch Logs keeps logs for", way_out)
