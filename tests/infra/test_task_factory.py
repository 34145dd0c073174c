"""Roles, task definitions and services of head and workers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pulumi
import pytest

from infra.definitions import containers, policies
from infra.definitions.sizing import TaskSize
from infra.definitions.user_data import INSTANCE_DIR
from infra.service import Service, ServiceArgs
from infra.task_definition import TaskDefinition
from infra.task_factory import TaskFactory
from infra.types import Location, NetworkRef, ResourceRef, SecurityOptions
from ray_on_ecs.contract import DEFAULT_POOL
from tests.infra.fake_aws import ACCOUNT, DIGEST, REGION, REGISTRY, Cloud, later, node_spec

IMAGE = f"{REGISTRY}/training@{DIGEST}"
LOGS = "arn:aws:logs:us-west-2:123456789012:log-group:ray-logs"
TOKEN = "arn:aws:ssm:us-west-2:123456789012:parameter/auth"
FACTS = "arn:aws:ssm:us-west-2:123456789012:parameter/cluster-info"
GROUP = "arn:aws:autoscaling:us-west-2:123456789012:autoScalingGroup:1:autoScalingGroupName/workers-group"
BUCKET = "arn:aws:s3:::training-bucket"
CLUSTER_TASKS = f"arn:aws:ecs:{REGION}:{ACCOUNT}:task/ray-cluster/*"
HEAD_SIZE = TaskSize(vcpus=4, memory_mib=14336, gpus=0)
WORKER_SIZE = TaskSize(vcpus=48, memory_mib=185600, gpus=4)
WORKER = node_spec("g5.12xlarge", gpus=4, pool=DEFAULT_POOL)
KINDS = ["ray-head", "ray-workers"]
TASKS = ["ray-head", "ray-worker"]
NAMESPACE = "ray-on-ecs/ray-cluster"


def cluster() -> ResourceRef:
    """The ECS cluster."""
    return ResourceRef(name=later("ray-cluster"), arn=later("arn:cluster"))


def tasks() -> TaskFactory:
    """Task defaults with valid values."""
    return TaskFactory(
        cluster=cluster(),
        location=Location(
            partition="aws", account=ACCOUNT, region=REGION, worker_zones=("us-west-2a",), zones=("us-west-2a",)
        ),
        security=SecurityOptions(),
        image_uri=IMAGE,
        logs=ResourceRef(name=later("ray-logs"), arn=later(LOGS)),
        token_parameter_arn=TOKEN,
        bucket=ResourceRef(name=later("training-bucket"), arn=later(BUCKET)),
    )


def service(name: str, task: TaskDefinition, after: Sequence[pulumi.Resource], **args: Any) -> Service:
    """Service with valid defaults, in a separate network."""
    network = pulumi.CustomResource("test:index:Network", f"{name}-network", {})
    subnets = {"us-west-2a": later("subnet-private"), "us-west-2b": later("subnet-other")}
    ref = NetworkRef(
        zone="us-west-2a",
        subnets=subnets,
        tasks_group_id=later("sg-1"),
        instances_group_id=later("sg-2"),
        network=network,
    )
    return Service(
        name,
        ServiceArgs(
            cluster=cluster(),
            network=ref,
            subnets=ref.subnets_in(("us-west-2a",)),
            task_definition_arn=task.definition_arn,
            capacity_provider=f"{name}-provider",
            after=after,
            **args,
        ),
    )


def worker_task() -> TaskDefinition:
    """Task definition of the default pool's workers."""
    group = ResourceRef(name=later("workers-group"), arn=later(GROUP))
    args = tasks().worker("workers", replace(WORKER, task=WORKER_SIZE), "head.x.internal", group)
    return TaskDefinition("ray-on-ecs-ray-worker-task", args)


def common(size: TaskSize) -> containers.ContainerDefaults:
    """Container defaults as `node` has them."""
    prefix = "/ray-on-ecs/ray-cluster/runs"
    return containers.ContainerDefaults(
        image=IMAGE, log_group="ray-logs", region=REGION, token_arn=TOKEN, secrets_prefix=prefix, size=size
    )


@pytest.fixture
def nodes(cloud: Cloud) -> Cloud:
    """An account with both kinds in it, which depend on one resource of the caller's."""

    def program() -> None:
        association = pulumi.CustomResource("test:index:Association", "association", {})
        facts = ResourceRef(name=later("cluster-info"), arn=later(FACTS))
        head = TaskDefinition("ray-on-ecs-ray-head-task", tasks().head(HEAD_SIZE, cluster_info_parameter=facts))
        worker = worker_task()
        needed = [association, *head.role_policies, *worker.role_policies]
        service("ray-head", head, needed, count=1, registry_arn="arn:registry")
        service("ray-workers", worker, needed, count=2)

    cloud.run(program)
    return cloud


def test_the_head_runs_its_container(nodes: Cloud) -> None:
    (container,) = json.loads(nodes.resources["ray-head-task-definition"].inputs["containerDefinitions"])
    names: dict[str, Any] = {
        "bucket": "training-bucket",
        "metrics_namespace": NAMESPACE,
        "cluster_info_parameter": "cluster-info",
    }
    expected = containers.head(common(HEAD_SIZE), cluster="ray-cluster", **names)
    assert container == expected


def test_a_worker_runs_its_container(nodes: Cloud) -> None:
    (container,) = json.loads(nodes.resources["ray-worker-task-definition"].inputs["containerDefinitions"])
    expected = containers.worker(common(WORKER_SIZE), head_host="head.x.internal", pool=DEFAULT_POOL)
    assert container == expected


@pytest.mark.parametrize("kind", TASKS)
def test_task_volumes_match_container_mounts(nodes: Cloud, kind: str) -> None:
    task = nodes.resources[f"{kind}-task-definition"].inputs
    (container,) = json.loads(task["containerDefinitions"])
    assert [volume["name"] for volume in task["volumes"]] == [
        mount["sourceVolume"] for mount in container["mountPoints"]
    ]


def test_only_the_heads_state_outlives_its_task(nodes: Cloud) -> None:
    *others, state = nodes.resources["ray-head-task-definition"].inputs["volumes"]
    shared = {"scope": "shared", "autoprovision": True, "driver": "local"}
    assert state == {"name": "ray-head-state", "dockerVolumeConfiguration": shared}
    *of_worker, instance = nodes.resources["ray-worker-task-definition"].inputs["volumes"]
    assert others == of_worker == [{"name": "tmp"}, {"name": "home"}]
    assert instance == {"name": "instance", "hostPath": INSTANCE_DIR}


@pytest.mark.parametrize(("kind", "size"), [("ray-head", HEAD_SIZE), ("ray-worker", WORKER_SIZE)], ids=TASKS)
def test_task_uses_awsvpc_and_the_instance_size(nodes: Cloud, kind: str, size: TaskSize) -> None:
    task = nodes.resources[f"{kind}-task-definition"].inputs
    assert task["networkMode"] == "awsvpc"
    assert task["requiresCompatibilities"] == ["EC2"]
    assert (task["cpu"], task["memory"]) == (str(size.cpu_units), str(size.memory_mib))
    assert task["runtimePlatform"] == {"cpuArchitecture": "X86_64", "operatingSystemFamily": "LINUX"}
    assert task["family"] in ("ray-cluster-head", "ray-cluster-workers")


@pytest.mark.parametrize("kind", KINDS)
def test_service_replaces_tasks_in_place_and_force_deletes(nodes: Cloud, kind: str) -> None:
    service = nodes.resources[f"{kind}-service"]
    assert service.inputs["deploymentMinimumHealthyPercent"] == 0
    assert service.inputs["deploymentMaximumPercent"] == 100
    assert service.inputs["availabilityZoneRebalancing"] == "DISABLED"
    assert service.inputs["waitForSteadyState"] is False
    assert service.inputs["forceDelete"] is True
    assert service.delete_timeout == "30m"
    assert service.inputs["propagateTags"] == "SERVICE"


@pytest.mark.parametrize("kind", KINDS)
def test_a_service_runs_privately_on_its_own_instances(nodes: Cloud, kind: str) -> None:
    service = nodes.resources[f"{kind}-service"].inputs
    assert service["capacityProviderStrategies"] == [{"capacityProvider": f"{kind}-provider", "weight": 1.0}]
    assert "launchType" not in service
    assert service["networkConfiguration"] == {
        "subnets": ["subnet-private"],
        "securityGroups": ["sg-1"],
        "assignPublicIp": False,
    }


def test_only_the_head_has_a_name(nodes: Cloud) -> None:
    assert nodes.resources["ray-head-service"].inputs["serviceRegistries"] == {"registryArn": "arn:registry"}
    assert "serviceRegistries" not in nodes.resources["ray-workers-service"].inputs


@pytest.mark.parametrize("kind", TASKS)
def test_task_roles_per_kind_have_least_privilege(nodes: Cloud, kind: str) -> None:
    task = nodes.resources[f"{kind}-task-definition"].inputs
    assert task["executionRoleArn"].endswith(f"-{kind}-task-execution")
    assert task["taskRoleArn"].endswith(f"-{kind}-task-role")
    execution = nodes.resources[f"{kind}-task-execution-policy"].inputs
    assert json.loads(execution["policy"]) == policies.execution(
        partition="aws", image_uri=IMAGE, log_group_arn=LOGS, token_arn=TOKEN
    )
    training = nodes.resources[f"{kind}-task-role-policy"].inputs
    grants: dict[str, dict[str, Any]] = {
        "ray-head": {
            "metrics_namespace": NAMESPACE,
            "parameter_arn": FACTS,
            "cluster_arn": "arn:cluster",
            "writes_secrets": True,
        },
        "ray-worker": {"own_group_arn": GROUP},
    }
    secrets = f"arn:aws:ssm:{REGION}:{ACCOUNT}:parameter/ray-on-ecs/ray-cluster/runs/*"
    common: dict[str, Any] = {"partition": "aws", "bucket_arn": BUCKET, "tasks_arn": CLUSTER_TASKS}
    expected = policies.training(**common, secrets_arn=secrets, **grants[kind])
    assert json.loads(training["policy"]) == expected
    trusted = json.loads(nodes.resources[f"{kind}-task-role"].inputs["assumeRolePolicy"])
    of_tasks = policies.assumed_for("ecs-tasks.amazonaws.com", f"arn:aws:ecs:{REGION}:{ACCOUNT}:*")
    assert trusted == of_tasks


def test_a_fixed_number_is_held(nodes: Cloud) -> None:
    assert nodes.resources["ray-workers-service"].ignore_changes == ()
    assert nodes.resources["ray-head-service"].ignore_changes == ()
