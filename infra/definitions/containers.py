"""Container definitions of the Ray head and the Ray workers, as ECS takes them, in a fixed order.

The image's own commands do the rest: `ray-head` and `ray-worker` start Ray on its ports, `ray-health` asks whether it
lives. Pure functions: they become JSON only in the task definition.
https://docs.aws.amazon.com/AmazonECS/latest/APIReference/API_ContainerDefinition.html
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from infra.definitions.sizing import TaskSize
from infra.definitions.user_data import INSTANCE_FILE
from ray_on_ecs.contract import (
    CLOUDWATCH_NAMESPACE_VARIABLE,
    CLUSTER_INFO_VARIABLE,
    CPU_WORKERS,
    CPU_WORKERS_VARIABLE,
    HEAD,
    HEAD_HOST_VARIABLE,
    HEAD_STATE_VARIABLE,
    INSTANCE_FILE_VARIABLE,
    NODE_GROUP_VARIABLE,
    RUNS_PREFIX,
    SECRETS_VARIABLE,
    WORKER_TIMEOUT,
)

WORKER = "ray-worker"
CPU_WORKER = "ray-cpu-worker"

# ECS sends SIGKILL this long after SIGTERM. Ray drains in that time, and a job can save a last checkpoint: Ray's limit
# lies below that of ECS. The head has nothing to drain, but its jobs have 45 s (`ray_on_ecs.node.head`).
WORKER_STOP_SECONDS, WORKER_DRAIN_SECONDS = 120, 90
HEAD_STOP_SECONDS, HEAD_DRAIN_SECONDS = 90, 5

# All that a container writes: Ray's temporary files and spilled objects, and what libraries keep at home. Each task has
# its own, which ECS removes with it.
TASK_VOLUMES = {"tmp": "/tmp", "home": "/home/ray"}
# What the head alone keeps, on its instance: the next head there takes up the jobs and the workers of the last one.
STATE_VOLUME, STATE_DIR = "ray-head-state", "/var/lib/ray"
# What the instance says of itself, for the labels of its Ray node.
INSTANCE_VOLUME, INSTANCE_MOUNT = "instance", "/run/instance"
USER = "1000:1000"
# What the containers set themselves, and ECS in them.
OWN_VARIABLES = {
    "AWS_DEFAULT_REGION",
    "AWS_EC2_METADATA_DISABLED",
    "AWS_REGION",
    "RAY_AUTH_MODE",
    "RAY_AUTH_TOKEN",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S",
    "RAY_ON_ECS_CLOUDWATCH_NAMESPACE",
    "RAY_ON_ECS_STORAGE_PATH",
    "RAY_ON_ECS_WORKER_TIMEOUT",
    "RAY_USAGE_STATS_ENABLED",
    CLOUDWATCH_NAMESPACE_VARIABLE,
    CLUSTER_INFO_VARIABLE,
    CPU_WORKERS_VARIABLE,
    HEAD_HOST_VARIABLE,
    HEAD_STATE_VARIABLE,
    INSTANCE_FILE_VARIABLE,
    NODE_GROUP_VARIABLE,
    SECRETS_VARIABLE,
}

Container = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ContainerDefaults:
    """What the containers of head and workers share."""

    image: str
    log_group: str
    region: str
    token_arn: str
    secrets_prefix: str
    size: TaskSize
    registry_secret_arn: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


def head(
    common: ContainerDefaults,
    *,
    bucket: str,
    metrics_namespace: str,
    cluster_info_parameter: str,
    cpu_workers: bool = False,
) -> Container:
    """Define the head: it schedules and runs the job's driver, so it offers Ray no CPU and no GPU.

    It publishes what Ray is short of, and the job how it goes, to one CloudWatch namespace.
    """
    of_cpu_workers = {CPU_WORKERS_VARIABLE: "true"} if cpu_workers else {}
    return _container(
        HEAD,
        common,
        command="ray-head",
        flags=["--num-cpus=0", "--num-gpus=0"],
        environment={
            CLOUDWATCH_NAMESPACE_VARIABLE: metrics_namespace,
            HEAD_STATE_VARIABLE: STATE_DIR,
            "RAY_ON_ECS_CLOUDWATCH_NAMESPACE": metrics_namespace,
            "RAY_ON_ECS_STORAGE_PATH": f"s3://{bucket}/{RUNS_PREFIX}",
            "RAY_ON_ECS_WORKER_TIMEOUT": str(WORKER_TIMEOUT),
            CLUSTER_INFO_VARIABLE: cluster_info_parameter,
            **of_cpu_workers,
        },
        volumes={**TASK_VOLUMES, STATE_VOLUME: STATE_DIR},
        health_check="head",
        stop_seconds=HEAD_STOP_SECONDS,
        drain_seconds=HEAD_DRAIN_SECONDS,
    )


def worker(common: ContainerDefaults, *, head_host: str) -> Container:
    """Define a worker: it offers Ray the whole instance and finds the head by its DNS name."""
    return _joining(WORKER, common, head_host, [f"--num-cpus={common.size.vcpus}", f"--num-gpus={common.size.gpus}"])


def cpu_worker(common: ContainerDefaults, *, head_host: str) -> Container:
    """Define a CPU worker: a worker that offers its CPUs alone, under a label by which pipelines choose it."""
    flags = [f"--num-cpus={common.size.vcpus}", "--num-gpus=0"]
    return _joining(CPU_WORKER, common, head_host, flags, {NODE_GROUP_VARIABLE: CPU_WORKERS})


def _joining(
    name: str, common: ContainerDefaults, head_host: str, flags: list[str], labels: dict[str, str] | None = None
) -> Container:
    return _container(
        name,
        common,
        command="ray-worker",
        flags=flags,
        environment={
            INSTANCE_FILE_VARIABLE: f"{INSTANCE_MOUNT}/{INSTANCE_FILE}",
            HEAD_HOST_VARIABLE: head_host,
            **(labels or {}),
        },
        volumes=TASK_VOLUMES,
        reads={INSTANCE_VOLUME: INSTANCE_MOUNT},
        health_check="worker",
        stop_seconds=WORKER_STOP_SECONDS,
        drain_seconds=WORKER_DRAIN_SECONDS,
    )


def _container(
    name: str,
    common: ContainerDefaults,
    *,
    command: str,
    flags: list[str],
    environment: dict[str, str],
    volumes: dict[str, str],
    reads: dict[str, str] | None = None,
    health_check: str,
    stop_seconds: int,
    drain_seconds: int,
) -> Container:
    """Put together what both kinds share."""
    size = common.size
    variables = {**common.environment, **_environment(common, drain_seconds), **environment}
    return {
        "name": name,
        "image": common.image,
        "essential": True,
        **_credentials(common.registry_secret_arn),
        "command": [command, *flags, f"--object-store-memory={size.object_store_bytes}"],
        # The task's whole memory, said again: the task's own limit is on a cgroup that the container can't see, and Ray
        # would announce the instance's memory and watch that for the job to outgrow.
        "memory": size.memory_mib,
        "environment": [{"name": key, "value": variables[key]} for key in sorted(variables)],
        "secrets": [{"name": "RAY_AUTH_TOKEN", "valueFrom": common.token_arn}],
        "healthCheck": _health_check(health_check, size.gpus),
        "stopTimeout": stop_seconds,
        "user": USER,
        "readonlyRootFilesystem": True,
        "mountPoints": [
            *({"sourceVolume": volume, "containerPath": path} for volume, path in volumes.items()),
            *(
                {"sourceVolume": volume, "containerPath": path, "readOnly": True}
                for volume, path in (reads or {}).items()
            ),
        ],
        "linuxParameters": {
            "initProcessEnabled": True,
            # Without it Docker gives /dev/shm 64 MiB, and both Ray's object store and data loaders live there.
            "sharedMemorySize": size.shared_memory_mib,
            "capabilities": {"drop": ["ALL"]},
        },
        "ulimits": [{"name": "nofile", "softLimit": 65536, "hardLimit": 65536}],
        **_gpus(size.gpus),
        "logConfiguration": _logs(common.log_group, common.region),
    }


def _credentials(secret_arn: str) -> dict[str, Any]:
    return {"repositoryCredentials": {"credentialsParameter": secret_arn}} if secret_arn else {}


def _environment(common: ContainerDefaults, drain_seconds: int) -> dict[str, str]:
    return {
        # The instance metadata service is out of a task's reach: nothing else tells the region, and asking only waits.
        "AWS_REGION": common.region,
        "AWS_DEFAULT_REGION": common.region,
        "AWS_EC2_METADATA_DISABLED": "true",
        "RAY_AUTH_MODE": "token",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(drain_seconds),
        "RAY_USAGE_STATS_ENABLED": "0",
        SECRETS_VARIABLE: common.secrets_prefix,
    }


def _gpus(count: int) -> dict[str, Any]:
    # ECS takes the number as a string, and hands the NVIDIA runtime only to containers that ask for GPUs.
    return {"resourceRequirements": [{"type": "GPU", "value": str(count)}]} if count else {}


def _health_check(kind: str, gpus: int) -> dict[str, Any]:
    # Five minutes of grace, the longest that ECS gives: a worker may wait for the head's address to appear. GPUs that
    # no process has open take the driver seconds to wake.
    return {
        "command": ["CMD", "ray-health", kind, *([f"--num-gpus={gpus}"] if gpus else [])],
        "interval": 30,
        "timeout": 60 if gpus else 10,
        "retries": 5,
        "startPeriod": 300,
    }


def _logs(log_group: str, region: str) -> dict[str, Any]:
    options = {
        "awslogs-group": log_group,
        "awslogs-region": region,
        "awslogs-stream-prefix": "ray",
        # Not the account's default: a rank that prints must not wait for CloudWatch Logs.
        "mode": "non-blocking",
        "max-buffer-size": "25m",
    }
    return {"logDriver": "awslogs", "options": options}
