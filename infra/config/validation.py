"""What each value of the stack's configuration must be, as far as it can be told without asking AWS.

Every rule is a function that raises SettingError; settings.py applies them.
"""

from __future__ import annotations

import ipaddress
import math
import re

from infra.errors import SettingError

SMALLEST_ROOT_VOLUME_GIB = 50
LARGEST_ROOT_VOLUME_GIB = 16384
# The only periods that CloudWatch Logs takes.
# https://docs.aws.amazon.com/AmazonCloudWatchLogs/latest/APIReference/API_PutRetentionPolicy.html
RETENTION_DAYS = (
    1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731, 1096, 1827, 2192, 2557, 2922, 3288, 3653,
)  # fmt: skip
# Docker's own bridge on every instance: addresses of a VPC in this range are never reached from there.
DOCKER_BRIDGE = ipaddress.IPv4Network("172.17.0.0/16")
# RFC 1918, and the range of RFC 6598, which AWS takes for VPCs as well.
PRIVATE_RANGES = tuple(
    ipaddress.IPv4Network(each) for each in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")
)
# A tag or a digest is wanted: a name alone is more often a mistake than Docker Hub's image of that name.
TAG, DIGEST = r":\w[\w.-]{0,127}", r"@sha256:[0-9a-f]{64}"
IMAGE = rf"([\w.-]+(:\d+)?/)?[a-z0-9][a-z0-9._/-]*({TAG}|({TAG})?{DIGEST})"
# A worker that is started for a job takes up to ten minutes, most of them for the image, before it shows progress.
SHORTEST_IDLE_MINUTES = 15
# An alarm looks back a day at most.
# https://docs.aws.amazon.com/AmazonCloudWatch/latest/APIReference/API_PutMetricAlarm.html
LONGEST_IDLE_MINUTES = 24 * 60


def instance_type(key: str, value: str) -> None:
    """A family and a size."""
    if not re.fullmatch(r"[a-z][a-z0-9-]*\.[a-z0-9-]+", value):
        raise SettingError(key, value, "is no EC2 instance type", "give a family and a size, such as g5.xlarge")


def worker_counts(count: int, fewest: int, most: int) -> None:
    """`fewest` of -1 and `most` of 0 stand for `count`; otherwise fewest <= count <= most."""
    if count < 0:
        hint = "give the number of GPU instances, or 0 to keep the stack without any"
        raise SettingError("workerCount", count, "is below 0", hint)
    if fewest < -1:
        raise SettingError(
            "minWorkers",
            fewest,
            "is below 0",
            "give a number of instances, or `pulumi config rm minWorkers` for workerCount",
        )
    if most < 0:
        raise SettingError("maxWorkers", most, "is below 0", "give a number of instances, or 0 for workerCount")
    if most and fewest > most:
        hint = f"give {most} or less, or raise maxWorkers"
        raise SettingError("minWorkers", fewest, f"is above maxWorkers, which is {most}", hint)
    if fewest > count:
        hint = f"give {count} or less, or raise workerCount"
        raise SettingError("minWorkers", fewest, f"is above workerCount, which is {count}", hint)
    if 0 < most < count:
        hint = f"give {count} or more, or 0 for workerCount"
        raise SettingError("maxWorkers", most, f"is below workerCount, which is {count}", hint)


def vpc_cidr(value: str) -> None:
    """A private IPv4 network with room for a cluster, apart from what instances use inside."""
    hint = "give a private IPv4 network of /16 to /24, such as 10.0.0.0/16"
    try:
        network = ipaddress.IPv4Network(value)
    except ValueError as error:
        raise SettingError("vpcCidr", value, f"is no IPv4 network ({error})", hint) from error
    if not 16 <= network.prefixlen <= 24:
        problem = "is outside /16 (AWS's largest VPC) to /24 (the smallest with room for a cluster)"
        raise SettingError("vpcCidr", value, problem, hint)
    if not any(network.subnet_of(private) for private in PRIVATE_RANGES):
        problem = f"is public; private are {', '.join(map(str, PRIVATE_RANGES))}"
        raise SettingError("vpcCidr", value, problem, hint)
    if network.overlaps(DOCKER_BRIDGE):
        raise SettingError("vpcCidr", value, f"overlaps Docker's bridge {DOCKER_BRIDGE} on every instance", hint)


def existing_network(vpc_id: str, subnet_id: str) -> None:
    """Both IDs or neither."""
    for key, value, prefix in (("vpcId", vpc_id, "vpc"), ("subnetId", subnet_id, "subnet")):
        if value and not re.fullmatch(f"{prefix}-[0-9a-f]+", value):
            hint = f"give one such as {prefix}-0123456789abcdef0, or leave it empty for a network of the stack's own"
            raise SettingError(key, value, f"is no ID of a {'VPC' if prefix == 'vpc' else prefix}", hint)
    if bool(vpc_id) != bool(subnet_id):
        key, value, other = ("vpcId", vpc_id, "subnetId") if vpc_id else ("subnetId", subnet_id, "vpcId")
        raise SettingError(key, value, f"comes without {other}", f"give {other}, too, or leave both empty")


def ami_id(key: str, value: str) -> None:
    """ID of a machine image, or nothing."""
    if value and not re.fullmatch(r"ami-([0-9a-f]{8}|[0-9a-f]{17})", value):
        hint = "give one such as ami-0123456789abcdef0, or leave it empty for AWS's newest one for ECS"
        raise SettingError(key, value, "is no ID of a machine image", hint)


def availability_zone(value: str) -> None:
    """A zone's name, or nothing."""
    if value and not re.fullmatch(r"[a-z]+(-[a-z0-9]+)+", value):
        hint = "give one such as us-west-2a, or leave it empty to have one chosen"
        raise SettingError("availabilityZone", value, "is no name of an availability zone", hint)


def image_uri(value: str) -> None:
    """An image's address with its registry, and a tag or a digest, or nothing.

    https://pkg.go.dev/github.com/distribution/reference
    """
    if value and not re.fullmatch(IMAGE, value):
        hint = "give registry/repository:tag or registry/repository@sha256:digest, or leave it empty to build docker/"
        raise SettingError("imageUri", value, "is no image reference", hint)


def data_buckets(values: tuple[str, ...]) -> None:
    """Buckets by S3's rules, each with a prefix or without.

    https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html
    """
    for value in values:
        name, _, prefix = value.partition("/")
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", name) or re.search(r"[*?\s]|//|^/|\$\{", prefix):
            hint = "give bucket or bucket/prefix, without s3:// and wildcards, several with commas between them"
            raise SettingError("dataBuckets", value, "names no bucket", hint)


def root_volume_gib(value: int) -> None:
    """Room for the machine image and the training image."""
    if not SMALLEST_ROOT_VOLUME_GIB <= value <= LARGEST_ROOT_VOLUME_GIB:
        problem = (
            f"is outside {SMALLEST_ROOT_VOLUME_GIB} (machine image and training image) to {LARGEST_ROOT_VOLUME_GIB}"
        )
        raise SettingError("rootVolumeGiB", value, problem, "give the size of the root disk in GiB, such as 100")


def log_retention_days(value: int) -> None:
    """One of CloudWatch's periods."""
    if value not in RETENTION_DAYS:
        hint = f"give one of {', '.join(map(str, RETENTION_DAYS))}"
        raise SettingError("logRetentionDays", value, "is no period that CloudWatch Logs keeps logs for", hint)


def idle_timeout_minutes(value: int) -> None:
    """Off, or longer than a worker needs to start."""
    if value and not SHORTEST_IDLE_MINUTES <= value <= LONGEST_IDLE_MINUTES:
        problem = f"is outside {SHORTEST_IDLE_MINUTES} (starting a worker takes ten) to {LONGEST_IDLE_MINUTES} (a day)"
        raise SettingError("idleTimeoutMinutes", value, problem, "give minutes, such as 60, or 0 to never stop")


def redeploy_workers(value: str) -> None:
    """A word, or nothing."""
    if not re.fullmatch(r"[\w.:-]*", value):
        hint = "give another one than at the last `pulumi up`, such as today's date, or leave it empty"
        raise SettingError("redeployWorkers", value, "is no single word", hint)


def max_hourly_usd(value: float) -> None:
    """A limit in dollars, or 0 for none."""
    if value < 0 or not math.isfinite(value):
        raise SettingError("maxHourlyUsd", value, "is no amount of dollars", "give one, such as 5.5, or 0 for no limit")


def alert_email(value: str) -> None:
    """One address, or nothing."""
    if value and not re.fullmatch(r"[^@\s,;<>]+@[^@\s,;<>.]+(\.[^@\s,;<>.]+)+", value):
        hint = "give one address, such as team@example.com, or leave it empty"
        raise SettingError("alertEmail", value, "is no e-mail address", hint)


def monthly_budget_usd(value: int) -> None:
    """What AWS Budgets takes as a limit."""
    if value < 1:
        raise SettingError("monthlyBudgetUsd", value, "is below 1", "give whole dollars a month, such as 500")
