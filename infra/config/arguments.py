"""The arguments of RayCluster, and how they become settings.

Pulumi reads the annotations of both classes as they stand for the schema that it offers other languages, and their
docstrings: this module can't postpone annotations.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, TypedDict, Union, cast, get_args, get_origin

import pulumi

from infra.config.settings import Settings
from infra.definitions.containers import OWN_VARIABLES
from infra.errors import SettingError
from infra.references import ExistingNetwork

# Field of Settings for each argument of a NodeGroupArgs.
NODE_GROUPS = {
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


class NodeGroupArgs(TypedDict, total=False):
    """Instances that run one Ray worker each."""

    instance_types: list[str]
    """EC2 types, the preferred one first."""
    initial_count: int
    """Number of instances that the group begins with."""
    min_count: int
    """Number of instances that the idle stop leaves running, by default 0."""
    max_count: int | None
    """Most instances that jobs may request, by default initial_count."""


class RayClusterArgs(TypedDict, total=False):
    """Inputs of RayCluster, all optional. Most are keys of a stack's configuration, too, and have the same defaults.

    AWS is asked about plain values while Pulumi plans, and not about Outputs. A VPC that the same program makes needs
    availability_zones, too: one for each subnet, in their order.
    """

    head_instance_type: str
    """EC2 type of the Ray head, which schedules and trains nothing; x86_64 with at least 8 GiB."""
    workers: NodeGroupArgs
    """The GPU workers: x86_64 with NVIDIA GPUs (T4 or later), by default two g5.xlarge."""
    cpu_workers: NodeGroupArgs | None
    """CPU workers, which prepare data, on types such as c6i.2xlarge; by default there are none."""
    head_ami_id: str
    """Machine image of the instances without GPUs, such as ami-0123456789abcdef0; by default AWS's newest for ECS."""
    worker_ami_id: str
    """Machine image of the workers' instances, with the NVIDIA driver; by default AWS's newest for ECS."""
    idle_timeout_minutes: int
    """Idle time in minutes, 15 to 1440, after which GPU and CPU worker instances are stopped; 0 never stops them."""
    spot: bool
    """Run the workers on spot instances, which cost less and which EC2 may reclaim at two minutes' notice."""
    on_demand_workers: int
    """With spot, the number of workers that stay on demand."""
    redeploy_workers: str
    """Any word; changing it restarts all GPU and CPU workers, also after ECS has given them up."""
    rotate_token: str
    """Any word; changing it makes a new Ray token and restarts all nodes, those in use once they are idle."""
    vpc_cidr: str
    """Addresses of the cluster's own VPC, /16 to /24."""
    vpc_id: pulumi.Input[str]
    """A VPC to use instead of one of the cluster's own; subnet_ids goes with it."""
    subnet_ids: list[pulumi.Input[str]]
    """Private subnets of that VPC for everything, in different zones."""
    availability_zones: list[str]
    """Zone of every instance, such as us-west-2b (by default one is chosen); workers go on to the next of several."""
    spread_zones: bool
    """Let the workers of one job be in several of those zones, with traffic between them that AWS charges."""
    nat_gateway: bool
    """Give the cluster's own VPC a way to the internet; false makes interface endpoints to AWS's services instead."""
    image_uri: pulumi.Input[str]
    """A ready training image instead of the one in docker/; no repository is made then and nothing is built."""
    registry_secret_arn: pulumi.Input[str]
    """Secret in AWS Secrets Manager with the user name and password of image_uri's registry."""
    bucket_name: pulumi.Input[str]
    """Existing bucket for the runs, which outlives the cluster, instead of one of the cluster's own."""
    retain_bucket: bool
    """Keep the bucket and its runs when the cluster is destroyed; it takes effect with the next `pulumi up`."""
    object_version_days: int
    """Days for which the bucket keeps objects that are overwritten or deleted; 0 keeps none."""
    data_buckets: list[pulumi.Input[str]]
    """Buckets that training may also read, each as bucket or bucket/prefix."""
    job_secrets: list[pulumi.Input[str]]
    """ARNs of secrets in AWS Secrets Manager that jobs may read, for --secret NAME=ARN."""
    root_volume_gib: int
    """Root disk of each instance in GiB; it holds the machine image and the unpacked training image."""
    log_retention_days: int
    """Days that CloudWatch keeps the containers' logs."""
    check_quotas: bool
    """Refuse more vCPUs than the account's EC2 quotas allow; false leaves that to EC2."""
    max_hourly_usd: float
    """Refuse a cluster whose instances cost more USD per hour; 0 disables the check."""
    alert_email: str
    """Address that hears of alarms, and of the account's costs by an AWS budget; by default neither is made."""
    monthly_budget_usd: int
    """The budget of the whole account in USD a month, for alert_email."""
    tags: dict[str, pulumi.Input[str]]
    """Tags of the company for everything."""
    permissions_boundary: pulumi.Input[str]
    """ARN of the policy that bounds every role."""
    task_policy_arns: list[pulumi.Input[str]]
    """ARNs of IAM policies that every task has, too, such as arn:aws:iam::123456789012:policy/read-features."""
    instance_policy_arns: list[pulumi.Input[str]]
    """ARNs of IAM policies that every instance has, too, such as those of Session Manager's encryption and logs."""
    role_path: str
    """IAM path of every role, such as /teams/ml/."""
    kms_key_arn: pulumi.Input[str]
    """ARN of your KMS key for bucket, disks, logs, token and repository; by default AWS's keys."""
    environment: dict[str, pulumi.Input[str]]
    """Environment variables of all containers, and so of all jobs; a change restarts every node."""


# For each type of an annotation: the values that it takes, and problem and hint for others.
VALUES: dict[type, tuple[tuple[type, ...], str, str]] = {
    str: ((str,), "is not a string", "give one in quotes"),
    bool: ((bool,), "is neither True nor False", "give one of the two"),
    # Pulumi hands over the integers of other languages as floats.
    int: ((int, float), "is not a whole number", "give one, such as 2"),
    float: ((int, float), "is not a number", "give one, such as 5.5"),
    list: ((list, tuple), "is not a list", "give one, also for a single value"),
    dict: ((Mapping,), "is not a dictionary", 'give one, such as {"name": "value"}'),
    NodeGroupArgs: ((Mapping,), "is not a dictionary", 'give one, such as {"initial_count": 2}'),
}


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The arguments, checked.

    Attributes:
        settings: The settings that they stand for.
        network: A network that the same program makes, in place of the settings'.
        environment: Environment variables of all containers.
    """

    settings: Settings
    network: ExistingNetwork | None = None
    environment: Mapping[str, pulumi.Input[str]] = field(default_factory=dict)


def read(args: RayClusterArgs) -> Arguments:
    """Check arguments; None stands for one that is not given.

    Raises:
        RunError: One is unknown, or an Output where a plain value is needed.
        SettingError: One cannot work.
    """
    values = _take("", args, RayClusterArgs)
    for name, setting_names in NODE_GROUPS.items():
        group = _take(f"{name}.", values.pop(name, {}), NodeGroupArgs)
        values |= {setting_names[argument]: value for argument, value in group.items()}
    environment = values.pop("environment", {})
    for variable in environment.keys() & OWN_VARIABLES:
        raise SettingError("environment", variable, "is set by the containers themselves", "give other variables")
    network = _take_network(values)
    return Arguments(settings=Settings(**values), network=network, environment=environment)


def of_settings(settings: Settings) -> RayClusterArgs:
    """Arguments that stand for settings."""
    values = vars(settings).copy()
    for name, setting_names in NODE_GROUPS.items():
        values[name] = {argument: values.pop(setting_name) for argument, setting_name in setting_names.items()}
    return cast(RayClusterArgs, values)


def _take(prefix: str, args: Mapping[str, Any], shape: type) -> dict[str, Any]:
    """Arguments of a class without those that are None.

    Raises:
        RunError: One is unknown, or can't be an Output.
        SettingError: One has another type than its annotation.
    """
    types = shape.__annotations__
    if unknown := args.keys() - types.keys():
        names = ", ".join(prefix + name for name in sorted(unknown))
        raise pulumi.RunError(f"{names}: is not an argument of RayCluster; see {shape.__name__}")
    for name, value in args.items():
        takes_elements = pulumi.Input[str] in get_args(types[name])
        if isinstance(value, pulumi.Output) and types[name] != pulumi.Input[str]:
            hint = "only its elements may be Outputs" if takes_elements else "give a value"
            raise pulumi.RunError(f"{prefix}{name}: is an Output, and has to be known while Pulumi plans; {hint}")
        if _holds_output(value) and not takes_elements:
            raise pulumi.RunError(f"{prefix}{name}: holds an Output, and has to be known while Pulumi plans")
        if value is not None:
            _check_type(f"{prefix}{name}", value, types[name])
    return {name: _converted(value) for name, value in args.items() if value is not None}


def _check_type(name: str, value: Any, annotation: Any) -> None:
    """Refuse a value of another type than the annotation's, or an element of it, with a SettingError."""
    if get_origin(annotation) in (Union, UnionType):  # an Input[str], or what may be None
        if isinstance(value, pulumi.Output):
            return
        annotation = get_args(annotation)[0]
    kind = get_origin(annotation) or annotation
    taken, problem, hint = VALUES[kind]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not isinstance(value, taken) or (kind in (int, float) and not is_number) or (kind is int and value % 1):
        raise SettingError(name, value, problem, hint)
    match get_args(annotation):
        case [of_elements]:
            for index, element in enumerate(value):
                _check_type(f"{name}[{index}]", element, of_elements)
        case [of_names, of_values]:
            for key, element in value.items():
                _check_type(name, key, of_names)
                _check_type(f"{name}.{key}", element, of_values)


def _holds_output(value: Any) -> bool:
    elements = value.values() if isinstance(value, dict) else value
    return isinstance(value, dict | list | tuple) and any(isinstance(element, pulumi.Output) for element in elements)


def _converted(value: Any) -> Any:
    """A value as Settings has it: a tuple of a list, and an integer of the float that other languages hand over."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return tuple(value) if isinstance(value, list) else value


def _take_network(values: dict[str, Any]) -> ExistingNetwork | None:
    """Take a network that the same program makes out of the arguments, as AWS can't be asked about it yet."""
    subnets, zones = values.get("subnet_ids", ()), values.get("availability_zones", ())
    if not any(isinstance(part, pulumi.Output) for part in (values.get("vpc_id"), *subnets)):
        return None
    vpc_id, _ = values.pop("vpc_id", ""), values.pop("subnet_ids", ())
    if not (vpc_id and subnets and len(subnets) == len(zones)):
        raise pulumi.RunError(
            f"availability_zones: {', '.join(zones) or 'none'} for {len(subnets)} subnet_ids of a VPC that the "
            "same program makes; give vpc_id, and the zone of each subnet in their order"
        )
    if not values.get("nat_gateway", True):
        raise pulumi.RunError(
            "nat_gateway: False is of a VPC of the cluster's own; give this VPC its endpoints yourself"
        )
    return ExistingNetwork(vpc_id=vpc_id, subnets=dict(zip(zones, subnets, strict=True)))
