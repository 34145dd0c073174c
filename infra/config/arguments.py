"""Arguments of RayCluster, and their conversion to settings.

Pulumi derives the schema for other languages from the annotations and docstrings of both classes, and can't read
annotations that `from __future__ import annotations` turned into strings.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, TypedDict, Union, cast, get_args, get_origin

import pulumi

from infra.config.settings import Settings
from infra.definitions.containers import OWN_VARIABLES
from infra.errors import SettingError
from infra.types import ExistingNetwork

# Field of Settings by argument of WorkerGroupArgs.
WORKER_GROUPS = {
    "workers": {
        "instance_types": "worker_instance_types",
        "initial_count": "worker_count",
        "min_count": "min_workers",
        "max_count": "max_workers",
    },
    "cpu_workers": {
        "instance_types": "cpu_worker_instance_types",
        "initial_count": "cpu_worker_count",
        "min_count": "min_cpu_workers",
        "max_count": "max_cpu_workers",
    },
}


class WorkerGroupArgs(TypedDict, total=False):
    """Worker group: EC2 instances that run one Ray worker each."""

    instance_types: list[str]
    """EC2 instance types, in order of preference."""
    initial_count: int
    """Initial number of instances."""
    min_count: int
    """Minimum number of instances, kept by the idle scale-in; by default 0."""
    max_count: int | None
    """Maximum number of instances that jobs may request; by default initial_count."""


class RayClusterArgs(TypedDict, total=False):
    """Inputs of RayCluster, all optional. Most are also keys of a stack's configuration, with the same defaults.

    Plain values are validated against AWS while Pulumi plans; Outputs are not. A VPC that the same program creates also
    requires availability_zones: one for each subnet, in the same order.
    """

    head_instance_type: str
    """EC2 instance type of the Ray head (x86_64, at least 8 GiB), which schedules jobs and runs no training."""
    workers: WorkerGroupArgs
    """GPU workers: x86_64 instance types with NVIDIA GPUs (T4 or later); by default two g5.xlarge."""
    cpu_workers: WorkerGroupArgs | None
    """CPU workers for data preprocessing, on instance types such as c6i.2xlarge; by default none."""
    head_ami_id: str
    """AMI of the instances without GPUs, e.g. ami-0123456789abcdef0; by default the latest Amazon ECS-optimized AMI."""
    worker_ami_id: str
    """AMI of the GPU workers, with the NVIDIA driver; by default the latest Amazon ECS GPU-optimized AMI."""
    idle_timeout_minutes: int
    """Idle time in minutes (15 to 1440) after which GPU and CPU workers are scaled in; 0 disables the scale-in."""
    spot: bool
    """Run GPU workers on Spot Instances (cheaper; two-minute interruption notice)."""
    on_demand_workers: int
    """Number of GPU workers kept on demand when spot is true."""
    redeploy_workers: str
    """Set to a new value to redeploy GPU and CPU workers, e.g. after the ECS deployment circuit breaker has fired."""
    rotate_token: str
    """Set to a new value to rotate the Ray token and restart all nodes, busy nodes once they are idle."""
    vpc_cidr: str
    """IPv4 CIDR block of the VPC that the cluster creates, /16 to /24."""
    vpc_id: pulumi.Input[str]
    """Existing VPC to use instead of a new one; requires subnet_ids."""
    subnet_ids: list[pulumi.Input[str]]
    """Private subnets of that VPC for all instances and tasks, in different availability zones."""
    availability_zones: list[str]
    """Zones of the instances, e.g. us-west-2b (by default one is chosen); workers fail over to the next of several."""
    spread_zones: bool
    """Allow one job to span those availability zones (incurs cross-AZ traffic charges)."""
    nat_gateway: bool
    """Create a NAT gateway; false creates VPC interface endpoints instead (no internet access)."""
    image_uri: pulumi.Input[str]
    """Existing training image to use instead of building docker/; no ECR repository is created then."""
    registry_secret_arn: pulumi.Input[str]
    """Secrets Manager secret with the user name and password of image_uri's registry."""
    bucket_name: pulumi.Input[str]
    """Existing S3 bucket for the runs, which outlives the cluster, instead of a new one."""
    retain_bucket: bool
    """Retain the bucket and its runs when the cluster is destroyed; takes effect with the next `pulumi up`."""
    object_version_days: int
    """Days to keep noncurrent versions of overwritten and deleted objects; 0 keeps none."""
    data_buckets: list[pulumi.Input[str]]
    """S3 buckets that training may also read, each as bucket or bucket/prefix."""
    job_secrets: list[pulumi.Input[str]]
    """ARNs of Secrets Manager secrets that jobs may read with --secret NAME=ARN."""
    root_volume_gib: int
    """Root EBS volume of each instance in GiB; it holds the AMI and the unpacked training image."""
    log_retention_days: int
    """Retention of the container logs in CloudWatch Logs, in days."""
    check_quotas: bool
    """Refuse a cluster that exceeds the account's EC2 vCPU or VPC quotas; false skips the check."""
    max_hourly_usd: float
    """Refuse a cluster whose instances cost more USD per hour; 0 disables the check."""
    alert_email: str
    """Email address for CloudWatch alarms and AWS Budgets alerts; without it, neither topic nor budget is created."""
    monthly_budget_usd: int
    """Monthly AWS budget of the whole account in USD, for alert_email."""
    tags: dict[str, pulumi.Input[str]]
    """Tags for every resource."""
    permissions_boundary: pulumi.Input[str]
    """ARN of the permissions boundary for all IAM roles."""
    task_policy_arns: list[pulumi.Input[str]]
    """ARNs of managed policies for all task roles, e.g. arn:aws:iam::123456789012:policy/read-features."""
    instance_policy_arns: list[pulumi.Input[str]]
    """ARNs of managed policies for all instance roles, e.g. for Session Manager's encryption and logging."""
    role_path: str
    """IAM path of all roles, e.g. /teams/ml/."""
    kms_key_arn: pulumi.Input[str]
    """ARN of a customer managed KMS key for bucket, disks, logs, token and repository; by default AWS keys."""
    environment: dict[str, pulumi.Input[str]]
    """Environment variables of all containers, and so of all jobs; a change restarts every node."""


# Accepted types of a value by the type of its annotation, with problem and hint for other values.
VALUES: dict[type, tuple[tuple[type, ...], str, str]] = {
    str: ((str,), "is not a string", "use one in quotes"),
    bool: ((bool,), "is not a boolean", "use True or False"),
    # Pulumi passes the integers of other languages as floats.
    int: ((int, float), "is not an integer", "use one, e.g. 2"),
    float: ((int, float), "is not a number", "use one, e.g. 5.5"),
    list: ((list, tuple), "is not a list", "use a list, also for a single value"),
    dict: ((Mapping,), "is not a dictionary", 'use one, e.g. {"name": "value"}'),
    WorkerGroupArgs: ((Mapping,), "is not a dictionary", 'use one, e.g. {"initial_count": 2}'),
}


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Validated arguments; `network` is one that the same program creates, in place of the settings'."""

    settings: Settings
    network: ExistingNetwork | None = None
    environment: Mapping[str, pulumi.Input[str]] = field(default_factory=dict)


def read(args: RayClusterArgs) -> Arguments:
    """Validate arguments; None stands for an omitted one.

    Raises:
        RunError: An argument is unknown, or an Output where a plain value is required.
        SettingError: An argument is invalid.
    """
    values = _take("", args, RayClusterArgs)
    for name, setting_names in WORKER_GROUPS.items():
        group = _take(f"{name}.", values.pop(name, {}), WorkerGroupArgs)
        values |= {setting_names[argument]: value for argument, value in group.items()}
    environment = values.pop("environment", {})
    for variable in environment.keys() & OWN_VARIABLES:
        raise SettingError("environment", variable, "is reserved for the cluster's containers", "use another name")
    network = _take_network(values)
    return Arguments(settings=Settings(**values), network=network, environment=environment)


def of_settings(settings: Settings) -> RayClusterArgs:
    """Arguments that are equivalent to settings."""
    values = vars(settings).copy()
    for name, setting_names in WORKER_GROUPS.items():
        values[name] = {argument: values.pop(setting_name) for argument, setting_name in setting_names.items()}
    return cast(RayClusterArgs, values)


def _take(prefix: str, args: Mapping[str, Any], shape: type) -> dict[str, Any]:
    """Arguments of a class, without those that are None.

    Raises:
        RunError: An argument is unknown, or must not be an Output.
        SettingError: An argument has another type than its annotation.
    """
    types = shape.__annotations__
    unknown = args.keys() - types.keys()
    if unknown:
        names = ", ".join(prefix + name for name in sorted(unknown))
        raise pulumi.RunError(f"{names}: unknown argument of RayCluster; see {shape.__name__}")
    for name, value in args.items():
        takes_elements = pulumi.Input[str] in get_args(types[name])
        if isinstance(value, pulumi.Output) and types[name] != pulumi.Input[str]:
            hint = "only its elements may be Outputs" if takes_elements else "use a plain value"
            raise pulumi.RunError(f"{prefix}{name}: must be known while Pulumi plans, and is an Output; {hint}")
        if _contains_output(value) and not takes_elements:
            raise pulumi.RunError(f"{prefix}{name}: must be known while Pulumi plans, and contains an Output")
        if value is not None:
            _check_type(f"{prefix}{name}", value, types[name])
    return {name: _converted(value) for name, value in args.items() if value is not None}


def _check_type(name: str, value: Any, annotation: Any) -> None:
    """Compare the types of a value and its elements with an annotation; raises SettingError."""
    if get_origin(annotation) in (Union, UnionType):  # Input[str], or an optional value
        if isinstance(value, pulumi.Output):
            return
        annotation = get_args(annotation)[0]
    kind = get_origin(annotation) or annotation
    accepted, problem, hint = VALUES[kind]
    # In Python a bool is also an int.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not isinstance(value, accepted) or (kind in (int, float) and not is_number) or (kind is int and value % 1):
        raise SettingError(name, value, problem, hint)
    match get_args(annotation):
        case [element_type]:
            for index, element in enumerate(value):
                _check_type(f"{name}[{index}]", element, element_type)
        case [key_type, value_type]:
            for key, element in value.items():
                _check_type(name, key, key_type)
                _check_type(f"{name}.{key}", element, value_type)


def _contains_output(value: Any) -> bool:
    elements = value.values() if isinstance(value, dict) else value
    return isinstance(value, dict | list | tuple) and any(isinstance(element, pulumi.Output) for element in elements)


def _converted(value: Any) -> Any:
    """Value in the type of Settings: a list becomes a tuple, a float from another language an integer."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return tuple(value) if isinstance(value, list) else value


def _take_network(values: dict[str, Any]) -> ExistingNetwork | None:
    """Remove a network that the same program creates from the arguments: EC2 does not know it yet."""
    subnets, zones = values.get("subnet_ids", ()), values.get("availability_zones", ())
    if not any(isinstance(part, pulumi.Output) for part in (values.get("vpc_id"), *subnets)):
        return None
    vpc_id = values.pop("vpc_id", "")
    values.pop("subnet_ids", None)
    if not (vpc_id and subnets and len(subnets) == len(zones)):
        raise pulumi.RunError(
            f"availability_zones: {', '.join(zones) or 'none'} for {len(subnets)} subnet_ids of a VPC that the same "
            "program creates; set vpc_id, and the zone of each subnet in the same order"
        )
    if not values.get("nat_gateway", True):
        raise pulumi.RunError(
            "nat_gateway: False cannot be combined with vpc_id; keep True, and create the VPC's endpoints yourself"
        )
    return ExistingNetwork(vpc_id=vpc_id, subnets=dict(zip(zones, subnets, strict=True)))
