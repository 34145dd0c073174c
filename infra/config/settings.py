"""Stack configuration keys, each declared once with its default and its validation rule.

Most are also arguments of RayCluster, and arguments.py has their descriptions. `python -m infra.config --write` writes
Pulumi.yaml and docs/configuration.md. Checks that need an answer from AWS, such as instance type offerings, are in
plan.py.

`from __future__ import annotations` would turn the rules, which are in the annotations, into strings.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Annotated, Any, Self

import pulumi

from infra.config import validation
from infra.errors import SettingError
from infra.types import Alerts, Scale, SecurityOptions

# Namespaces of keys that belong to providers and to Pulumi instead of a project.
PROVIDERS = ("aws", "awsx", "pulumi")
# Problem and hint for a value of the wrong type.
WRONG_TYPE = {
    bool: ("is not a boolean", "use true or false"),
    int: ("is not an integer", "use one, e.g. {}"),
    float: ("is not a number", "use one, e.g. {}"),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Complete, validated settings; the annotation of a field has its rule. An Input may be an Output.

    Pulumi.yaml takes only strings and numbers. So the keys of both worker groups, arguments of WorkerGroupArgs, are
    flat here, and 0 stands for None there.
    """

    head_instance_type: Annotated[str, validation.instance_type] = "m5.xlarge"
    worker_instance_types: Annotated[tuple[str, ...], validation.instance_types] = ("g5.xlarge",)
    """EC2 instance types of the GPU workers (x86_64, NVIDIA T4 or later), in order of preference."""
    head_ami_id: Annotated[str, validation.ami_id] = ""
    worker_ami_id: Annotated[str, validation.ami_id] = ""
    worker_count: int = 2
    """Initial number of GPU workers, one per instance; also a job's default request."""
    min_workers: int = 0
    """Minimum number of GPU workers, kept by the idle scale-in."""
    max_workers: int | None = None
    """Maximum number of GPU workers that jobs may request, at least worker_count; 0 means worker_count."""
    idle_timeout_minutes: Annotated[int, validation.idle_timeout_minutes] = 30
    spot: bool = False
    on_demand_workers: Annotated[int, validation.on_demand_workers] = 0
    cpu_worker_instance_types: Annotated[tuple[str, ...], validation.optional_instance_types] = ()
    """EC2 instance types of the CPU workers for data preprocessing, e.g. c6i.2xlarge; empty for no CPU workers."""
    cpu_worker_count: int = 0
    """Initial number of CPU workers, one per instance of cpu_worker_instance_types."""
    min_cpu_workers: int = 0
    """Minimum number of CPU workers, kept by the idle scale-in."""
    max_cpu_workers: int | None = None
    """Maximum number of CPU workers that jobs may request, at least cpu_worker_count; 0 means cpu_worker_count."""
    redeploy_workers: Annotated[str, validation.trigger] = ""
    rotate_token: Annotated[str, validation.trigger] = ""
    vpc_cidr: Annotated[str, validation.vpc_cidr] = "10.0.0.0/16"
    vpc_id: Annotated[str, validation.vpc_id] = ""
    subnet_ids: Annotated[tuple[str, ...], validation.subnet_ids] = ()
    availability_zones: Annotated[tuple[str, ...], validation.availability_zones] = ()
    spread_zones: bool = False
    nat_gateway: bool = True
    image_uri: Annotated[pulumi.Input[str], validation.image_uri] = ""
    registry_secret_arn: Annotated[pulumi.Input[str], validation.registry_secret_arn] = ""
    bucket_name: Annotated[pulumi.Input[str], validation.bucket_name] = ""
    retain_bucket: bool = False
    object_version_days: Annotated[int, validation.object_version_days] = 0
    data_buckets: Annotated[tuple[pulumi.Input[str], ...], validation.data_buckets] = ()
    job_secrets: Annotated[tuple[pulumi.Input[str], ...], validation.job_secrets] = ()
    root_volume_gib: Annotated[int, validation.root_volume_gib] = 100
    log_retention_days: Annotated[int, validation.log_retention_days] = 30
    check_quotas: bool = True
    max_hourly_usd: Annotated[float, validation.max_hourly_usd] = 0.0
    alert_email: Annotated[str, validation.alert_email] = ""
    monthly_budget_usd: Annotated[int, validation.monthly_budget_usd] = 500
    tags: Annotated[Mapping[str, pulumi.Input[str]], validation.tags] = field(default_factory=dict)
    permissions_boundary: Annotated[pulumi.Input[str], validation.permissions_boundary] = ""
    task_policy_arns: Annotated[tuple[pulumi.Input[str], ...], validation.policy_arns] = ()
    instance_policy_arns: Annotated[tuple[pulumi.Input[str], ...], validation.policy_arns] = ()
    role_path: Annotated[str, validation.role_path] = "/"
    kms_key_arn: Annotated[pulumi.Input[str], validation.kms_key_arn] = ""

    def __post_init__(self) -> None:
        """Validate each field, then the combinations of several; raises SettingError."""
        for setting in fields(self):
            value = _without_outputs(getattr(self, setting.name))
            for rule in getattr(setting.type, "__metadata__", ()):
                rule(key_of(setting.name), value)
        validation.counts("Worker", self.worker_count, self.min_workers, self.max_workers)
        validation.on_demand(self.on_demand_workers, self.workers.max_count, spot=self.spot)
        validation.counts("CpuWorker", self.cpu_worker_count, self.min_cpu_workers, self.max_cpu_workers)
        validation.cpu_workers(self.cpu_worker_instance_types, self.cpu_workers.max_count)
        validation.existing_network(self.vpc_id, self.subnet_ids)
        validation.spread_zones(self.spread_zones, max(len(self.availability_zones), len(self.subnet_ids)))
        validation.nat_gateway(self.nat_gateway, self.vpc_id, self.image_uri)
        validation.registry_secret(self.registry_secret_arn, self.image_uri)
        validation.existing_bucket(self.bucket_name, self.retain_bucket, self.object_version_days)

    @property
    def workers(self) -> Scale:
        """Number of GPU workers, from workerCount, minWorkers, maxWorkers and idleTimeoutMinutes."""
        return _scale(self.worker_count, self.min_workers, self.max_workers, self.idle_timeout_minutes)

    @property
    def cpu_workers(self) -> Scale:
        """Number of CPU workers, from cpuWorkerCount, minCpuWorkers, maxCpuWorkers and idleTimeoutMinutes."""
        return _scale(self.cpu_worker_count, self.min_cpu_workers, self.max_cpu_workers, self.idle_timeout_minutes)

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

    @classmethod
    def load(cls) -> Self:
        """Read the stack's configuration; an unset key has its default."""
        defaults = vars(cls())
        values = {}
        for name, default in defaults.items():
            value = _read(key_of(name), declared_default(default))
            is_unset = value is None or (default is None and value == 0)
            if not is_unset:
                values[name] = value
        _refuse_unknown_keys([key_of(name) for name in defaults])
        return cls(**values)


def declared_default(default: Any) -> Any:
    """Default in Pulumi.yaml, where every integer key has one."""
    return 0 if default is None else default


def key_of(field_name: str) -> str:
    """Configuration key of a field of Settings, in camel case."""
    first, *rest = field_name.split("_")
    return first + "".join(word.title() for word in rest)


def _without_outputs(value: Any) -> Any:
    """Part of a value that is known while Pulumi plans."""
    match value:
        case pulumi.Output():
            return ""
        case tuple():
            return tuple(part for part in value if not isinstance(part, pulumi.Output))
        case Mapping():
            return {key: part for key, part in value.items() if not isinstance(part, pulumi.Output)}
    return value


def _scale(count: int, min_count: int, max_count: int | None, idle_minutes: int) -> Scale:
    return Scale(
        initial_count=count,
        min_count=min_count,
        max_count=count if max_count is None else max_count,
        # A cluster that starts without workers can still grow to max_count for a job.
        default_job_count=count or max_count or 0,
        idle_minutes=idle_minutes,
    )


def _read(key: str, default: Any) -> Any:
    """Value of a key, converted to the type of its default; None if it is not set."""
    config = pulumi.Config()
    getters = {bool: config.get_bool, int: config.get_int, float: config.get_float}
    try:
        value = getters.get(type(default), config.get)(key)
    except pulumi.ConfigTypeError as error:
        problem, hint = WRONG_TYPE[type(default)]
        raise SettingError(key, error.value, problem, hint.format(default)) from error
    if not isinstance(value, str):
        return value
    parts = [part.strip() for part in value.split(",") if part.strip()]
    match default:
        case tuple():
            return tuple(parts)
        case dict():
            return dict(_pair(key, part) for part in parts)
    return value.strip()


def _pair(key: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise SettingError(key, text, "is not key=value", "use key=value pairs, separated by commas")
    return name.strip(), value.strip()


def _refuse_unknown_keys(keys: list[str]) -> None:
    """Refuse unknown keys and known keys of another project, both of which Pulumi ignores silently.

    Raises:
        RunError: The configuration has such a key.
    """
    project = pulumi.get_project()
    for name in pulumi.runtime.get_config_env():
        namespace, _, key = name.rpartition(":")
        if namespace not in (project, *PROVIDERS) and key in keys:
            raise pulumi.RunError(f"{name}: belongs to another project; rename it to {project}:{key}")
        if namespace == project and key not in keys:
            nearest = get_close_matches(key, sorted(keys), n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else "Pulumi.yaml lists all keys."
            # The value is left out, since it may be a secret.
            raise pulumi.RunError(f"{key}: unknown configuration key; {hint} Remove it: `pulumi config rm {key}`")
