"""Container definitions of the Ray head and the Ray workers, as ECS takes them, in a fixed order.

The image's own commands do the rest: `ray-head` and `ray-worker` start Ray on its ports, `ray-health` asks whether it
lives. Pure functions: they become JSON only in the task definition.
https://docs.aws.amazon.com/AmazonECS/latest/APIReference/API_ContainerDefinition.html
"""

from __future__ import annotations

from typing import Any

from infra.policies import RUNS_PREFIX
from infra.sizing import TaskSize

HEAD = "ray-head"
WORKER = "ray-worker"
DASHBOARD_PORT = 8265

# ECS sends SIGKILL this long after SIGTERM. Ray drains in that time, and a job can save a last checkpoint: Ray's limit
# lies below that of ECS. The head has nothing to drain, and a short limit makes `pulumi destroy` short.
WORKER_STOP_SECONDS, WORKER_DRAIN_SECONDS = 120, 90
HEAD_STOP_SECONDS, HEAD_DRAIN_SECONDS = 30, 5

Container = dict[str, Any]


def head(
    *,
    image: str,
    log_group: str,
    region: str,
    token_arn: str,
    size: TaskSize,
    bucket: str,
) -> Container:
    """Define the head: it schedules and runs the job's driver, so it offers Ray no CPU and no GPU."""
    return _container(
        HEAD,
        image=image,
        command=["ray-head", "--num-cpus=0", "--num-gpus=0", f"--object-store-memory={size.object_store_bytes}"],
        environment={
            **_environment(region, HEAD_DRAIN_SECONDS),
            "TRAINING_STORAGE_PATH": f"s3://{bucket}/{RUNS_PREFIX}",
        },
        health_check="head",
        stop_seconds=HEAD_STOP_SECONDS,
        log_group=log_group,
        region=region,
        token_arn=token_arn,
        size=size,
    )


def worker(
    *,
    image: str,
    log_group: str,
    region: str,
    token_arn: str,
    size: TaskSize,
    head_host: str,
) -> Container:
    """Define a worker: it offers Ray the whole instance and finds the head by its DNS name."""
    return _container(
        WORKER,
        image=image,
        command=[
            "ray-worker",
            f"--num-cpus={size.vcpus}",
            f"--num-gpus={size.gpus}",
            f"--object-store-memory={size.object_store_bytes}",
        ],
        environment={**_environment(region, WORKER_DRAIN_SECONDS), "RAY_HEAD_HOST": head_host},
        health_check="worker",
        stop_seconds=WORKER_STOP_SECONDS,
        log_group=log_group,
        region=region,
        token_arn=token_arn,
        size=size,
    )


def _container(
    name: str,
    *,
    image: str,
    command: list[str],
    environment: dict[str, str],
    health_check: str,
    stop_seconds: int,
    log_group: str,
    region: str,
    token_arn: str,
    size: TaskSize,
) -> Container:
    """Put together what both kinds share; no cpu and memory, as the one container has its task's."""
    return {
        "name": name,
        "image": image,
        "essential": True,
        "command": command,
        "environment": [{"name": key, "value": environment[key]} for key in sorted(environment)],
        "secrets": [{"name": "RAY_AUTH_TOKEN", "valueFrom": token_arn}],
        "healthCheck": _health_check(health_check),
        "stopTimeout": stop_seconds,
        # Without it Docker gives /dev/shm 64 MiB, and both Ray's object store and data loaders live there.
        "linuxParameters": {"initProcessEnabled": True, "sharedMemorySize": size.shared_memory_mib},
        "ulimits": [{"name": "nofile", "softLimit": 65536, "hardLimit": 65536}],
        **_gpus(size.gpus),
        "logConfiguration": _logs(log_group, region),
    }


def _environment(region: str, drain_seconds: int) -> dict[str, str]:
    return {
        # The instance metadata service is out of a task's reach: nothing else tells the region, and asking only waits.
        "AWS_REGION": region,
        "AWS_DEFAULT_REGION": region,
        "AWS_EC2_METADATA_DISABLED": "true",
        "RAY_AUTH_MODE": "token",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(drain_seconds),
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def _gpus(count: int) -> dict[str, Any]:
    # ECS takes the number as a string, and hands the NVIDIA runtime only to containers that ask for GPUs.
    return {"resourceRequirements": [{"type": "GPU", "value": str(count)}]} if count else {}


def _health_check(kind: str) -> dict[str, Any]:
    # Five minutes of grace, the longest that ECS gives: a worker may wait for the head's address to appear.
    return {"command": ["CMD", "ray-health", kind], "interval": 30, "timeout": 10, "retries": 5, "startPeriod": 300}


def _logs(log_group: str, region: str) -> dict[str, Any]:
    options = {"awslogs-group": log_group, "awslogs-region": region, "awslogs-stream-prefix": "ray"}
    return {"logDriver": "awslogs", "options": options}
