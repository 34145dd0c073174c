"""Arguments of RayCluster, each declared once with type, default, rule and description.

They are also the keys of a stack's configuration, in camel case. `python -m component.generate --write` derives
Pulumi.yaml and docs/configuration.md from this class, and the component package for other languages has its fields.
Checks that need an answer from AWS are in plan.py.

`from __future__ import annotations` would turn the rules, which are in the annotations, into strings.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Annotated, Any, cast

import pulumi

from infra.config import rules
from infra.config.fields import Text, checked, from_text
from infra.config.worker_pool import (
    Pools,
    WorkerPoolArgs,
    check_pools,
    combinations,
    pool_defaults,
    pools_from_object,
)
from infra.errors import AS_WRITTEN, Refusal, SettingError
from infra.types import Scale, SecurityOptions
from ray_on_ecs.contract import DEFAULT_POOL, SETTINGS, key_of

# Namespaces of keys that belong to providers and to Pulumi instead of a project.
PROVIDERS = ("aws", "awsx", "pulumi")


@dataclass(frozen=True, kw_only=True)
class RayClusterArgs:
    """Inputs of RayCluster, all optional. An Input may be an Output; AWS is then not asked about its value.

    A VPC that the same program creates also requires availability_zones: one for each subnet, in the same order.
    """

    head_instance_type: str = "m5.large"
    """EC2 instance type of the Ray head (x86_64, at least 4 GiB), which schedules jobs and runs no training."""
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
    """Maximum number of GPU workers that jobs may request; 0 means worker_count, or min_workers if that is larger."""
    idle_timeout_minutes: Annotated[int, rules.idle_timeout] = 30
    """Idle time in minutes (15 to 1440) after which workers of all pools are scaled in; 0 disables the scale-in."""
    sleep_after_minutes: Annotated[int, rules.sleep_minutes] = 0
    """Idle time in minutes (15 to 1440) after which the head stops until the next run; 0 keeps it running."""
    spot: bool = False
    """Run the GPU workers of these keys on Spot Instances (cheaper; two-minute interruption notice)."""
    on_demand_workers: Annotated[int, rules.at_least_0] = 0
    """Number of GPU workers kept on demand when spot is true, in the first zone."""
    worker_efa: Annotated[str, rules.efa] = "false"
    """EFA network of the GPU workers: true, false, or auto: on for several workers whose types have the same EFA."""
    worker_capacity_reservation_id: Annotated[str, rules.reservation_id] = ""
    """On-Demand Capacity Reservation or Capacity Block that has the GPU workers, e.g. cr-0123456789abcdef0."""
    cpu_worker_instance_types: Sequence[str] = ()
    """EC2 instance types of the CPU workers (x86_64, at least 4 GiB), e.g. c6i.2xlarge; empty for no CPU workers."""
    cpu_worker_count: Annotated[int, rules.at_least_0] = 0
    """Initial number of CPU workers, one per instance of cpu_worker_instance_types."""
    min_cpu_workers: Annotated[int, rules.at_least_0] = 0
    """Minimum number of CPU workers, kept by the idle scale-in."""
    max_cpu_workers: Annotated[int, rules.at_least_0] = 0
    """Maximum number of CPU workers that jobs may request; 0 means cpu_worker_count, or min_cpu_workers if larger."""
    worker_pools: Mapping[str, WorkerPoolArgs | Mapping[str, Any]] = field(default_factory=Pools)
    """Additional pools of workers by name, e.g. h100, each with its instance types, zones and limits."""
    redeploy_workers: str = ""
    """Set to a new value to redeploy all workers, e.g. after the ECS deployment circuit breaker has fired."""
    rotate_token: str = ""
    """Set to a new value to rotate the Ray token and restart all nodes, busy nodes once they are idle."""
    vpc_cidr: Annotated[str, rules.vpc_cidr] = "10.0.0.0/16"
    """IPv4 CIDR block of the VPC that the cluster creates, /16 to /24."""
    vpc_id: Text = ""
    """Existing VPC to use instead of a new one; requires subnet_ids."""
    subnet_ids: Sequence[Text] = ()
    """Private subnets of that VPC for all instances and tasks, in different availability zones."""
    availability_zones: Sequence[str] = ()
    """Zones in order of preference, e.g. us-west-2b; GPU workers have a group in each, other nodes are in the first."""
    spread_zones: bool = False
    """Allow one job to span those availability zones (incurs cross-AZ traffic charges)."""
    nat_gateway: bool = True
    """Create a NAT gateway; false creates VPC interface endpoints instead (no internet access)."""
    nat_instance: bool = False
    """Create a NAT instance in place of the NAT gateway; it is cheaper and slower, and stops while the head sleeps."""
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
    mounts: Annotated[Mapping[str, str], rules.mounts] = field(default_factory=dict)
    """Folders of S3 that all nodes read as /mnt/NAME, through Mountpoint, each NAME=s3://bucket/prefix."""
    fsx_lustre: Annotated[str, rules.file_system] = ""
    """Existing FSx for Lustre file system in vpc_id, which all nodes mount as /mnt/fsx, e.g. fs-0123456789abcdef0."""
    fsx_lustre_gib: Annotated[int, rules.lustre_gib] = 0
    """Capacity in GiB of a new FSx for Lustre file system as /mnt/fsx, linked to fsx/ in the bucket; 0 for none."""
    efs: Annotated[str, rules.file_system] = ""
    """Existing EFS file system in vpc_id, which all nodes mount as /mnt/efs, e.g. fs-0123456789abcdef0."""
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
    run_max_hours: Annotated[float, rules.at_least_0] = 0.0
    """Hours of running time after which a run saves and ends, unless it has another --max-hours; 0 means unlimited."""
    run_max_usd: Annotated[float, rules.at_least_0] = 0.0
    """USD for its instances at which a run saves and ends, unless it has another --max-usd; 0 means unlimited."""
    max_hourly_usd: Annotated[float, rules.at_least_0] = 0.0
    """Refuse a cluster whose instances cost more USD per hour with all pools at their maximum; 0 disables the check."""
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
        """Check the type and the rule of each field, then the combinations of several."""
        AS_WRITTEN.set(self.as_written)
        for name, default in defaults().items():
            value = getattr(self, name)
            if isinstance(default, Pools):
                value = check_pools(value)
            else:
                value = checked(name, value, default, RayClusterArgs.__annotations__[name])
            object.__setattr__(self, name, value)
        combinations(self.pools)
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
        """Read the stack's configuration; an unset key has its default, an unknown one and a secret are refused."""
        AS_WRITTEN.set(_CamelCase.as_written)
        _check_keys()
        values = {name: _read(name, default) for name, default in defaults().items()}
        return _Configured(**{name: value for name, value in values.items() if value is not None})

    @property
    def pools(self) -> dict[str, WorkerPoolArgs]:
        """Pools by name: `default`, `cpu` if there are CPU workers, and those of worker_pools."""
        own = {
            pool: WorkerPoolArgs(**{key: getattr(self, name) for key, name in keys.items()})
            for pool, keys in SETTINGS.items()
            if pool == DEFAULT_POOL or self.cpu_worker_instance_types
        }
        return {**own, **cast("Pools", self.worker_pools)}  # checked by __post_init__

    def scale(self, pool: str) -> Scale:
        """Number of workers of a pool."""
        return self.pools[pool].scale(self.idle_timeout_minutes)

    @property
    def security(self) -> SecurityOptions:
        """IAM and KMS settings that all components share."""
        return SecurityOptions(**{item.name: getattr(self, item.name) for item in fields(SecurityOptions)})


class _CamelCase(RayClusterArgs):
    """Arguments whose messages name them as configuration keys and other languages do."""

    @staticmethod
    def as_written(text: str) -> str:
        # A name within a value, such as an image's, belongs to the value.
        before, names = r"(?<![\w/.:@'-])", "|".join([*defaults(), *pool_defaults()])
        pool = rf"{before}worker_pools(\.[a-z0-9-]+)(\.\w+)?"
        of_pools = re.sub(pool, lambda path: f"workerPools{path[1]}{key_of(path[2] or '')}", text)
        in_keys = re.sub(rf"{before}({names})(?![\w/@'-]|[.:]\w)", lambda name: key_of(name[0]), of_pools)
        return re.sub(r"(?<![\w'/:])(True|False)(?![\w'])", lambda word: word[0].lower(), in_keys)


class _Configured(_CamelCase):
    """Arguments from the stack's configuration."""


def defaults() -> dict[str, Any]:
    """Default of each field."""
    return {
        item.name: item.default_factory() if callable(item.default_factory) else item.default
        for item in fields(RayClusterArgs)
    }


def _read(name: str, default: Any) -> Any:
    """Value of a field's key, converted to the type of its default; None if it is not set."""
    config, key = pulumi.Config(), key_of(name)
    if isinstance(default, Pools):
        try:
            return pools_from_object(config.get_object(key))
        except pulumi.ConfigTypeError as error:
            hint = f"use e.g. `pulumi config set --path '{key}.h100.instanceTypes[0]' p5.48xlarge`"
            raise SettingError(name, error.value, "is not an object", hint) from error
    text = config.get(key)
    return text if text is None else from_text(name, text, default)


def _check_keys() -> None:
    """Refuse unknown keys and known keys of another project, both of which Pulumi ignores silently, and secrets.

    Values are left out of the messages, since they may be secrets.
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
            if key.startswith(("workerPools.", "workerPools[")):
                hint = f"set it with `pulumi config set --path '{key}' VALUE`."
            # Without a rewrite: worker_count is the unknown key here.
            raise pulumi.RunError(f"{key}: unknown configuration key; {hint} Remove it: `pulumi config rm {key}`")
        if name in secrets or pulumi.runtime.is_config_secret(name):
            command = f"pulumi config set {key} VALUE --plaintext"
            if key == "workerPools":
                command = f"pulumi config rm {key}` and set it with `--path --plaintext"
            raise Refusal(
                key,
                "is stored as a secret, and its value would be plain in previews and in the state; "
                f"`{command}`, and give jobs their secrets with job_secrets",
            )
