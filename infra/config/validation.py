"""Validation rules for configuration values that need no call to AWS.

A rule of one value takes the key and the value and raises SettingError; settings.py attaches it to the field. Rules of
several values come last.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable, Mapping, Sequence

import pulumi

from infra.definitions.policies import ECR_IMAGE
from infra.errors import SettingError
from infra.tags import TAG_PREFIX
from infra.types import known

SMALLEST_ROOT_VOLUME_GIB = 50
LARGEST_ROOT_VOLUME_GIB = 16384
# CloudWatch Logs accepts only these retention periods.
# https://docs.aws.amazon.com/AmazonCloudWatchLogs/latest/APIReference/API_PutRetentionPolicy.html
RETENTION_DAYS = (
    1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731, 1096, 1827, 2192, 2557, 2922, 3288, 3653,
)  # fmt: skip
# Docker's default bridge on every instance: instances can't reach VPC addresses in this range.
DOCKER_BRIDGE = ipaddress.IPv4Network("172.17.0.0/16")
# RFC 1918, and RFC 6598, which AWS also accepts for VPCs.
PRIVATE_RANGES = tuple(
    ipaddress.IPv4Network(cidr) for cidr in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")
)
# A bare name is more often a mistake than Docker Hub's `latest` of that name, so a tag or a digest is required.
TAG, DIGEST = r":\w[\w.-]{0,127}", r"@sha256:[0-9a-f]{64}"
IMAGE = rf"([\w.-]+(:\d+)?/)?[a-z0-9][a-z0-9._/-]*({TAG}|({TAG})?{DIGEST})"
# A worker takes up to ten minutes to start, most of it the image pull; a shorter idle time would stop it before that.
SHORTEST_IDLE_MINUTES = 15
# A CloudWatch alarm evaluates at most one day.
# https://docs.aws.amazon.com/AmazonCloudWatch/latest/APIReference/API_PutMetricAlarm.html
LONGEST_IDLE_MINUTES = 24 * 60
ARN = "arn:aws[a-z-]*"
POLICY_ARN = rf"{ARN}:iam::(aws|\d{{12}}):policy/[\w+=,.@/-]+"
SECRET_ARN = rf"{ARN}:secretsmanager:[a-z0-9-]+:\d{{12}}:secret:[\w/+=.@-]+"
# https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_iam-quotas.html
MAX_POLICIES = 10
BUCKET = "[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"
# Tags by which the program finds its stack, and ECS its instances.
OWN_TAGS = {"name", "amazonecsmanaged"}
TAG_TEXT = r"[\w .:/=+\-@]{{{},{}}}"
# IAM's limit for a path; role names do not count against it.
LONGEST_ROLE_PATH = 512
NEW_NETWORK = "or leave it empty to create a network"

Rule = Callable[[str, str], None]
ListRule = Callable[[str, Sequence[str]], None]


def matching(pattern: str, kind: str, hint: str, *, required: bool = False) -> Rule:
    """Rule for a string: it matches the pattern, or is empty unless it is required."""

    def check(key: str, value: str) -> None:
        if (value or required) and not re.fullmatch(pattern, value):
            raise SettingError(key, value, f"is not {kind}", hint)

    return check


def unique(rule: Rule) -> ListRule:
    """Rule for a list: each element passes `rule`, without duplicates."""

    def check(key: str, values: Sequence[str]) -> None:
        for value in values:
            rule(key, value)
        for value in values:
            if values.count(value) > 1:
                raise SettingError(key, ",".join(values), f"contains {value} twice", "list each value once")

    return check


instance_type = matching(
    r"[a-z][a-z0-9-]*\.[a-z0-9-]+",
    "an EC2 instance type",
    "use a family and a size, e.g. g5.xlarge",
    required=True,
)
optional_instance_types = unique(instance_type)
ami_id = matching(
    r"ami-([0-9a-f]{8}|[0-9a-f]{17})",
    "an AMI ID",
    "use one like ami-0123456789abcdef0, or leave it empty for the latest Amazon ECS-optimized AMI",
)
# The value is compared with the last deployment's, so any text without blanks serves.
trigger = matching(
    r"[\w.:-]*",
    "a single word",
    "use another word than at the last `pulumi up`, e.g. today's date, or leave it empty",
)
vpc_id = matching("vpc-[0-9a-f]+", "a VPC ID", f"use one like vpc-0123456789abcdef0, {NEW_NETWORK}")
subnet_ids = unique(
    matching("subnet-[0-9a-f]+", "a subnet ID", f"use one like subnet-0123456789abcdef0, {NEW_NETWORK}", required=True)
)
availability_zones = unique(
    matching(
        "[a-z]+(-[a-z0-9]+)+",
        "an availability zone",
        "use names like us-west-2a, separated by commas, or leave it empty to have one chosen",
        required=True,
    )
)
# https://pkg.go.dev/github.com/distribution/reference
image_uri = matching(
    IMAGE,
    "an image reference",
    "use registry/repository:tag or registry/repository@sha256:digest, or leave it empty to build docker/",
)
registry_secret_arn = matching(
    SECRET_ARN,
    "a Secrets Manager ARN",
    'use a secret that contains {"username": "...", "password": "..."}, or leave it empty',
)
job_secrets = unique(
    matching(
        SECRET_ARN,
        "a Secrets Manager ARN",
        "use the ARNs that `aws secretsmanager list-secrets` shows, separated by commas",
        required=True,
    )
)
alert_email = matching(
    r"[^@\s,;<>]+@[^@\s,;<>.]+(\.[^@\s,;<>.]+)+",
    "a valid email address",
    "use one address, e.g. team@example.com, or leave it empty",
)
permissions_boundary = matching(
    POLICY_ARN,
    "an IAM policy ARN",
    "use one like arn:aws:iam::123456789012:policy/boundary, or leave it empty",
)
# A KMS alias can move to another key, and data that is already encrypted does not follow it.
kms_key_arn = matching(
    rf"{ARN}:kms:[a-z0-9-]+:\d{{12}}:key/[\w-]+",
    "a KMS key ARN",
    "use one like arn:aws:kms:us-west-2:123456789012:key/…, not an alias, or leave it empty for AWS keys",
)


def instance_types(key: str, values: Sequence[str]) -> None:
    """At least one EC2 instance type, without duplicates."""
    optional_instance_types(key, values or ("",))


def idle_timeout_minutes(key: str, value: int) -> None:
    """0 to disable the scale-in, or longer than a worker takes to start."""
    if value and not SHORTEST_IDLE_MINUTES <= value <= LONGEST_IDLE_MINUTES:
        problem = (
            f"must be {SHORTEST_IDLE_MINUTES} (a worker takes ten minutes to start) to {LONGEST_IDLE_MINUTES} (a day)"
        )
        raise SettingError(key, value, problem, "use minutes, e.g. 60, or 0 to disable the scale-in")


def on_demand_workers(key: str, value: int) -> None:
    """A number of workers, not negative."""
    if value < 0:
        raise SettingError(key, value, "must not be negative", "use a number of workers, or 0")


def vpc_cidr(key: str, value: str) -> None:
    """A private IPv4 CIDR block with room for a cluster, apart from Docker's bridge."""
    hint = "use a private IPv4 CIDR block of /16 to /24, e.g. 10.0.0.0/16"
    try:
        network = ipaddress.IPv4Network(value)
    except ValueError as error:
        raise SettingError(key, value, f"is not an IPv4 CIDR block ({error})", hint) from error
    if not 16 <= network.prefixlen <= 24:
        problem = "must be /16 (the largest VPC) to /24 (the smallest with room for a cluster)"
        raise SettingError(key, value, problem, hint)
    if not any(network.subnet_of(private) for private in PRIVATE_RANGES):
        problem = f"is public; private ranges are {', '.join(map(str, PRIVATE_RANGES))}"
        raise SettingError(key, value, problem, hint)
    if network.overlaps(DOCKER_BRIDGE):
        raise SettingError(key, value, f"overlaps Docker's bridge {DOCKER_BRIDGE} on every instance", hint)


def bucket_name(key: str, value: str) -> None:
    """Name of an S3 general purpose bucket, or empty.

    https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html
    """
    _general_purpose(key, value)
    if value and not re.fullmatch(BUCKET, value):
        raise SettingError(key, value, "is not an S3 bucket name", "use the name without s3:// and a prefix")


def data_buckets(key: str, values: Sequence[str]) -> None:
    """S3 general purpose buckets, each with or without a prefix."""
    for value in values:
        name, _, prefix = value.partition("/")
        _general_purpose(key, name)
        if not re.fullmatch(BUCKET, name) or re.search(r"[*?\s]|//|^/|\$\{", prefix):
            hint = "use bucket or bucket/prefix, without s3:// and wildcards, separated by commas"
            raise SettingError(key, value, "is not an S3 bucket", hint)


def _general_purpose(key: str, bucket: str) -> None:
    # Directory buckets (S3 Express One Zone) need s3express:CreateSession, which the task roles don't have.
    # https://docs.aws.amazon.com/AmazonS3/latest/userguide/s3-express-security-iam.html
    if bucket.endswith("--x-s3"):
        problem = "is a directory bucket, which needs other IAM permissions"
        raise SettingError(key, bucket, problem, "use a general purpose bucket")


def object_version_days(key: str, value: int) -> None:
    """Days that S3 keeps noncurrent versions; 0 disables versioning."""
    if not 0 <= value <= 3650:
        raise SettingError(key, value, "must be 0 to 3650", "use a number of days, or 0 to keep no versions")


def root_volume_gib(key: str, value: int) -> None:
    """Room for the AMI and the training image, within the limits of gp3."""
    if not SMALLEST_ROOT_VOLUME_GIB <= value <= LARGEST_ROOT_VOLUME_GIB:
        problem = f"must be {SMALLEST_ROOT_VOLUME_GIB} (AMI and training image) to {LARGEST_ROOT_VOLUME_GIB}"
        raise SettingError(key, value, problem, "use the size of the root volume in GiB, e.g. 100")


def log_retention_days(key: str, value: int) -> None:
    """A retention period of CloudWatch Logs."""
    if value not in RETENTION_DAYS:
        hint = f"use one of {', '.join(map(str, RETENTION_DAYS))}"
        raise SettingError(key, value, "is not a retention period of CloudWatch Logs", hint)


def max_hourly_usd(key: str, value: float) -> None:
    """Maximum cost in USD, or 0 for no limit."""
    if value < 0 or not math.isfinite(value):
        raise SettingError(key, value, "is not an amount in USD", "use one, e.g. 5.5, or 0 for no limit")


def monthly_budget_usd(key: str, value: int) -> None:
    """A limit that AWS Budgets accepts."""
    if value < 1:
        raise SettingError(key, value, "must be at least 1", "use whole USD per month, e.g. 500")


def tags(key: str, values: Mapping[str, str]) -> None:
    """Tags that every AWS service accepts, apart from the stack's own.

    https://docs.aws.amazon.com/tag-editor/latest/userguide/best-practices-and-strats.html
    """
    hint = "use key=value of letters, digits, spaces and _.:/=+-@, separated by commas"
    folded = [name.lower() for name in values]
    for name, value in values.items():
        tag = f"{name}={value}"
        if folded.count(name.lower()) > 1:
            # https://docs.aws.amazon.com/IAM/latest/UserGuide/id_tags.html
            problem = "has a key that differs only in case from another, and IAM ignores case"
            raise SettingError(key, tag, problem, "use each key once")
        if name.lower() in OWN_TAGS or name.lower().startswith(TAG_PREFIX):
            raise SettingError(key, tag, f"uses a reserved key of this stack ({name})", "use another key")
        if not re.fullmatch(TAG_TEXT.format(1, 128), name) or not re.fullmatch(TAG_TEXT.format(0, 256), value):
            raise SettingError(key, tag, "is not a valid tag for all AWS services", hint)
        if name.lower().startswith("aws:"):
            raise SettingError(key, tag, "uses the prefix aws:, which AWS reserves", hint)


def policy_arns(key: str, values: Sequence[str]) -> None:
    """ARNs of IAM policies, at most as many as a role takes by default."""
    hint = "use ARNs like arn:aws:iam::123456789012:policy/read-features, separated by commas"
    unique(matching(POLICY_ARN, "an IAM policy ARN", hint, required=True))(key, values)
    if len(values) > MAX_POLICIES:
        problem = f"has more than the {MAX_POLICIES} managed policies that a role takes"
        raise SettingError(key, ",".join(values), problem, "combine policies")


def role_path(key: str, value: str) -> None:
    """An IAM path, with a slash at both ends.

    https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_identifiers.html
    """
    if not re.fullmatch(r"/([!-.0-~]+/)*", value) or len(value) > LONGEST_ROLE_PATH:
        raise SettingError(key, value, "is not an IAM path", "use one like /teams/ml/, or keep /")


def counts(kind: str, count: int, min_count: int, max_count: int | None) -> None:
    """0 <= min_count <= count <= max_count; a max_count of None (0 in Pulumi.yaml) stands for `count`."""
    count_key, min_key, max_key = f"{kind[0].lower()}{kind[1:]}Count", f"min{kind}s", f"max{kind}s"
    if count < 0:
        instances = "GPU" if kind == "Worker" else "CPU"
        raise SettingError(
            count_key, count, "must not be negative", f"use a number of {instances} instances, 0 for none"
        )
    if min_count < 0:
        hint = f"use the number of instances that the scale-in keeps, or `pulumi config rm {min_key}` for 0"
        raise SettingError(min_key, min_count, "must not be negative", hint)
    if max_count is not None and max_count < 0:
        raise SettingError(max_key, max_count, "must not be negative", "use a number of instances")
    if max_count is not None and min_count > max_count:
        problem = f"must not exceed {max_key} ({max_count})"
        raise SettingError(min_key, min_count, problem, f"lower it, or raise {max_key}")
    if min_count > count:
        problem = f"must not exceed {count_key} ({count})"
        raise SettingError(min_key, min_count, problem, f"lower it, or raise {count_key}")
    if max_count is not None and max_count < count:
        problem = f"must be at least {count_key} ({count})"
        raise SettingError(max_key, max_count, problem, f"raise it, or lower {count_key}")


def on_demand(value: int, max_count: int, *, spot: bool) -> None:
    """On-demand base capacity, which only Spot Instances leave room for."""
    if value and not spot:
        hint = "set spot to true, or leave it at 0: without spot all workers run on demand"
        raise SettingError("onDemandWorkers", value, "requires spot", hint)
    if max_count and value > max_count:
        problem = f"must not exceed the maximum of {max_count} workers"
        raise SettingError("onDemandWorkers", value, problem, f"use {max_count} or less, or raise maxWorkers")


def cpu_workers(instance_types: Sequence[str], max_count: int) -> None:
    """CPU workers require an instance type."""
    if max_count and not instance_types:
        hint = "use a type, e.g. c6i.2xlarge, or set cpuWorkerCount and maxCpuWorkers to 0"
        raise SettingError("cpuWorkerInstanceTypes", "", f"is required for up to {max_count} CPU workers", hint)


def existing_network(vpc_id: str, subnet_ids: Sequence[str]) -> None:
    """A VPC with subnets, or neither."""
    if vpc_id and not subnet_ids:
        raise SettingError("vpcId", vpc_id, "requires subnetIds", "set subnetIds, or leave both empty")
    if subnet_ids and not vpc_id:
        raise SettingError("subnetIds", ",".join(subnet_ids), "requires vpcId", "set vpcId, or leave both empty")


def spread_zones(value: bool, zones: int) -> None:
    """A job spans zones only where there are several."""
    if value and zones < 2:
        hint = "list several, separated by commas (availabilityZones, or subnetIds for an existing VPC)"
        raise SettingError("spreadZones", "true", "requires at least two availability zones", hint)


def nat_gateway(value: bool, vpc_id: str, image_uri: pulumi.Input[str]) -> None:
    """Without a NAT gateway, nodes reach only services with a VPC endpoint."""
    if value:
        return
    if vpc_id:
        hint = "keep true, and create the VPC's endpoints yourself (docs/accounts.md)"
        raise SettingError("natGateway", "false", f"cannot be combined with vpcId ({vpc_id})", hint)
    if known(image_uri) and not ECR_IMAGE.match(known(image_uri)):
        problem = f"leaves the registry of imageUri ({image_uri}) unreachable"
        raise SettingError("natGateway", "false", problem, "use an image in ECR, or leave imageUri empty")


def existing_bucket(name: pulumi.Input[str], retain: bool, version_days: int) -> None:
    """Settings of the stack's bucket, which is not created with `bucketName`."""
    for key, value, default in (("retainBucket", retain, "false"), ("objectVersionDays", version_days, "0")):
        if name and value:
            problem = f"cannot be combined with bucketName ({known(name) or 'an Output'})"
            hint = f"set {default}: the stack does not change an existing bucket"
            raise SettingError(key, str(value).lower(), problem, hint)


def registry_secret(value: pulumi.Input[str], image_uri: pulumi.Input[str]) -> None:
    """Registry credentials, which need an image outside ECR."""
    if value and not image_uri:
        raise SettingError("registrySecretArn", known(value), "requires imageUri", "set imageUri, or leave both empty")
    if value and ECR_IMAGE.match(known(image_uri)):
        problem = f"cannot be combined with an image in ECR ({image_uri})"
        hint = "leave it empty: the execution role pulls from ECR without a password"
        raise SettingError("registrySecretArn", known(value), problem, hint)
