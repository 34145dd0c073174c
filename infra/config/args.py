"""Arguments of RayCluster, each declared once with type, default, rule and description.

They are also the keys of a stack's configuration, in camel case. `python -m component.generate --write` derives
Pulumi.yaml, docs/configuration.md and the component package for other languages from this class. Checks that need an
answer from AWS are in plan.py.

`from __future__ import annotations` would turn the rules, which are in the annotations, into strings.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Annotated, Any, get_args

import pulumi

from infra.config import rules
from infra.errors import AS_WRITTEN, Refusal, SettingError
from infra.types import Alerts, Scale, SecurityOptions

Text = pulumi.Input[str]
# Namespaces of keys that belong to providers and to Pulumi instead of a project.
PROVIDERS = ("aws", "awsx", "pulumi")
# Accepted types of a value by the type of the field's default, with problem and hint for other values.
TYPES: dict[type, tuple[tuple[type, ...], str, str]] = {
    bool: ((bool,), "is not a boolean", "use true or false"),
    # Pulumi passes the integers of other languages as floats.
    int: ((int, float), "is not an integer", "use one, e.g. {}"),
    float: ((int, float), "is not a number", "use one, e.g. {}"),
    str: ((str,), "is not a string", "use text"),
    tuple: ((list, tuple), "is not a list", "use a list, also for a single value"),
    dict: ((Mapping,), "is not a dictionary", "use a dictionary of texts"),
}


@dataclass(frozen=True, kw_only=True)
class RayClusterArgs:
    """Inputs of RayCluster, all optional. An Input may be an Output; AWS is then not asked about its value.

    A VPC that the same program creates also requires availability_zones: one for each subnet, in the same order.
    """

    head_instance_type: str = "m5.xlarge"
    """EC2 instance type of the Ray head (x86_64, at least 8 GiB), which schedules jobs and runs no training."""
    worker_instance_types: Annotated[Sequence[str], rules.not_empty] = ("g5.xlarge",)
    """EC2 instance types of the GPU workers (x86_64, NVIDIA T4 or later), in order of preference."""
    head_ami_id: str = ""
    """AMI of the instances without GPUs, e.g. ami-0123456789abcdef0; by default the latest Amazon ECS-optimized AMI."""
    worker_ami_id: str = ""
    """AMI of the GPU workers, with the NVIDIA driver; by default the latest Amazon ECS GPU-optimized AMI."""
    worker_count: Annotated[int, rules.at_least_0] = 2
    """Initial number of GPU workers, one per instance; also a job's default request."""
    min_workers: Annotated[int, rules.at_least_0] = 0
    """Minimum number of GPU workers, kept by the idle scale-in."""
    max_workers: Annotated[int, rules.at_least_0] = 0
    """Maximum number of GPU workers that jobs may request, at least worker_count; 0 means worker_count."""
    idle_timeout_minutes: Annotated[int, rules.idle_timeout] = 30
    """Idle time in minutes (15 to 1440) after which GPU and CPU workers are scaled in; 0 disables the scale-in."""
    spot: bool = False
    """Run GPU workers on Spot Instances (cheaper; two-minute interruption notice)."""
    on_demand_workers: Annotated[int, rules.at_least_0] = 0
    """Number of GPU workers kept on demand when spot is true."""
    cpu_worker_instance_types: Sequence[str] = ()
    """EC2 instance types of the CPU workers for data preprocessing, e.g. c6i.2xlarge; empty for no CPU workers."""
    cpu_worker_count: Annotated[int, rules.at_least_0] = 0
    """Initial number of CPU workers, one per instance of cpu_worker_instance_types."""
    min_cpu_workers: Annotated[int, rules.at_least_0] = 0
    """Minimum number of CPU workers, kept by the idle scale-in."""
    max_cpu_workers: Annotated[int, rules.at_least_0] = 0
    """Maximum number of CPU workers that jobs may request, at least cpu_worker_count; 0 means cpu_worker_count."""
    redeploy_workers: str = ""
    """Set to a new value to redeploy GPU and CPU workers, e.g. after the ECS deployment circuit breaker has fired."""
    rotate_token: str = ""
    """Set to a new value to rotate the Ray token and restart all nodes, busy nodes once they are idle."""
    vpc_cidr: Annotated[str, rules.vpc_cidr] = "10.0.0.0/16"
    """IPv4 CIDR block of the VPC that the cluster creates, /16 to /24."""
    vpc_id: Text = ""
    """Existing VPC to use instead of a new one; requires subnet_ids."""
    subnet_ids: Sequence[Text] = ()
    """Private subnets of that VPC for all instances and tasks, in different availability zones."""
    availability_zones: Sequence[str] = ()
    """Zones of the instances, e.g. us-west-2b (by default one is chosen); workers fail over to the next of several."""
    spread_zones: bool = False
    """Allow one job to span those availability zones (incurs cross-AZ traffic charges)."""
    nat_gateway: bool = True
    """Create a NAT gateway; false creates VPC interface endpoints instead (no internet access)."""
    image_uri: Annotated[Text, rules.image] = ""
    """Existing training image to use instead of building docker/; no ECR repository is created then."""
    image_build: Annotated[str, rules.image_build] = "auto"
    """Builder of docker/: local (Docker on this machine), codebuild (AWS), or auto: local if Docker answers."""
    registry_secret_arn: Annotated[Text, rules.secret_arn] = ""
    """Secrets Manager secret with the user name and password of image_uri's registry."""
    bucket_name: Annotated[Text, rules.bucket] = ""
    """Existing S3 bucket for the runs, which outlives the cluster, instead of a new one."""
    retain_bucket: bool = False
    """Retain the bucket and its runs when the cluster is destroyed; takes effect with the next `pulumi up`."""
    object_version_days: Annotated[int, rules.at_least_0] = 0
    """Days to keep noncurrent versions of overwritten and deleted objects; 0 keeps none."""
    data_buckets: Annotated[Sequence[Text], rules.data_buckets] = ()
    """S3 buckets that training may also read, each as bucket or bucket/prefix."""
    job_secrets: Annotated[Sequence[Text], rules.secret_arn] = ()
    """ARNs of Secrets Manager secrets that jobs may read with --secret NAME=ARN."""
    environment: Annotated[Mapping[str, Text], rules.environment] = field(default_factory=dict)
    """Environment variables of all containers, and so of all jobs; a change restarts every node."""
    root_volume_gib: Annotated[int, rules.root_volume] = 100
    """Root EBS volume of each instance in GiB; it holds the AMI and the unpacked training image."""
    log_retention_days: int = 30
    """Retention of the container logs in CloudWatch Logs, in days."""
    check_quotas: bool = True
    """Refuse a cluster that exceeds the account's EC2 vCPU or VPC quotas; false skips the check."""
    max_hourly_usd: Annotated[float, rules.at_least_0] = 0.0
    """Refuse a cluster whose instances cost more USD per hour; 0 disables the check."""
    alert_email: Annotated[str, rules.email] = ""
    """Email address for CloudWatch alarms and AWS Budgets alerts; without it, neither topic nor budget is created."""
    monthly_budget_usd: Annotated[int, rules.at_least_1] = 500
    """Monthly AWS budget of the whole account in USD, for alert_email."""
    tags: Annotated[Mapping[str, Text], rules.tags] = field(default_factory=dict)
    """Tags for every resource."""
    permissions_boundary: Annotated[Text, rules.policy_arn] = ""
    """ARN of the permissions boundary for all IAM roles."""
    task_policy_arns: Annotated[Sequence[Text], rules.policy_arn] = ()
    """ARNs of managed policies for all task roles, e.g. arn:aws:iam::123456789012:policy/read-features."""
    instance_policy_arns: Annotated[Sequence[Text], rules.policy_arn] = ()
    """ARNs of managed policies for all instance roles, e.g. for Session Manager's encryption and logging."""
    role_path: Annotated[str, rules.role_path] = "/"
    """IAM path of all roles, e.g. /teams/ml/."""
    kms_key_arn: Annotated[Text, rules.key_arn] = ""
    """ARN of a customer managed KMS key for bucket, disks, logs, secrets and repository; by default AWS keys."""

    def __post_init__(self) -> None:
        """Check the type and the rule of each field, then the combinations of several.

        Raises:
            SettingError: A value is invalid, or an Output that must be known while Pulumi plans.
        """
        AS_WRITTEN.set(self.as_written)
        for name, default in defaults().items():
            annotation = RayClusterArgs.__annotations__[name]
            value = _checked(name, getattr(self, name), default, annotation)
            for rule in getattr(annotation, "__metadata__", ()):
                rule(name, _plain(value))
                value = _checked_later(name, value, rule)
            object.__setattr__(self, name, value)
        rules.combinations(self)

    @staticmethod
    def as_written(text: str) -> str:
        """Text with the fields as their user wrote them."""
        return text

    @property
    def is_stack(self) -> bool:
        """True for the arguments of a stack of this project, from its configuration."""
        return isinstance(self, _Configured)

    @staticmethod
    def in_camel_case(**fields: Any) -> "RayClusterArgs":
        """Arguments from a program in another language, whose messages name them in its spelling."""
        return _CamelCase(**fields)

    @classmethod
    def from_config(cls) -> "RayClusterArgs":
        """Read the stack's configuration; an unset key has its default.

        Raises:
            SettingError: A value is invalid.
            Refusal: The configuration has an unknown key, or a secret.
        """
        AS_WRITTEN.set(_CamelCase.as_written)
        _check_keys()
        values = {name: _read(name, default) for name, default in defaults().items()}
        return _Configured(**{name: value for name, value in values.items() if value is not None})

    @property
    def workers(self) -> Scale:
        """Number of GPU workers."""
        return _scale(self.worker_count, self.min_workers, self.max_workers, self.idle_timeout_minutes)

    @property
    def cpu_workers(self) -> Scale:
        """Number of CPU workers."""
        return _scale(self.cpu_worker_count, self.min_cpu_workers, self.max_cpu_workers, self.idle_timeout_minutes)

    @property
    def instance_types(self) -> dict[str, Sequence[str]]:
        """Instance types of each kind of node, by field."""
        kinds = {"head_instance_type": (self.head_instance_type,), "worker_instance_types": self.worker_instance_types}
        if self.cpu_worker_instance_types:
            kinds["cpu_worker_instance_types"] = self.cpu_worker_instance_types
        return kinds

    @property
    def security(self) -> SecurityOptions:
        """IAM and KMS settings that all components share."""
        return SecurityOptions(
            permissions_boundary=self.permissions_boundary,
            role_path=self.role_path,
            kms_key_arn=self.kms_key_arn,
            task_policy_arns=self.task_policy_arns,
            instance_policy_arns=self.instance_policy_arns,
        )

    @property
    def alerts(self) -> Alerts:
        """Recipient of alarms and the budget."""
        return Alerts(email=self.alert_email, monthly_usd=self.monthly_budget_usd)


class _CamelCase(RayClusterArgs):
    """Arguments whose messages name them as configuration keys and other languages do."""

    @staticmethod
    def as_written(text: str) -> str:
        # A name within a value, such as an image's, belongs to the value.
        names = rf"(?<![\w/.:@'-])({'|'.join(defaults())})(?![\w/@'-]|[.:]\w)"
        in_keys = re.sub(names, lambda name: key_of(name[0]), text)
        return re.sub(r"(?<![\w'/:])(True|False)(?![\w'])", lambda word: word[0].lower(), in_keys)


class _Configured(_CamelCase):
    """Arguments from the stack's configuration."""


def defaults() -> dict[str, Any]:
    """Default of each field."""
    return {item.name: {} if item.default_factory is dict else item.default for item in fields(RayClusterArgs)}


def key_of(name: str) -> str:
    """Configuration key of a field, in camel case."""
    first, *rest = name.split("_")
    return first + "".join(word.title() for word in rest)


def _scale(count: int, min_count: int, max_count: int, idle_minutes: int) -> Scale:
    return Scale(
        initial_count=count,
        min_count=min_count,
        max_count=max_count or count,
        # A cluster that starts without workers can still grow to max_count for a job.
        default_job_count=count or max_count,
        idle_minutes=idle_minutes,
    )


def _checked(name: str, value: Any, default: Any, annotation: Any) -> Any:
    """Value in the type of its default, if it and its elements have the annotated types."""
    base = get_args(annotation)[0] if hasattr(annotation, "__metadata__") else annotation
    if isinstance(value, pulumi.Output):
        if base == Text:
            return value
        raise Refusal(name, "must be known while Pulumi plans, and is an Output; use a plain value")
    kind = type(default)
    accepted, problem, hint = TYPES[kind]
    # In Python a bool is also an int.
    is_other = isinstance(value, bool) != (kind is bool) or (kind is int and isinstance(value, float) and value % 1)
    if not isinstance(value, accepted) or is_other:
        # A default of 0 turns a limit off, and is not an example.
        raise SettingError(name, value, problem, hint.format(default or 5))
    match default:
        case tuple():
            _check_elements(name, value, takes_outputs=Text in get_args(base))
            value = tuple(value)
            if len({*_plain(value)}) < len(_plain(value)):
                raise SettingError(name, ",".join(_plain(value)), "contains a value twice", "list each value once")
        case dict():
            _check_elements(name, (*value, *value.values()), takes_outputs=Text in get_args(base))
    return kind(value)


def _check_elements(name: str, parts: Iterable[Any], *, takes_outputs: bool) -> None:
    for part in parts:
        if isinstance(part, pulumi.Output):
            if not takes_outputs:
                raise Refusal(name, "must be known while Pulumi plans, and contains an Output; use plain values")
        elif not isinstance(part, str):
            raise SettingError(name, part, "is not a string", "use text")


def _checked_later(name: str, value: Any, rule: Callable[[str, Any], None]) -> Any:
    """Value whose Outputs follow the rule, too, as soon as they are known."""

    def held(part: Any, whole: Callable[[str], Any]) -> Any:
        def check(text: Any) -> Any:
            if isinstance(text, str):
                rule(name, whole(text))
            return text

        return part.apply(check) if isinstance(part, pulumi.Output) else part

    match value:
        case tuple():
            return tuple(held(part, lambda text: (text,)) for part in value)
        case dict():
            return {key: held(part, lambda text, key=key: {key: text}) for key, part in value.items()}
    return held(value, str)


def _plain(value: Any) -> Any:
    """Part of a value that is known while Pulumi plans."""
    match value:
        case pulumi.Output():
            return ""
        case tuple():
            return tuple(part for part in value if isinstance(part, str))
        case dict():
            return {key: part if isinstance(part, str) else "" for key, part in value.items()}
    return value


def _read(name: str, default: Any) -> Any:
    """Value of a field's key, converted to the type of its default; None if it is not set."""
    config, key = pulumi.Config(), key_of(name)
    getters = {bool: config.get_bool, int: config.get_int, float: config.get_float}
    try:
        value = getters.get(type(default), config.get)(key)
    except pulumi.ConfigTypeError as error:
        _, problem, hint = TYPES[type(default)]
        raise SettingError(name, error.value, problem, hint.format(default or 5)) from error
    if not isinstance(value, str):
        return value
    if isinstance(default, tuple | dict) and value.strip().startswith(("[", "{")):
        hint = f"use `pulumi config set {key} {'a,b' if isinstance(default, tuple) else 'a=1,b=2'}`, without --path"
        raise SettingError(name, value, "is JSON", hint)
    parts = [part.strip() for part in value.split(",") if part.strip()]
    match default:
        case tuple():
            return tuple(parts)
        case dict():
            pairs = [_pair(name, part) for part in parts]
            for key, _ in pairs:
                if [other for other, _ in pairs].count(key) > 1:
                    raise SettingError(name, key, "is set twice", "set each name once")
            return dict(pairs)
    return value.strip()


def _pair(name: str, text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise SettingError(name, text, "is not key=value", "use key=value pairs, separated by commas")
    return key.strip(), value.strip()


def _check_keys() -> None:
    """Refuse unknown keys and known keys of another project, both of which Pulumi ignores silently, and secrets.

    Values are left out of the messages, since they may be secrets.

    Raises:
        Refusal: The configuration has such a key.
    """
    project, keys = pulumi.get_project(), [key_of(name) for name in defaults()]
    secrets = pulumi.runtime.config.get_config_secret_keys_env()
    names = pulumi.runtime.get_config_env()
    for name in names:
        namespace, _, key = name.rpartition(":")
        if namespace not in (project, *PROVIDERS) and key in keys and f"{project}:{key}" not in names:
            raise Refusal(name, f"belongs to another project; rename it to {project}:{key}")
        if namespace != project:
            continue
        if key not in keys:
            nearest = get_close_matches(key_of(key), sorted(keys), n=3)
            hint = f"did you mean {' or '.join(nearest)}?" if nearest else "Pulumi.yaml lists all keys."
            # Without a rewrite: worker_count is the unknown key here.
            raise pulumi.RunError(f"{key}: unknown configuration key; {hint} Remove it: `pulumi config rm {key}`")
        if name in secrets or pulumi.runtime.is_config_secret(name):
            raise Refusal(
                key,
                "is stored as a secret, and its value would be plain in previews and in the state; "
                f"`pulumi config set {key} VALUE --plaintext`, and give jobs their secrets with job_secrets",
            )
