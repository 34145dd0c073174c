"""What each value of the stack's configuration must be, as far as it can be told without asking AWS.

Every rule is a function that raises SettingError. Those of one value take its key and the value, and settings.py names
each at its field; those of several come last.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Mapping, Sequence

import pulumi

from infra.definitions.policies import ECR_IMAGE
from infra.errors import SettingError
from infra.references import known
from infra.tags import TAG_PREFIX

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
# A worker takes up to ten minutes to start, most of them for the image; a shorter idle time would stop it before that.
SHORTEST_IDLE_MINUTES = 15
ARN = "arn:aws[a-z-]*"
POLICY_ARN = rf"{ARN}:iam::(aws|\d{{12}}):policy/[\w+=,.@/-]+"
SECRET_ARN = rf"{ARN}:secretsmanager:[a-z0-9-]+:\d{{12}}:secret:[\w/+=.@-]+"
# https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_iam-quotas.html
MOST_POLICIES = 10
BUCKET = "[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"
# Tags by which the program finds its stack, and ECS its instances.
OWN_TAGS = {"name", "amazonecsmanaged"}
TAG_TEXT = r"[\w .:/=+\-@]{{{},{}}}"
OWN_NETWORK = "or leave it empty for a network of the stack's own"
# Our roles' names begin at the end of it.
LONGEST_ROLE_PATH = 512
# An alarm looks back a day at most.
# https://docs.aws.amazon.com/AmazonCloudWatch/latest/APIReference/API_PutMetricAlarm.html
LONGEST_IDLE_MINUTES = 24 * 60


def instance_type(key: str, value: str) -> None:
    """A family and a size."""
    if not re.fullmatch(r"[a-z][a-z0-9-]*\.[a-z0-9-]+", value):
        raise SettingError(key, value, "is not an EC2 instance type", "give a family and a size, such as g5.xlarge")


def instance_types(key: str, values: Sequence[str]) -> None:
    """One type or more, none of them twice."""
    optional_instance_types(key, values or ("",))


def optional_instance_types(key: str, values: Sequence[str]) -> None:
    """Types, none of them twice, or nothing."""
    for value in values:
        instance_type(key, value)
    _once(key, values)


def ami_id(key: str, value: str) -> None:
    """ID of a machine image, or nothing."""
    if value and not re.fullmatch(r"ami-([0-9a-f]{8}|[0-9a-f]{17})", value):
        hint = "give one such as ami-0123456789abcdef0, or leave it empty for AWS's newest one for ECS"
        raise SettingError(key, value, "is not an ID of a machine image", hint)


def idle_timeout_minutes(key: str, value: int) -> None:
    """Off, or longer than a worker needs to start."""
    if value and not SHORTEST_IDLE_MINUTES <= value <= LONGEST_IDLE_MINUTES:
        problem = f"is outside {SHORTEST_IDLE_MINUTES} (starting a worker takes ten) to {LONGEST_IDLE_MINUTES} (a day)"
        raise SettingError(key, value, problem, "give minutes, such as 60, or 0 to never stop")


def on_demand_workers(key: str, value: int) -> None:
    """A number, or 0."""
    if value < 0:
        raise SettingError(key, value, "is below 0", "give a number of workers, or 0 for none")


def any_word(key: str, value: str) -> None:
    """A word, or nothing."""
    if not re.fullmatch(r"[\w.:-]*", value):
        hint = "give another one than at the last `pulumi up`, such as today's date, or leave it empty"
        raise SettingError(key, value, "is not a single word", hint)


def vpc_cidr(key: str, value: str) -> None:
    """A private IPv4 network with room for a cluster, apart from what instances use inside."""
    hint = "give a private IPv4 network of /16 to /24, such as 10.0.0.0/16"
    try:
        network = ipaddress.IPv4Network(value)
    except ValueError as error:
        raise SettingError(key, value, f"is not an IPv4 network ({error})", hint) from error
    if not 16 <= network.prefixlen <= 24:
        problem = "is outside /16 (AWS's largest VPC) to /24 (the smallest with room for a cluster)"
        raise SettingError(key, value, problem, hint)
    if not any(network.subnet_of(private) for private in PRIVATE_RANGES):
        problem = f"is public; private are {', '.join(map(str, PRIVATE_RANGES))}"
        raise SettingError(key, value, problem, hint)
    if network.overlaps(DOCKER_BRIDGE):
        raise SettingError(key, value, f"overlaps Docker's bridge {DOCKER_BRIDGE} on every instance", hint)


def vpc_id(key: str, value: str) -> None:
    """ID of a VPC, or nothing."""
    if value and not re.fullmatch("vpc-[0-9a-f]+", value):
        raise SettingError(
            key, value, "is not an ID of a VPC", f"give one such as vpc-0123456789abcdef0, {OWN_NETWORK}"
        )


def subnet_ids(key: str, values: Sequence[str]) -> None:
    """IDs of subnets, none of them twice, or nothing."""
    for value in values:
        if not re.fullmatch("subnet-[0-9a-f]+", value):
            hint = f"give one such as subnet-0123456789abcdef0, {OWN_NETWORK}"
            raise SettingError(key, value, "is not an ID of a subnet", hint)
    _once(key, values)


def availability_zones(key: str, values: Sequence[str]) -> None:
    """Names of zones, or none."""
    for value in values:
        if not re.fullmatch(r"[a-z]+(-[a-z0-9]+)+", value):
            hint = "give one such as us-west-2a, several with commas between them, or leave it empty to have one chosen"
            raise SettingError(key, value, "is not a name of an availability zone", hint)
    _once(key, values)


def image_uri(key: str, value: str) -> None:
    """An image's address with its registry, and a tag or a digest, or nothing.

    https://pkg.go.dev/github.com/distribution/reference
    """
    if value and not re.fullmatch(IMAGE, value):
        hint = "give registry/repository:tag or registry/repository@sha256:digest, or leave it empty to build docker/"
        raise SettingError(key, value, "is not an image reference", hint)


def registry_secret_arn(key: str, value: str) -> None:
    """ARN of a secret, or nothing."""
    if value and not re.fullmatch(SECRET_ARN, value):
        hint = 'give one with {"username": "...", "password": "..."} in it, or leave it empty'
        raise SettingError(key, value, "is not an ARN of a secret in Secrets Manager", hint)


def job_secrets(key: str, values: tuple[str, ...]) -> None:
    """ARNs of secrets."""
    for value in values:
        if not re.fullmatch(SECRET_ARN, value):
            hint = "give one as aws secretsmanager list-secrets shows it, several with commas between them"
            raise SettingError(key, value, "is not an ARN of a secret in Secrets Manager", hint)
    _once(key, values)


def bucket_name(key: str, value: str) -> None:
    """Bucket by S3's rules, or nothing."""
    _general_purpose(key, value)
    if value and not re.fullmatch(BUCKET, value):
        raise SettingError(key, value, "is not a name of a bucket", "give one without s3:// and a prefix")


def _general_purpose(key: str, bucket: str) -> None:
    if bucket.endswith("--x-s3"):
        problem = "is a directory bucket, to which tasks would need another permission"
        raise SettingError(key, bucket, problem, "give a general purpose bucket")


def object_version_days(key: str, value: int) -> None:
    """Number of days, or 0."""
    if not 0 <= value <= 3650:
        raise SettingError(key, value, "is outside 0 to 3650", "give a number of days, or 0 to keep no versions")


def data_buckets(key: str, values: tuple[str, ...]) -> None:
    """Buckets by S3's rules, each with a prefix or without.

    https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html
    """
    for value in values:
        name, _, prefix = value.partition("/")
        _general_purpose(key, name)
        if not re.fullmatch(BUCKET, name) or re.search(r"[*?\s]|//|^/|\$\{", prefix):
            hint = "give bucket or bucket/prefix, without s3:// and wildcards, several with commas between them"
            raise SettingError(key, value, "names no bucket", hint)


def root_volume_gib(key: str, value: int) -> None:
    """Room for the machine image and the training image."""
    if not SMALLEST_ROOT_VOLUME_GIB <= value <= LARGEST_ROOT_VOLUME_GIB:
        problem = (
            f"is outside {SMALLEST_ROOT_VOLUME_GIB} (machine image and training image) to {LARGEST_ROOT_VOLUME_GIB}"
        )
        raise SettingError(key, value, problem, "give the size of the root disk in GiB, such as 100")


def log_retention_days(key: str, value: int) -> None:
    """One of CloudWatch's periods."""
    if value not in RETENTION_DAYS:
        hint = f"give one of {', '.join(map(str, RETENTION_DAYS))}"
        raise SettingError(key, value, "is not a period that CloudWatch Logs keeps logs for", hint)


def max_hourly_usd(key: str, value: float) -> None:
    """A limit in dollars, or 0 for none."""
    if value < 0 or not math.isfinite(value):
        raise SettingError(key, value, "is not an amount of dollars", "give one, such as 5.5, or 0 for no limit")


def alert_email(key: str, value: str) -> None:
    """One address, or nothing."""
    if value and not re.fullmatch(r"[^@\s,;<>]+@[^@\s,;<>.]+(\.[^@\s,;<>.]+)+", value):
        hint = "give one address, such as team@example.com, or leave it empty"
        raise SettingError(key, value, "is not an e-mail address", hint)


def monthly_budget_usd(key: str, value: int) -> None:
    """What AWS Budgets takes as a limit."""
    if value < 1:
        raise SettingError(key, value, "is below 1", "give whole dollars a month, such as 500")


def tags(key: str, values: Mapping[str, str]) -> None:
    """By AWS's rules, and none of the stack's own.

    https://docs.aws.amazon.com/tag-editor/latest/userguide/best-practices-and-strats.html
    """
    hint = "give key=value of letters, digits, blanks and _.:/=+-@, several with commas between them"
    folded = [name.lower() for name in values]
    for name, value in values.items():
        if folded.count(name.lower()) > 1:
            problem = "has a key that differs from another's in case alone, which IAM takes for the same"
            raise SettingError(key, f"{name}={value}", problem, "give each key once")
        if name.lower() in OWN_TAGS or name.lower().startswith(TAG_PREFIX):
            raise SettingError(key, f"{name}={value}", f"has a key that the stack needs ({name})", "give another key")
        if not re.fullmatch(TAG_TEXT.format(1, 128), name) or not re.fullmatch(TAG_TEXT.format(0, 256), value):
            raise SettingError(key, f"{name}={value}", "is not a tag that all of AWS's services take", hint)
        if name.lower().startswith("aws:"):
            raise SettingError(key, f"{name}={value}", "begins with aws:, which AWS keeps to itself", hint)


def policy_arns(key: str, values: tuple[str, ...]) -> None:
    """ARNs of policies, as many as a role takes by default."""
    for value in values:
        if not re.fullmatch(POLICY_ARN, value):
            hint = "give one such as arn:aws:iam::123456789012:policy/read-features, several with commas between them"
            raise SettingError(key, value, "is not an ARN of an IAM policy", hint)
    _once(key, values)
    if len(values) > MOST_POLICIES:
        raise SettingError(
            key, ",".join(values), f"is more than {MOST_POLICIES} policies", "give policies that allow more"
        )


def permissions_boundary(key: str, value: str) -> None:
    """ARN of a policy, or nothing."""
    if value and not re.fullmatch(POLICY_ARN, value):
        hint = "give one such as arn:aws:iam::123456789012:policy/boundary, or leave it empty"
        raise SettingError(key, value, "is not an ARN of an IAM policy", hint)


def role_path(key: str, value: str) -> None:
    """A path with a slash at both ends.

    https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_identifiers.html
    """
    if not re.fullmatch(r"/([!-.0-~]+/)*", value) or len(value) > LONGEST_ROLE_PATH:
        hint = "give one such as /teams/ml/, or leave it at /"
        raise SettingError(key, value, "is not an IAM path", hint)


def kms_key_arn(key: str, value: str) -> None:
    """ARN of a key, or nothing; aliases can be given to another key, which what is encrypted would not follow."""
    if value and not re.fullmatch(rf"{ARN}:kms:[a-z0-9-]+:\d{{12}}:key/[\w-]+", value):
        hint = "give one such as arn:aws:kms:us-west-2:123456789012:key/…, no alias, or leave it empty for AWS's keys"
        raise SettingError(key, value, "is not an ARN of a KMS key", hint)


def _once(key: str, values: Sequence[str]) -> None:
    for value in values:
        if values.count(value) > 1:
            raise SettingError(key, ",".join(values), f"names {value} twice", "give each once")


def counts(kind: str, count: int, fewest: int, most: int | None) -> None:
    """0 <= fewest <= count <= most, where `most` of None, or 0 in Pulumi.yaml, stands for `count`."""
    keys = {"count": f"{kind[0].lower()}{kind[1:]}Count", "min": f"min{kind}s", "max": f"max{kind}s"}
    if count < 0:
        instances, stack = ("GPU instances", "the stack") if kind == "Worker" else ("CPU instances", "the workers")
        hint = f"give the number of {instances}, or 0 to keep {stack} without any"
        raise SettingError(keys["count"], count, "is below 0", hint)
    if fewest < 0:
        hint = f"give the number of instances that the idle stop leaves, or `pulumi config rm {keys['min']}` for 0"
        raise SettingError(keys["min"], fewest, "is below 0", hint)
    if most is not None and most < 0:
        raise SettingError(keys["max"], most, "is below 0", "give a number of instances")
    if most is not None and fewest > most:
        hint = f"give {most} or less, or raise {keys['max']}"
        raise SettingError(keys["min"], fewest, f"is above {keys['max']}, which is {most}", hint)
    if fewest > count:
        hint = f"give {count} or less, or raise {keys['count']}"
        raise SettingError(keys["min"], fewest, f"is above {keys['count']}, which is {count}", hint)
    if most is not None and most < count:
        problem = f"is below {keys['count']}, which is {count}"
        raise SettingError(keys["max"], most, problem, f"give {count} or more")


def on_demand(value: int, most: int, *, spot: bool) -> None:
    """So many of the workers, where the others are spot instances."""
    if value and not spot:
        hint = "give spot, too, or leave it at 0: without spot all workers are on-demand instances"
        raise SettingError("onDemandWorkers", value, "comes without spot", hint)
    if most and value > most:
        raise SettingError("onDemandWorkers", value, f"is more than all {most} workers", f"give {most} or less")


def cpu_workers(instance_types: Sequence[str], most: int) -> None:
    """CPU workers have a type."""
    if most and not instance_types:
        hint = "give one, such as c6i.2xlarge, or set cpuWorkerCount and maxCpuWorkers to 0"
        raise SettingError("cpuWorkerInstanceTypes", "", f"is empty, and there are up to {most} CPU workers", hint)


def existing_network(vpc_id: str, subnet_ids: Sequence[str]) -> None:
    """A VPC and subnets of it, or neither."""
    if bool(vpc_id) != bool(subnet_ids):
        key, value, other = ("vpcId", vpc_id, "subnetIds") if vpc_id else ("subnetIds", ",".join(subnet_ids), "vpcId")
        raise SettingError(key, value, f"comes without {other}", f"give {other}, too, or leave both empty")


def spread_zones(value: bool, zones: int) -> None:
    """Over several zones."""
    if value and zones < 2:
        hint = "give several by comma (availabilityZones, or subnetIds for an existing VPC)"
        raise SettingError("spreadZones", "true", "has one zone to spread workers over", hint)


def nat_gateway(value: bool, vpc_id: str, image_uri: pulumi.Input[str]) -> None:
    """Without one, what nodes call has to have an endpoint in the VPC."""
    if value:
        return
    if vpc_id:
        hint = "give it its endpoints yourself (docs/accounts.md), and leave this at true"
        raise SettingError("natGateway", "false", f"is of a VPC of the stack's own, and vpcId is {vpc_id}", hint)
    if known(image_uri) and not ECR_IMAGE.match(known(image_uri)):
        hint = "give one in ECR, or leave it empty to build docker/"
        raise SettingError("natGateway", "false", f"leaves no way to the registry of imageUri, {image_uri}", hint)


def existing_bucket(name: pulumi.Input[str], retain: bool, version_days: int) -> None:
    """Settings of the stack's own bucket, which an existing one does not take."""
    for key, value, unset in (("retainBucket", retain, "false"), ("objectVersionDays", version_days, "0")):
        if name and value:
            problem = f"is of a bucket of the stack's own, and bucketName is {known(name) or 'an Output'}"
            raise SettingError(key, str(value).lower(), problem, f"give {unset}: an existing bucket is not changed")


def registry_secret(value: pulumi.Input[str], image_uri: pulumi.Input[str]) -> None:
    """For a registry that asks for a password, and is not ECR."""
    if value and (not image_uri or ECR_IMAGE.match(known(image_uri))):
        which = f"imageUri is {image_uri}, in ECR" if image_uri else "imageUri is empty"
        hint = "give imageUri in the registry that it is for, or leave it empty: ECR asks for no password"
        raise SettingError("registrySecretArn", known(value), f"is of no use, as {which}", hint)
