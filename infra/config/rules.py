"""Rules for arguments that need no call to AWS.

They refuse only values that neither the AWS provider nor a look-up refuses in a preview: CONTRIBUTING.md says which. A
rule of one field takes its name and its value; `combinations` takes all arguments.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from infra.definitions import nat
from infra.definitions.containers import OWN_VARIABLES
from infra.definitions.policies import ECR_IMAGE
from infra.errors import SettingError, warn
from infra.tags import TAG_PREFIX
from infra.types import known
from ray_on_ecs.contract import EFS_MOUNT, FSX_MOUNT, MOUNTS_DIR, field_of

if TYPE_CHECKING:
    from infra.config.args import RayClusterArgs

# AMI and training image; the maximum of gp3, above which only the instances' start fails.
SMALLEST_ROOT_VOLUME_GIB, LARGEST_ROOT_VOLUME_GIB = 50, 16384
# Docker's default bridge on every instance: instances can't reach VPC addresses in this range.
DOCKER_BRIDGE = ipaddress.IPv4Network("172.17.0.0/16")
# RFC 1918, and RFC 6598, which AWS also accepts for VPCs.
PRIVATE_RANGES = tuple(
    ipaddress.IPv4Network(cidr) for cidr in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")
)
# A bare name is more often a mistake than Docker Hub's `latest` of that name, so a tag or a digest is required.
# https://pkg.go.dev/github.com/distribution/reference
TAG, DIGEST = r":\w[\w.-]{0,127}", r"@sha256:[0-9a-f]{64}"
IMAGE = rf"([\w.-]+(:\d+)?/)?[a-z0-9][a-z0-9._/-]*({TAG}|({TAG})?{DIGEST})"
BUILDERS = ("auto", "local", "codebuild")
EFA = ("auto", "true", "false")
# A shorter idle time could stop a worker that still pulls its image. A CloudWatch alarm evaluates at most one day.
# https://docs.aws.amazon.com/AmazonCloudWatch/latest/APIReference/API_PutMetricAlarm.html
SHORTEST_IDLE_MINUTES, LONGEST_IDLE_MINUTES = 15, 24 * 60
# CloudWatch may evaluate data points of the last minutes again while newer ones are missing.
# https://docs.aws.amazon.com/AmazonCloudWatch/latest/monitoring/alarms-and-missing-data.html
SHORTEST_SLEEP_MINUTES = 15
EMAIL = r"[^@\s,;<>]+@[^@\s,;<>.]+(\.[^@\s,;<>.]+)+"
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html
BUCKET = "[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"
OF_BUCKET = "use the name of a bucket, without s3://; only data_buckets take bucket/prefix, and several by commas"
# General purpose buckets can't have the names of access points and of other kinds of buckets, nor of IP addresses.
RESERVED_BUCKET = r"(xn--|sthree-|amzn-s3-demo-).*|.*(-s3alias|--ol-s3|\.mrap|--x-s3|--table-s3)|(\d+\.){3}\d+|.*\.\..*"
# Of a folder below MOUNTS_DIR; and an ID of FSx and EFS, of which both have two lengths.
MOUNT = r"[A-Za-z0-9]([A-Za-z0-9-]{0,30}[A-Za-z0-9])?"
# Of all mounts together, as they are in an instance's user data (16 KiB) and in its role's inline policies (10,240).
LONGEST_MOUNTS = 8000
FILE_SYSTEM = r"fs-[0-9a-f]{8,17}"
# https://docs.aws.amazon.com/service-authorization/latest/reference/reference_policies_actions-resources-contextkeys.html
POLICY_ARN = r"arn:[\w-]+:iam::(\d{12}|aws):policy/[\w+=,.@/-]+"
SECRET_ARN = r"arn:[\w-]+:secretsmanager:[a-z0-9-]+:\d{12}:secret:[\w/+=.@!-]+"
KEY_ARN = r"arn:[\w-]+:kms:[a-z0-9-]+:\d{12}:key/[\w-]+"
RESERVATION_ID = "cr-[0-9a-f]{8,17}"
VARIABLE = r"[A-Za-z_]\w*"
# Variables of ECS, of AWS's credentials, which would replace those of the task role, and of the image.
OWN_PREFIXES = (
    *("AWS_ACCESS", "AWS_CONFIG_FILE", "AWS_CONTAINER_", "AWS_PROFILE", "AWS_ROLE_", "AWS_SECRET", "AWS_SESSION"),
    *("AWS_SHARED_", "AWS_WEB_IDENTITY", "ECS_", "LD_PRELOAD", "PATH", "PYTHONPATH", "RAY_ON_ECS_"),
)
LOG_VARIABLE = "RAY_ON_ECS_LOG"
SECRET_VARIABLE = r"(TOKEN|SECRET|PASSWORD|API_?KEY|ACCESS_?KEY)$"
# Tags by which ECS finds its instances, and AWS's users this stack.
OWN_TAGS = {"name", "amazonecsmanaged"}
TAG_TEXT = r"[\w .:/=+\-@]{{{},{}}}"
# IAM's limit for a path; role names do not count against it.
LONGEST_ROLE_PATH = 512


def not_empty(field: str, values: Sequence[str]) -> None:
    """At least one value."""
    if not values:
        raise SettingError(field, "", "is empty", "use a family and a size, e.g. g5.xlarge")


def at_least_0(field: str, value: float) -> None:
    """A count, a number of days or an amount."""
    if not math.isfinite(value):
        raise SettingError(field, value, "is not a finite number", "use e.g. 50, or 0")
    if value < 0:
        raise SettingError(field, value, "must not be negative", "use a number, or 0")


def at_least_1(field: str, value: int) -> None:
    """An amount that AWS Budgets accepts."""
    if value < 1:
        raise SettingError(field, value, "must be at least 1", "use whole USD per month, e.g. 500")


def idle_timeout(field: str, value: int) -> None:
    """0 to disable the scale-in, or longer than a worker takes to start."""
    if value and not SHORTEST_IDLE_MINUTES <= value <= LONGEST_IDLE_MINUTES:
        shortest = f"{SHORTEST_IDLE_MINUTES} (a worker may pull its image for minutes)"
        problem = f"must be {shortest} to {LONGEST_IDLE_MINUTES} (a day)"
        raise SettingError(field, value, problem, "use minutes, e.g. 60, or 0 to disable the scale-in")


def sleep_minutes(field: str, value: int) -> None:
    """0 for a head that does not sleep, or longer than the alarms may act on a request of before."""
    if value and not SHORTEST_SLEEP_MINUTES <= value <= LONGEST_IDLE_MINUTES:
        problem = f"must be {SHORTEST_SLEEP_MINUTES} to {LONGEST_IDLE_MINUTES} (a day)"
        raise SettingError(field, value, problem, "use minutes, e.g. 60, or 0 for a head that does not sleep")


def root_volume(field: str, value: int) -> None:
    """Room for the AMI and the training image."""
    if not SMALLEST_ROOT_VOLUME_GIB <= value <= LARGEST_ROOT_VOLUME_GIB:
        problem = f"must be {SMALLEST_ROOT_VOLUME_GIB} (AMI and training image) to {LARGEST_ROOT_VOLUME_GIB}"
        raise SettingError(field, value, problem, "use the size of the root volume in GiB, e.g. 100")


def efa(field: str, value: str) -> None:
    """True, false, or auto, as text."""
    if value not in EFA:
        raise SettingError(field, value, "must be auto, true or false", "use one of these, or remove it for false")


def pool_volume(field: str, value: int) -> None:
    """Size of a pool's root volumes, or 0 for the cluster's."""
    if value:
        root_volume(field, value)


def vpc_cidr(field: str, value: str) -> None:
    """A private IPv4 CIDR block with room for a cluster, apart from Docker's bridge."""
    hint = "use a private IPv4 CIDR block of /16 to /24, e.g. 10.0.0.0/16"
    try:
        network = ipaddress.IPv4Network(value)
    except ValueError as error:
        raise SettingError(field, value, f"is not an IPv4 CIDR block ({error})", hint) from error
    if not 16 <= network.prefixlen <= 24:
        problem = "must be /16 (the largest VPC) to /24 (the smallest with room for a cluster)"
        raise SettingError(field, value, problem, hint)
    if not any(network.subnet_of(private) for private in PRIVATE_RANGES):
        problem = f"is public; private ranges are {', '.join(map(str, PRIVATE_RANGES))}"
        raise SettingError(field, value, problem, hint)
    if network.overlaps(DOCKER_BRIDGE):
        raise SettingError(field, value, f"overlaps Docker's bridge {DOCKER_BRIDGE} on every instance", hint)


def image(field: str, value: str) -> None:
    """An image reference with a tag or a digest."""
    if value and not re.fullmatch(IMAGE, value):
        hint = "use registry/repository:tag or registry/repository@sha256:digest, or leave it empty to build docker/"
        raise SettingError(field, value, "is not an image reference", hint)


def image_build(field: str, value: str) -> None:
    """One of the builders."""
    if value not in BUILDERS:
        raise SettingError(field, value, f"is not one of {', '.join(BUILDERS)}", "codebuild needs no Docker")


def email(field: str, value: str) -> None:
    """One email address."""
    if value and not re.fullmatch(EMAIL, value):
        hint = "use one address, e.g. team@example.com, or leave it empty"
        raise SettingError(field, value, "is not a valid email address", hint)


def bucket(field: str, value: str) -> None:
    """Name of an S3 general purpose bucket, or empty."""
    if value:
        _check_bucket(field, value, value, "")


def data_buckets(field: str, values: Sequence[str]) -> None:
    """S3 general purpose buckets, each with or without a prefix."""
    for value in values:
        name, _, prefix = value.partition("/")
        _check_bucket(field, value, name, prefix)


def mounts(field: str, values: Mapping[str, str]) -> None:
    """Folders of S3 by the names of their folders on the nodes."""
    for name, address in values.items():
        if not re.fullmatch(MOUNT, name):
            hint = "use up to 32 letters, digits and hyphens, e.g. data=s3://my-data/faces"
            raise SettingError(field, name, "is not a name of a mount", hint)
        if name in (FSX_MOUNT, EFS_MOUNT):
            key = "fsx_lustre" if name == FSX_MOUNT else name
            hint = f"use another name: {MOUNTS_DIR}/{name} is that of {key}"
            raise SettingError(field, name, "is a reserved name", hint)
        if "=s3://" in address:
            raise SettingError(field, f"{name}={address}", "has several mounts", "separate mounts by commas")
        bucket, _, prefix = address.removeprefix("s3://").partition("/")
        shown, hint = f"{name}={address}", f"use e.g. {name}=s3://my-data/faces"
        if not address.startswith("s3://") or not address.isprintable():
            raise SettingError(field, shown, "is not a folder of S3", hint)
        _check_bucket(field, shown, bucket, prefix, hint)
    if sum(250 + 6 * len(name) + 4 * len(address) for name, address in values.items()) > LONGEST_MOUNTS:
        problem = "are too many or too long for the instances' user data and role"
        raise SettingError(field, f"{len(values)} folders", problem, "use fewer, e.g. a prefix that several share")


def file_system(field: str, value: str) -> None:
    """ID of a file system of FSx or EFS, or empty."""
    if value and not re.fullmatch(FILE_SYSTEM, value):
        new = ", or fsx_lustre_gib for a new one" if field == "fsx_lustre" else ""
        hint = f"use its ID, e.g. fs-0123456789abcdef0, whose root folder all nodes mount{new}"
        raise SettingError(field, value, "is not the ID of a file system", hint)


def lustre_gib(field: str, value: int) -> None:
    """A capacity of FSx for Lustre, PERSISTENT_2 on SSD, or 0 for none.

    https://docs.aws.amazon.com/fsx/latest/APIReference/API_CreateFileSystem.html
    """
    if value and value != 1200 and (value < 2400 or value % 2400):
        raise SettingError(field, value, "is not a capacity of FSx for Lustre", "use 1200, 2400 or a multiple of 2400")


def _check_bucket(field: str, value: str, name: str, prefix: str, hint: str = OF_BUCKET) -> None:
    if re.fullmatch(RESERVED_BUCKET, name):
        problem = "is a directory bucket, an access point or another name that S3 reserves"
        raise SettingError(field, value, problem, "use the name of a general purpose bucket")
    if not re.fullmatch(BUCKET, name):
        raise SettingError(field, value, "is not an S3 bucket", hint)
    if re.search(r"[*?\s]|//|^/|\$\{", prefix):
        hint = "use one without spaces, *, ?, ${ and empty folders (//), and commas between several buckets"
        raise SettingError(field, value, f"has the prefix {prefix!r}", hint)


def environment(field: str, values: Mapping[str, str]) -> None:
    """Environment variables that the containers don't set themselves."""
    for variable in values:
        if variable in OWN_VARIABLES or (variable.startswith(OWN_PREFIXES) and variable != LOG_VARIABLE):
            raise SettingError(field, variable, "is reserved for the cluster's containers", "use another name")
        if not re.fullmatch(VARIABLE, variable, re.ASCII):
            hint = "use letters, digits and _, e.g. NCCL_DEBUG=INFO"
            raise SettingError(field, variable, "is not the name of an environment variable", hint)
        if re.search(SECRET_VARIABLE, variable, re.I):
            warn(
                f"{field}: {variable} is plain in the state and in task definitions; give jobs secrets with job_secrets"
            )


def policy_arn(field: str, value: str | Sequence[str]) -> None:
    """ARNs of IAM policies."""
    _check_arns(field, value, POLICY_ARN, "an IAM policy", "arn:aws:iam::123456789012:policy/NAME")


def secret_arn(field: str, value: str | Sequence[str]) -> None:
    """ARNs of Secrets Manager secrets."""
    example = "arn:aws:secretsmanager:us-west-2:123456789012:secret:NAME-a1b2c3"
    _check_arns(field, value, SECRET_ARN, "a Secrets Manager secret", example)


def reservation_id(field: str, value: str) -> None:
    """ID of a capacity reservation, or empty."""
    if value and not re.fullmatch(RESERVATION_ID, value):
        hint = "use its ID, e.g. cr-0123456789abcdef0, which `aws ec2 describe-capacity-reservations` lists"
        raise SettingError(field, value, "is not the ID of a capacity reservation", hint)


def key_arn(field: str, value: str) -> None:
    """ARN of a KMS key: an alias can move to another key, and data that is already encrypted does not follow it."""
    example = "arn:aws:kms:us-west-2:123456789012:key/KEY-ID"
    _check_arns(field, value, KEY_ARN, "a KMS key", f"{example}, which `aws kms describe-key` prints also for an alias")


def _check_arns(field: str, value: str | Sequence[str], pattern: str, kind: str, example: str) -> None:
    for arn in (value,) if isinstance(value, str) else value:
        if arn and not re.fullmatch(pattern, arn, re.ASCII):
            raise SettingError(field, arn, f"is not the ARN of {kind}", f"use e.g. {example}")


def tags(field: str, values: Mapping[str, str]) -> None:
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
            raise SettingError(field, tag, problem, "use each key once")
        if name.lower() in OWN_TAGS or name.lower().startswith(TAG_PREFIX):
            raise SettingError(field, tag, f"uses a reserved key of this stack ({name})", "use another key")
        if not re.fullmatch(TAG_TEXT.format(1, 128), name) or not re.fullmatch(TAG_TEXT.format(0, 256), value):
            raise SettingError(field, tag, "is not a valid tag for all AWS services", hint)
        if name.lower().startswith("aws:"):
            raise SettingError(field, tag, "uses the prefix aws:, which AWS reserves", hint)


def default_tags(values: Mapping[str, str], own: Collection[str]) -> None:
    """Default tags of the AWS provider, which it adds to the tags of a resource with other keys."""
    tags("aws:defaultTags", {name: value for name, value in values.items() if name not in own})
    folded = {name.lower(): name for name in own}
    for name in values:
        if folded.get(name.lower(), name) != name:
            problem = f"differs only in case from the tag {folded[name.lower()]}, and IAM ignores case"
            raise SettingError("aws:defaultTags", name, problem, "use the same case, or another key")


def role_path(field: str, value: str) -> None:
    """An IAM path, with a slash at both ends.

    https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_identifiers.html
    """
    if not re.fullmatch(r"/([!-.0-~]+/)*", value) or len(value) > LONGEST_ROLE_PATH:
        raise SettingError(field, value, "is not an IAM path", "use one like /teams/ml/, or keep /")


def combinations(args: RayClusterArgs) -> None:
    """Refuse fields that contradict each other."""
    max_cpu_workers = max(args.max_cpu_workers, args.cpu_worker_count, args.min_cpu_workers)
    if max_cpu_workers and not args.cpu_worker_instance_types:
        hint = "use a type, e.g. c6i.2xlarge, or set the numbers of CPU workers to 0"
        raise SettingError(
            "cpu_worker_instance_types", "", f"is required for up to {max_cpu_workers} CPU workers", hint
        )
    _require(args, "vpc_id", "subnet_ids", "a VPC is used only with its subnets")
    _require(args, "subnet_ids", "vpc_id", "subnets are used only with their VPC")
    _require(args, "registry_secret_arn", "image_uri", "it is the password of that image's registry")
    if args.spread_zones and len(args.availability_zones or args.subnet_ids) < 2:
        hint = "list several in availability_zones, or in subnet_ids for an existing VPC"
        raise SettingError("spread_zones", True, "requires at least two availability zones", hint)
    if not args.nat_gateway:
        hint = "keep true, and create the VPC's endpoints yourself (docs/accounts.md)"
        _exclude(args, "nat_gateway", "vpc_id", hint)
        if known(args.image_uri) and not ECR_IMAGE.match(known(args.image_uri)):
            problem = f"leaves the registry of image_uri ({args.image_uri}) unreachable"
            raise SettingError("nat_gateway", False, problem, "use an image in ECR, or leave image_uri empty")
    if args.nat_instance:
        if not args.nat_gateway:
            problem = "replaces the NAT gateway, and nat_gateway (false) wants no internet access"
            raise SettingError("nat_instance", True, problem, "leave out one of the two")
        _exclude(args, "nat_instance", "vpc_id", "leave it out: an existing VPC keeps its way to the internet")
    for name in ("fsx_lustre", "efs"):
        _require(args, name, "vpc_id", "nodes reach a file system only in its own VPC")
    if args.fsx_lustre_gib:
        _exclude(args, "fsx_lustre_gib", "fsx_lustre", "leave out one of the two: both would be /mnt/fsx")
    for name in ("retain_bucket", "object_version_days"):
        if getattr(args, name):
            _exclude(args, name, "bucket_name", "leave it out: the stack does not change an existing bucket")
    if args.sleep_after_minutes:
        _check_sleep(args)
    if args.registry_secret_arn and ECR_IMAGE.match(known(args.image_uri)):
        hint = "leave it empty: the execution role pulls from ECR without a password"
        _exclude(args, "registry_secret_arn", "image_uri", hint)


def _check_sleep(args: RayClusterArgs) -> None:
    """Refuse what keeps workers up, and what takes the internet from them."""
    kept = {field_of(name, "min"): pool.min for name, pool in args.pools.items() if pool.min}
    if not args.idle_timeout_minutes:
        kept["idle_timeout_minutes"] = 0
    if kept:
        problem = f"cannot be combined with {' and '.join(f'{name} ({value})' for name, value in kept.items())}"
        hint = "let all workers scale in, or set sleep_after_minutes to 0: a head with workers does not sleep"
        raise SettingError("sleep_after_minutes", args.sleep_after_minutes, problem, hint)
    # Workers may outlive a lost head, and end by their idle timeout, which needs the way to ECS.
    longest = args.sleep_after_minutes + nat.UNNEEDED_MINUTES
    if args.nat_instance and args.idle_timeout_minutes > longest:
        most = f"sleep_after_minutes ({args.sleep_after_minutes}) + {nat.UNNEEDED_MINUTES}"
        problem = f"exceeds {most}: with nat_instance the way to ECS could end before the workers"
        hint = f"use at most {longest}, a longer sleep_after_minutes, or nat_instance false"
        raise SettingError("idle_timeout_minutes", args.idle_timeout_minutes, problem, hint)


def _require(args: RayClusterArgs, name: str, other: str, reason: str) -> None:
    if getattr(args, name) and not getattr(args, other):
        raise SettingError(name, _shown(getattr(args, name)), f"requires {other}", f"set both or neither: {reason}")


def _exclude(args: RayClusterArgs, name: str, other: str, hint: str) -> None:
    if getattr(args, other):
        problem = f"cannot be combined with {other} ({_shown(getattr(args, other))})"
        raise SettingError(name, _shown(getattr(args, name)), problem, hint)


def _shown(value: object) -> object:
    if isinstance(value, tuple):
        return ",".join(str(_shown(part)) for part in value)
    return value if isinstance(value, str | int) else "an Output"
