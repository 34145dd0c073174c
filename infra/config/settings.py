"""The settings of a cluster, each declared once, with its default and rule: the keys of the stack's configuration.

Most are arguments of RayCluster, too, and arguments.py says what they mean. `python -m infra.config --write` writes
Pulumi.yaml and docs/configuration.md. What only AWS can answer, such as whether a zone offers an instance type, is
asked in plan.py.

The annotations hold the rules: this module can't postpone annotations.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Annotated, Any, Self

import pulumi

from infra.config import validation
from infra.errors import SettingError
from infra.references import AccountRules, Alerts, Scale

# Namespaces of keys that are not a project's.
PROVIDERS = ("aws", "awsx", "pulumi")
# Problem and hint for a value of the wrong type.
WRONG_TYPE = {
    bool: ("is neither true nor false", "give one of the two"),
    int: ("is not a whole number", "give one, such as {}"),
    float: ("is not a number", "give one, such as {}"),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings, complete and checked: an annotation has the rule for its value. An Input may be an Output.

    Pulumi.yaml takes strings and numbers alone. So the keys of both groups of workers, which are arguments of
    NodeGroupArgs, are flat here, and 0 is None there.
    """

    head_instance_type: Annotated[str, validation.instance_type] = "m5.xlarge"
    worker_instance_types: Annotated[tuple[str, ...], validation.instance_types] = ("g5.xlarge",)
    """EC2 types of the Ray workers, x86_64 with NVIDIA GPUs (T4 or later), the preferred one first."""
    head_ami_id: Annotated[str, validation.ami_id] = ""
    worker_ami_id: Annotated[str, validation.ami_id] = ""
    worker_count: int = 2
    """Number of GPU instances that the cluster begins with, one Ray worker on each; a job's default request."""
    min_workers: int = 0
    """Number of GPU instances that the idle stop leaves running."""
    max_workers: int | None = None
    """Most GPU instances that jobs may request, at least worker_count; 0 is worker_count."""
    idle_timeout_minutes: Annotated[int, validation.idle_timeout_minutes] = 30
    spot: bool = False
    on_demand_workers: Annotated[int, validation.on_demand_workers] = 0
    cpu_worker_instance_types: Annotated[tuple[str, ...], validation.optional_instance_types] = ()
    """EC2 types of the CPU workers (none by default), which prepare data, such as c6i.2xlarge."""
    cpu_worker_count: int = 0
    """Number of CPU workers that the cluster begins with, one on each instance of cpu_worker_instance_types."""
    min_cpu_workers: int = 0
    """Number of CPU workers that the idle stop leaves running."""
    max_cpu_workers: int | None = None
    """Most CPU workers that jobs may request, at least cpu_worker_count; 0 is cpu_worker_count."""
    redeploy_workers: Annotated[str, validation.any_word] = ""
    rotate_token: Annotated[str, validation.any_word] = ""
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
        """Refuse what cannot work, with a SettingError: first by the rule of each field, then by those of several."""
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
        """Number of workers by workerCount, minWorkers, maxWorkers and idleTimeoutMinutes."""
        return _scale(self.worker_count, self.min_workers, self.max_workers, self.idle_timeout_minutes)

    @property
    def cpu_workers(self) -> Scale:
        """Number of CPU workers by cpuWorkerCount, minCpuWorkers, maxCpuWorkers and idleTimeoutMinutes."""
        return _scale(self.cpu_worker_count, self.min_cpu_workers, self.max_cpu_workers, self.idle_timeout_minutes)

    @property
    def rules(self) -> AccountRules:
        """The account's rules: permissionsBoundary, rolePath, kmsKeyArn, and the policies of tasks and instances."""
        return AccountRules(
            permissions_boundary=self.permissions_boundary,
            role_path=self.role_path,
            kms_key_arn=self.kms_key_arn,
            task_policy_arns=self.task_policy_arns,
            instance_policy_arns=self.instance_policy_arns,
        )

    @property
    def alerts(self) -> Alerts:
        """What alertEmail and monthlyBudgetUsd describe together."""
        return Alerts(email=self.alert_email, monthly_usd=self.monthly_budget_usd)

    @classmethod
    def load(cls) -> Self:
        """Read the stack's configuration; a key that is not set has its default."""
        values = {}
        for name, default in vars(cls()).items():
            value = _read(key_of(name), declared_default(default))
            values[name] = None if default is None and value == 0 else value
        _refuse_unknown_keys([key_of(name) for name in values])
        return cls(**{name: value for name, value in values.items() if value is not None})


def declared_default(default: Any) -> Any:
    """A default as Pulumi.yaml has it, which can't leave an integer out."""
    return 0 if default is None else default


def key_of(field_name: str) -> str:
    """Return the configuration key of a field of Settings."""
    first, *rest = field_name.split("_")
    return first + "".join(word.title() for word in rest)


def _without_outputs(value: Any) -> Any:
    """The part of a value that rules can judge."""
    match value:
        case pulumi.Output():
            return ""
        case tuple():
            return tuple(part for part in value if not isinstance(part, pulumi.Output))
        case Mapping():
            return {key: part for key, part in value.items() if not isinstance(part, pulumi.Output)}
    return value


def _scale(count: int, fewest: int, most: int | None, idle_minutes: int) -> Scale:
    return Scale(
        initial_count=count,
        min_count=fewest,
        max_count=count if most is None else most,
        default_job_count=count or most or 0,
        idle_minutes=idle_minutes,
    )


def _read(key: str, default: Any) -> Any:
    """Value of a key, of its default's type; None if it is not set."""
    config = pulumi.Config()
    getters = {bool: config.get_bool, int: config.get_int, float: config.get_float}
    try:
        value = getters.get(type(default), config.get)(key)
    except pulumi.ConfigTypeError as error:
        problem, hint = WRONG_TYPE[type(default)]
        raise SettingError(key, error.value, problem, hint.format(default)) from error
    if not isinstance(value, str):
        return value
    parts = [each.strip() for each in value.split(",") if each.strip()]
    match default:
        case tuple():
            return tuple(parts)
        case dict():
            return dict(_pair(key, each) for each in parts)
    return value.strip()


def _pair(key: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise SettingError(key, text, "has no =", "give key=value, several with commas between them")
    return name.strip(), value.strip()


def _refuse_unknown_keys(known: list[str]) -> None:
    """Refuse an unknown key, and a known one of another project, with a RunError: Pulumi ignores both silently."""
    project = pulumi.get_project()
    for name in pulumi.runtime.get_config_env():
        namespace, _, key = name.rpartition(":")
        if namespace not in (project, *PROVIDERS) and key in known:
            raise pulumi.RunError(
                f"{name}: is a setting of this project, {project}, under another name; rename it to {project}:{key}"
            )
        if namespace == project and key not in known:
            nearest = get_close_matches(key, sorted(known), n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else "Pulumi.yaml lists them all."
            # Without its value, which may be a secret.
            raise pulumi.RunError(
                f"{key}: is not a setting of this project; {hint} Remove it: `pulumi config rm {key}`"
            )
