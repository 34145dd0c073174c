"""ECS container definitions of the Ray head and of workers with and without GPUs, in a fixed order.

The image's commands do the rest: `ray-head` and `ray-worker` start Ray, and `ray-health` is the health check.
https://docs.aws.amazon.com/AmazonECS/latest/APIReference/API_ContainerDefinition.html
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from infra.definitions import efa
from infra.definitions.sizing import TaskSize
from infra.definitions.user_data import INSTANCE_FILE
from ray_on_ecs import contract

WORKER = "ray-worker"
CPU_WORKER = "ray-cpu-worker"

# ECS sends SIGKILL this long after SIGTERM (stopTimeout). In the meantime Ray drains the node and a job can save a last
# checkpoint, so Ray's limit is below the stop timeout. The head does not drain, but its jobs have 45 s
# (`ray_on_ecs.node.head`).
WORKER_STOP_SECONDS, WORKER_DRAIN_SECONDS = 120, 90
HEAD_STOP_SECONDS, HEAD_DRAIN_SECONDS = 90, 5

# The root filesystem is read-only, so Ray's temporary and spilled files and the libraries' caches go to volumes, which
# ECS deletes with the task.
TASK_VOLUMES = {"tmp": "/tmp", "home": "/home/ray"}  # nosec B108 # a volume of the task alone
# State of the head on its instance, from which the next head there recovers jobs and workers.
STATE_VOLUME, STATE_DIR = "ray-head-state", "/var/lib/ray"
# Description of the instance, for the labels of its Ray node.
INSTANCE_VOLUME, INSTANCE_MOUNT = "instance", "/run/instance"
# Folder of the instance with its file systems: one for all, so that another file system changes no task.
MOUNTS_VOLUME = {"mounts": contract.MOUNTS_DIR}
USER = "1000:1000"
Container = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ContainerDefaults:
    """Values that the container definitions of all nodes share; without mounts, the image's own /mnt stays visible."""

    image: str
    log_group: str
    region: str
    token_arn: str
    secrets_prefix: str
    size: TaskSize
    registry_secret_arn: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    mounts: bool = False


def head(
    common: ContainerDefaults,
    *,
    bucket: str,
    cluster: str,
    metrics_namespace: str,
    cluster_info_parameter: str,
    secrets_key_arn: str = "",
    sleep_after_minutes: int = 0,
    run_max_hours: float = 0.0,
    run_max_usd: float = 0.0,
) -> Container:
    """Container of the head, which runs the scheduler and the jobs' drivers, and offers Ray no CPUs or GPUs.

    The head publishes Ray's resource demand, and jobs their training metrics, to one CloudWatch namespace.
    """
    environment = {
        contract.CLOUDWATCH_NAMESPACE_VARIABLE: metrics_namespace,
        contract.HEAD_STATE_VARIABLE: STATE_DIR,
        "RAY_ON_ECS_CLOUDWATCH_NAMESPACE": metrics_namespace,
        "RAY_ON_ECS_STORAGE_PATH": f"s3://{bucket}/{contract.RUNS_PREFIX}",
        "RAY_ON_ECS_WORKER_TIMEOUT": str(contract.WORKER_TIMEOUT),
        contract.CLUSTER_INFO_VARIABLE: cluster_info_parameter,
        contract.DOCUMENTS_VARIABLE: f"s3://{bucket}/{contract.CLUSTERS_PREFIX}/{cluster}",
    }
    if secrets_key_arn:
        environment[contract.SECRETS_KEY_VARIABLE] = secrets_key_arn
    if sleep_after_minutes:
        environment[contract.SLEEP_VARIABLE] = str(sleep_after_minutes)
    limits = {"RAY_ON_ECS_MAX_HOURS": run_max_hours, "RAY_ON_ECS_MAX_USD": run_max_usd}
    environment |= {name: str(value) for name, value in limits.items() if value}
    return _container(
        contract.HEAD,
        common,
        command="ray-head",
        flags=["--num-cpus=0", "--num-gpus=0"],
        environment=environment,
        volumes={STATE_VOLUME: STATE_DIR},
        health_check="head",
        stop_seconds=HEAD_STOP_SECONDS,
        drain_seconds=HEAD_DRAIN_SECONDS,
    )


def worker(common: ContainerDefaults, *, head_host: str, pool: str, efa_devices: int = 0, block: str = "") -> Container:
    """Container of a worker, which offers Ray all CPUs and GPUs and finds the head by its DNS name.

    Its node has the label of its pool, by which runs and pipelines of Ray Data choose it. `block` is the ID of the
    Capacity Block that has its instance; without its end, of which the worker asks EC2, as that can be extended.
    """
    label = contract.label_of_pool(pool)
    return _container(
        WORKER if common.size.gpus else CPU_WORKER,
        common,
        command="ray-worker",
        flags=[f"--num-cpus={common.size.vcpus}", f"--num-gpus={common.size.gpus}"],
        environment={
            contract.INSTANCE_FILE_VARIABLE: f"{INSTANCE_MOUNT}/{INSTANCE_FILE}",
            contract.HEAD_HOST_VARIABLE: head_host,
            **({contract.NODE_GROUP_VARIABLE: label} if label else {}),
            **({contract.BLOCK_VARIABLE: block} if block else {}),
        },
        reads={INSTANCE_VOLUME: INSTANCE_MOUNT},
        health_check="worker",
        stop_seconds=WORKER_STOP_SECONDS,
        drain_seconds=WORKER_DRAIN_SECONDS,
        efa_devices=efa_devices,
    )


def _container(
    name: str,
    common: ContainerDefaults,
    *,
    command: str,
    flags: list[str],
    environment: dict[str, str],
    volumes: dict[str, str] | None = None,
    reads: dict[str, str] | None = None,
    health_check: str,
    stop_seconds: int,
    drain_seconds: int,
    efa_devices: int = 0,
) -> Container:
    """Container definition with the parts that all nodes share."""
    size = common.size
    variables = {**common.environment, **_environment(common, drain_seconds), **environment}
    volumes = {**TASK_VOLUMES, **(MOUNTS_VOLUME if common.mounts else {}), **(volumes or {})}
    mounts = [{"sourceVolume": volume, "containerPath": path} for volume, path in volumes.items()]
    read_only = [
        {"sourceVolume": volume, "containerPath": path, "readOnly": True} for volume, path in (reads or {}).items()
    ]
    credentials, gpus, devices, memlock = {}, {}, {}, []
    if common.registry_secret_arn:
        credentials = {"repositoryCredentials": {"credentialsParameter": common.registry_secret_arn}}
    if size.gpus:
        # ECS expects the number as a string, and uses the NVIDIA runtime only for containers with GPUs.
        # https://docs.aws.amazon.com/AmazonECS/latest/developerguide/ecs-gpu.html
        gpus = {"resourceRequirements": [{"type": "GPU", "value": str(size.gpus)}]}
    if efa_devices:
        devices = {"devices": efa.devices(efa_devices)}
        # The adapter reads and writes memory that must not be swapped.
        memlock = [{"name": "memlock", "softLimit": -1, "hardLimit": -1}]
    return {
        "name": name,
        "image": common.image,
        "essential": True,
        **credentials,
        "command": [command, *flags, f"--object-store-memory={size.object_store_bytes}"],
        # The same value as the task's memory: the task's limit is on a parent cgroup that the container can't see, so
        # Ray would use the instance's memory for scheduling and its out-of-memory monitor.
        "memory": size.memory_mib,
        "environment": [{"name": key, "value": variables[key]} for key in sorted(variables)],
        "secrets": [{"name": "RAY_AUTH_TOKEN", "valueFrom": common.token_arn}],
        "healthCheck": _health_check(health_check, size.gpus),
        "stopTimeout": stop_seconds,
        "user": USER,
        "readonlyRootFilesystem": True,
        # Debian's setuid files, such as `su`, give nothing. https://docs.kernel.org/userspace-api/no_new_privs.html
        "dockerSecurityOptions": ["no-new-privileges"],
        "mountPoints": [*mounts, *read_only],
        "linuxParameters": {
            "initProcessEnabled": True,
            # Docker's default for /dev/shm is 64 MiB, which Ray's object store and data loaders exceed.
            "sharedMemorySize": size.shared_memory_mib,
            "capabilities": {"drop": ["ALL"]},
            **devices,
        },
        "ulimits": [{"name": "nofile", "softLimit": 65536, "hardLimit": 65536}, *memlock],
        **gpus,
        "logConfiguration": _logs(common.log_group, common.region),
    }


def _environment(common: ContainerDefaults, drain_seconds: int) -> dict[str, str]:
    return {
        # Tasks have no access to the instance metadata service, so the region must be set here, and SDKs must not wait
        # for its answer.
        "AWS_REGION": common.region,
        "AWS_DEFAULT_REGION": common.region,
        "AWS_EC2_METADATA_DISABLED": "true",
        "RAY_AUTH_MODE": "token",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(drain_seconds),
        "RAY_USAGE_STATS_ENABLED": "0",
        contract.SECRETS_VARIABLE: common.secrets_prefix,
    }


def _health_check(kind: str, gpus: int) -> dict[str, Any]:
    command = ["CMD", "ray-health", kind]
    if gpus:
        command.append(f"--num-gpus={gpus}")
    return {
        "command": command,
        "interval": 30,
        # Without persistence mode, the NVIDIA driver takes seconds to initialize GPUs that no process has open.
        "timeout": 60 if gpus else 10,
        "retries": 5,
        # ECS's maximum: a worker may have to wait for the head's DNS record.
        "startPeriod": 300,
    }


def _logs(log_group: str, region: str) -> dict[str, Any]:
    options = {
        "awslogs-group": log_group,
        "awslogs-region": region,
        "awslogs-stream-prefix": "ray",
        # In blocking mode, a rank that prints would wait for CloudWatch Logs.
        # https://docs.aws.amazon.com/AmazonECS/latest/developerguide/using_awslogs.html
        "mode": "non-blocking",
        "max-buffer-size": "25m",
    }
    return {"logDriver": "awslogs", "options": options}


def _own_variables() -> set[str]:
    shared: dict[str, Any] = dict.fromkeys(("image", "log_group", "region", "token_arn", "secrets_prefix"), "x")
    common = ContainerDefaults(**shared, size=TaskSize(vcpus=1, memory_mib=1, gpus=0))
    names: dict[str, Any] = dict.fromkeys(
        ("bucket", "cluster", "metrics_namespace", "cluster_info_parameter", "secrets_key_arn"), "x"
    )
    numbers: dict[str, Any] = dict.fromkeys(("sleep_after_minutes", "run_max_hours", "run_max_usd"), 1)
    of_head = head(common, **names, **numbers)
    made = (of_head, worker(common, head_host="x", pool=contract.CPU_POOL, block="x"))
    parts = [part for each in made for part in each["environment"]]
    return {part["name"] for part in [*parts, *of_head["secrets"]]}


# Environment variables that the containers or ECS set, so users can't.
OWN_VARIABLES = _own_variables()
