"""The settings of a cluster, each declared once: its name, type and meaning, and below them its default and rule.

A setting is an argument of RayCluster and a key of the stack's configuration. `python -m infra.config --write` writes
Pulumi.yaml and docs/configuration.md from this module. What only AWS can answer, such as whether a zone offers an
instance type, is asked in plan.py.

Pulumi reads the annotations of RayClusterArgs as they stand: this module can't postpone annotations.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Annotated, Any, Self, TypedDict

import pulumi

from infra.config import validation
from infra.errors import SettingError
from infra.references import Alerts, Scale

# Namespaces of keys that are not a project's.
PROVIDERS = ("aws", "awsx", "pulumi")
# Problem and hint for a value of the wrong type.
WRONG_TYPE = {
    bool: ("is neither true nor false", "give one of the two"),
    int: ("is not a whole number", "give one, such as {}"),
    float: ("is not a number", "give one, such as {}"),
}


class RayClusterArgs(TypedDict, total=False):
    """Inputs of RayCluster. Each is a key of the stack's configuration and has a default: see docs/configuration.md.

    What AWS is asked about while the cluster is planned has to be known then, and is no Input. A VPC that the same
    program makes needs availability_zones, too: one for each subnet, in their order.
    """

    head_instance_type: str
    """EC2 type of the Ray head, which schedules and trains nothing; x86_64 with at least 8 GiB."""
    worker_instance_types: list[str]
    """EC2 types of the Ray workers, x86_64 with NVIDIA GPUs (T4 or later), the preferred one first."""
    head_ami_id: str
    """Machine image of the instances without GPUs, such as ami-0123456789abcdef0; by default AWS's newest for ECS."""
    worker_ami_id: str
    """Machine image of the workers' instances, with the NVIDIA driver; by default AWS's newest for ECS."""
    worker_count: int
    """Number of GPU instances that the cluster begins with, one Ray worker on each; a job's default request."""
    min_workers: int
    """Number of GPU instances that the idle stop leaves running."""
    max_workers: int
    """Most GPU instances that jobs may request, at least worker_count; 0 is worker_count."""
    idle_timeout_minutes: int
    """Idle time in minutes, 15 to 1440, after which GPU and CPU worker instances are stopped; 0 never stops them."""
    spot: bool
    """Run the workers on spot instances, which cost less and which EC2 may reclaim at two minutes' notice."""
    on_demand_workers: int
    """With spot, the number of workers that stay on demand."""
    cpu_worker_instance_types: list[str]
    """EC2 types of the CPU workers (none by default), which prepare data, such as c6i.2xlarge."""
    cpu_worker_count: int
    """Number of CPU workers that the cluster begins with, one on each instance of cpu_worker_instance_types."""
    min_cpu_workers: int
    """Number of CPU workers that the idle stop leaves running."""
    max_cpu_workers: int
    """Most CPU workers that jobs may request, at least cpu_worker_count; 0 is cpu_worker_count."""
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
    image_uri: str
    """A ready training image instead of the one in docker/; no repository is made then and nothing is built."""
    registry_secret_arn: str
    """Secret in AWS Secrets Manager with the user name and password of image_uri's registry."""
    bucket_name: str
    """Existing bucket for the runs, which outlives the cluster, instead of one of the cluster's own."""
    retain_bucket: bool
    """Keep the bucket and its runs when the cluster is destroyed; it takes effect with the next `pulumi up`."""
    object_version_days: int
    """Days for which the bucket keeps objects that are overwritten or deleted; 0 keeps none."""
    data_buckets: list[str]
    """Buckets that training may also read, each as bucket or bucket/prefix."""
    job_secrets: list[str]
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
    tags: dict[str, str]
    """Tags of the company for everything."""
    permissions_boundary: str
    """ARN of the policy that bounds every role."""
    task_policy_arns: list[str]
    """ARNs of IAM policies that every task has, too, such as arn:aws:iam::123456789012:policy/read-features."""
    role_path: str
    """IAM path of every role, such as /teams/ml/."""
    kms_key_arn: str
    """ARN of your KMS key for bucket, disks, logs, token and repository; by default AWS's keys."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The same settings, complete and checked: an annotation has the rule for its value."""

    head_instance_type: Annotated[str, validation.instance_type] = "m5.xlarge"
    worker_instance_types: Annotated[tuple[str, ...], validation.instance_types] = ("g5.xlarge",)
    head_ami_id: Annotated[str, validation.ami_id] = ""
    worker_ami_id: Annotated[str, validation.ami_id] = ""
    worker_count: int = 2
    min_workers: int = 0
    max_workers: int = 0
    idle_timeout_minutes: Annotated[int, validation.idle_timeout_minutes] = 30
    spot: bool = False
    on_demand_workers: Annotated[int, validation.on_demand_workers] = 0
    cpu_worker_instance_types: Annotated[tuple[str, ...], validation.optional_instance_types] = ()
    cpu_worker_count: int = 0
    min_cpu_workers: int = 0
    max_cpu_workers: int = 0
    redeploy_workers: Annotated[str, validation.any_word] = ""
    rotate_token: Annotated[str, validation.any_word] = ""
    vpc_cidr: Annotated[str, validation.vpc_cidr] = "10.0.0.0/16"
    vpc_id: Annotated[str, validation.vpc_id] = ""
    subnet_ids: Annotated[tuple[str, ...], validation.subnet_ids] = ()
    availability_zones: Annotated[tuple[str, ...], validation.availability_zones] = ()
    spread_zones: bool = False
    nat_gateway: bool = True
    image_uri: Annotated[str, validation.image_uri] = ""
    registry_secret_arn: Annotated[str, validation.registry_secret_arn] = ""
    bucket_name: Annotated[str, validation.bucket_name] = ""
    retain_bucket: bool = False
    object_version_days: Annotated[int, validation.object_version_days] = 0
    data_buckets: Annotated[tuple[str, ...], validation.data_buckets] = ()
    job_secrets: Annotated[tuple[str, ...], validation.job_secrets] = ()
    root_volume_gib: Annotated[int, validation.root_volume_gib] = 100
    log_retention_days: Annotated[int, validation.log_retention_days] = 30
    check_quotas: bool = True
    max_hourly_usd: Annotated[float, validation.max_hourly_usd] = 0.0
    alert_email: Annotated[str, validation.alert_email] = ""
    monthly_budget_usd: Annotated[int, validation.monthly_budget_usd] = 500
    tags: Annotated[Mapping[str, str], validation.tags] = field(default_factory=dict)
    permissions_boundary: Annotated[str, validation.permissions_boundary] = ""
    task_policy_arns: Annotated[tuple[str, ...], validation.task_policy_arns] = ()
    role_path: Annotated[str, validation.role_path] = "/"
    kms_key_arn: Annotated[str, validation.kms_key_arn] = ""

    def __post_init__(self) -> None:
        """Refuse what cannot work, with a SettingError: first by the rule of each field, then by those of several."""
        for each in fields(self):
            for rule in getattr(each.type, "__metadata__", ()):
                rule(key_of(each.name), getattr(self, each.name))
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
    def alerts(self) -> Alerts:
        """What alertEmail and monthlyBudgetUsd describe together."""
        return Alerts(email=self.alert_email, monthly_usd=self.monthly_budget_usd)

    @classmethod
    def load(cls) -> Self:
        """Read the stack's configuration; a key that is not set has its default."""
        read = {name: _read(key_of(name), default) for name, default in vars(cls()).items()}
        _refuse_unknown_keys([key_of(name) for name in read])
        return cls(**{name: value for name, value in read.items() if value is not None})


def key_of(field_name: str) -> str:
    """Return the configuration key of a field of Settings."""
    first, *rest = field_name.split("_")
    return first + "".join(word.title() for word in rest)


def _scale(count: int, fewest: int, most: int, idle_minutes: int) -> Scale:
    return Scale(
        initial_count=count,
        min_count=fewest,
        max_count=most or count,
        default_job_count=count or most,
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
