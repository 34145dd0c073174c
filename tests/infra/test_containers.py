"""Container definitions, as agreed between image and ECS."""

from __future__ import annotations

from typing import Any

import pytest

from infra.definitions import containers
from infra.definitions.sizing import TaskSize
from infra.definitions.user_data import INSTANCE_FILE
from ray_on_ecs.config import RunConfig, defaults_in
from ray_on_ecs.contract import CPU_POOL, DEFAULT_POOL

COMMON: dict[str, Any] = {
    "image": "registry/training@sha256:00",
    "log_group": "ray-logs",
    "region": "us-west-2",
    "token_arn": "arn:aws:ssm:us-west-2:123456789012:parameter/auth",
    "secrets_prefix": "/ray-on-ecs/ray/runs",
}


def head(**more: Any) -> containers.Container:
    """A head with valid defaults."""
    size = TaskSize(vcpus=4, memory_mib=1000, gpus=0)
    return containers.head(
        containers.ContainerDefaults(**COMMON, size=size),
        bucket="runs-bucket",
        cluster="ray",
        metrics_namespace="ray/dev",
        cluster_info_parameter="facts",
        **more,
    )


def worker(gpus: int = 1, pool: str = DEFAULT_POOL) -> containers.Container:
    """A worker with valid defaults."""
    size = TaskSize(vcpus=4, memory_mib=1000, gpus=gpus)
    common = containers.ContainerDefaults(**COMMON, size=size)
    return containers.worker(common, head_host="head.x.internal", pool=pool)


def environment(container: containers.Container) -> dict[str, str]:
    """The environment by name."""
    return {entry["name"]: entry["value"] for entry in container["environment"]}


def test_the_head_offers_ray_neither_cpus_nor_gpus() -> None:
    assert head()["command"] == ["ray-head", "--num-cpus=0", "--num-gpus=0", f"--object-store-memory={200 * 2**20}"]


def test_a_worker_offers_ray_all_of_its_instance() -> None:
    assert worker(gpus=4)["command"] == [
        "ray-worker",
        "--num-cpus=4",
        "--num-gpus=4",
        f"--object-store-memory={200 * 2**20}",
    ]


def test_container_names_match_the_commands() -> None:
    assert (head()["name"], worker()["name"]) == ("ray-head", "ray-worker")


def test_head_environment_has_storage_but_no_workers() -> None:
    assert environment(head()) == {
        "AWS_DEFAULT_REGION": "us-west-2",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_REGION": "us-west-2",
        "CLOUDWATCH_NAMESPACE": "ray/dev",
        "RAY_AUTH_MODE": "token",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "5",
        "RAY_HEAD_STATE": "/var/lib/ray",
        "RAY_USAGE_STATS_ENABLED": "0",
        "SECRETS_PREFIX": "/ray-on-ecs/ray/runs",
        "RAY_ON_ECS_CLOUDWATCH_NAMESPACE": "ray/dev",
        "RAY_ON_ECS_STORAGE_PATH": "s3://runs-bucket/runs",
        "RAY_ON_ECS_WORKER_TIMEOUT": "1800",
        "CLUSTER_DOCUMENTS": "s3://runs-bucket/clusters/ray",
        "CLUSTER_INFO": "facts",
    }


def test_a_worker_finds_the_head_by_name() -> None:
    assert environment(worker()) == {
        "AWS_DEFAULT_REGION": "us-west-2",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_REGION": "us-west-2",
        "INSTANCE_FILE": "/run/instance/instance.json",
        "RAY_AUTH_MODE": "token",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "90",
        "RAY_HEAD_HOST": "head.x.internal",
        "RAY_USAGE_STATS_ENABLED": "0",
        "SECRETS_PREFIX": "/ray-on-ecs/ray/runs",
    }


def test_user_variables_do_not_override_container_variables() -> None:
    common = containers.ContainerDefaults(
        **COMMON, size=TaskSize(vcpus=4, memory_mib=1000, gpus=0), environment={"HF_HOME": "/tmp/hf"}
    )
    cpu_worker = containers.worker(common, head_host="head.x.internal", pool=CPU_POOL, block="cr-0123456789abcdef0")
    names = {"RAY_AUTH_TOKEN"}
    whole = head(secrets_key_arn="arn", sleep_after_minutes=60, run_max_hours=1.0, run_max_usd=1.0)
    for container in (whole, worker(), cpu_worker):
        names |= environment(container).keys()
    assert names - {"HF_HOME"} == containers.OWN_VARIABLES
    assert environment(cpu_worker)["HF_HOME"] == "/tmp/hf"


def test_the_environment_stands_in_a_fixed_order() -> None:
    for container in (head(), worker()):
        names = [entry["name"] for entry in container["environment"]]
        assert names == sorted(names)


def test_the_token_comes_as_a_secret() -> None:
    for container in (head(), worker()):
        assert container["secrets"] == [{"name": "RAY_AUTH_TOKEN", "valueFrom": COMMON["token_arn"]}]
        assert "RAY_AUTH_TOKEN" not in environment(container)


def test_ray_stops_draining_before_ecs_kills_it() -> None:
    for container in (head(), worker()):
        drain = int(environment(container)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        assert drain < container["stopTimeout"]
    assert (head()["stopTimeout"], worker()["stopTimeout"]) == (90, 120)


def test_containers_have_init_shared_memory_and_ulimits() -> None:
    for container in (head(), worker()):
        parameters = container["linuxParameters"]
        assert parameters["initProcessEnabled"]
        assert parameters["sharedMemorySize"] == 300
        assert container["ulimits"] == [{"name": "nofile", "softLimit": 65536, "hardLimit": 65536}]


def test_each_is_asked_for_its_own_health() -> None:
    grace = {"interval": 30, "retries": 5, "startPeriod": 300}  # a worker may wait minutes for its head
    assert head()["healthCheck"] == {"command": ["CMD", "ray-health", "head"], "timeout": 10, **grace}
    command = ["CMD", "ray-health", "worker", "--num-gpus=1"]
    assert worker()["healthCheck"] == {"command": command, "timeout": 60, **grace}
    assert cpu_worker()["healthCheck"] == {"command": ["CMD", "ray-health", "worker"], "timeout": 10, **grace}


def test_logs_go_to_the_stacks_group() -> None:
    for container in (head(), worker()):
        assert container["logConfiguration"] == {
            "logDriver": "awslogs",
            "options": {
                "awslogs-group": "ray-logs",
                "awslogs-region": "us-west-2",
                "awslogs-stream-prefix": "ray",
                "mode": "non-blocking",
                "max-buffer-size": "25m",
            },
        }


def test_the_containers_limit_is_the_tasks_memory() -> None:
    for container in (head(), worker()):
        assert container["memory"] == 1000


def test_nothing_can_be_gained_inside_a_container() -> None:
    for container in (head(), worker()):
        assert container["user"] == "1000:1000"
        assert container["linuxParameters"]["capabilities"] == {"drop": ["ALL"]}
        assert container["readonlyRootFilesystem"]
        assert container["dockerSecurityOptions"] == ["no-new-privileges"]


def mounts(container: containers.Container) -> dict[str, str]:
    """The path of each volume."""
    return {mount["sourceVolume"]: mount["containerPath"] for mount in container["mountPoints"]}


def test_writable_paths_are_task_volumes() -> None:
    written = {name: path for name, path in mounts(worker()).items() if name not in read_only(worker())}
    assert written == containers.TASK_VOLUMES
    assert containers.TASK_VOLUMES == {"tmp": "/tmp", "home": "/home/ray"}


def test_the_head_alone_keeps_its_state() -> None:
    assert mounts(head()) == {**containers.TASK_VOLUMES, "ray-head-state": "/var/lib/ray"}
    assert environment(head())["RAY_HEAD_STATE"] == mounts(head())["ray-head-state"]
    assert "RAY_HEAD_STATE" not in environment(worker())


def read_only(container: containers.Container) -> set[str]:
    """The volumes that the container can't write to."""
    return {mount["sourceVolume"] for mount in container["mountPoints"] if mount.get("readOnly")}


def test_worker_mounts_the_instance_description() -> None:
    for container in (worker(), cpu_worker()):
        assert read_only(container) == {"instance"}
        folder = mounts(container)["instance"]
        assert environment(container)["INSTANCE_FILE"] == f"{folder}/{INSTANCE_FILE}"


def cpu_worker() -> containers.Container:
    """A CPU worker with valid defaults."""
    size = TaskSize(vcpus=8, memory_mib=1000, gpus=0)
    common = containers.ContainerDefaults(**COMMON, size=size)
    return containers.worker(common, head_host="head.x.internal", pool=CPU_POOL)


def test_a_cpu_worker_is_a_worker_without_gpus() -> None:
    made, other = cpu_worker(), worker()
    assert made["command"][:3] == ["ray-worker", "--num-cpus=8", "--num-gpus=0"]
    assert "resourceRequirements" not in made
    assert environment(made) == {**environment(other), "RAY_NODE_TYPE_NAME": "cpu-workers"}
    assert made["name"] == "ray-cpu-worker"


@pytest.mark.parametrize(("gpus", "name"), [(8, "ray-worker"), (0, "ray-cpu-worker")])
def test_other_pools_are_the_labels_of_their_nodes(gpus: int, name: str) -> None:
    definition = worker(gpus, "h100")
    assert environment(definition) == {**environment(worker(gpus)), "RAY_NODE_TYPE_NAME": "h100"}
    assert (definition["name"], definition["command"][2]) == (name, f"--num-gpus={gpus}")


def test_head_has_the_limits_of_runs() -> None:
    limits = {"RAY_ON_ECS_MAX_HOURS": "24.0", "RAY_ON_ECS_MAX_USD": "99.5"}
    assert environment(head(run_max_hours=24.0, run_max_usd=99.5)) == {**environment(head()), **limits}
    assert limits.keys().isdisjoint(environment(head(run_max_hours=0.0)))
    assert RunConfig(**defaults_in(limits)).max_usd == 99.5


def test_private_registry_credentials_come_from_a_secret() -> None:
    secret = "arn:aws:secretsmanager:us-west-2:123456789012:secret:registry"
    common = containers.ContainerDefaults(
        **COMMON, size=TaskSize(vcpus=4, memory_mib=1000, gpus=0), registry_secret_arn=secret
    )
    assert containers.worker(common, head_host="head.x.internal", pool=CPU_POOL)["repositoryCredentials"] == {
        "credentialsParameter": secret
    }
    assert "repositoryCredentials" not in worker()
