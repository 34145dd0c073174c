"""The head and the workers: roles, task definitions and services, alike but for what makes them differ."""

from __future__ import annotations

import json

import pulumi
import pytest

from infra import containers, policies, ray_node
from infra.handles import Named, Site
from infra.ray_head import RayHead, RayHeadArgs
from infra.ray_node import RayNodeArgs
from infra.ray_workers import RayWorkers, RayWorkersArgs
from infra.settings import Workers
from infra.sizing import TaskSize
from tests.infra.fake_aws import DIGEST, REGION, REGISTRY, Cloud

IMAGE = f"{REGISTRY}/training@{DIGEST}"
LOGS = "arn:aws:logs:us-west-2:123456789012:log-group:ray-logs"
TOKEN = "arn:aws:ssm:us-west-2:123456789012:parameter/auth"
PRICE = "arn:aws:ssm:us-west-2:123456789012:parameter/worker-price"
BUCKET = "arn:aws:s3:::training-bucket"
HEAD_SIZE = TaskSize(vcpus=4, memory_mib=14336, gpus=0)
WORKER_SIZE = TaskSize(vcpus=48, memory_mib=185600, gpus=4)
KINDS = ["ray-head", "ray-workers"]
NAMESPACE = "ray-on-ecs/ray-cluster"
FIXED = Workers(fewest=2, most=2, job=2, idle_minutes=0)
ELASTIC = Workers(fewest=0, most=4, job=2, idle_minutes=0)
IDLE = Workers(fewest=2, most=2, job=2, idle_minutes=60)
GROWING = Workers(fewest=2, most=4, job=2, idle_minutes=0)


def known(value: str) -> pulumi.Output[str]:
    """A value as a component hands it on."""
    return pulumi.Output.from_input(value)


def node(network: pulumi.Resource) -> RayNodeArgs:
    """What both kinds run on, with valid defaults."""
    return RayNodeArgs(
        cluster=Named(name=known("ray-cluster"), arn=known("arn:cluster")),
        site=Site(subnet_id=known("subnet-private"), security_group_id=known("sg-1"), network=network),
        region=REGION,
        image_uri=IMAGE,
        logs=Named(name=known("ray-logs"), arn=known(LOGS)),
        token_parameter_arn=TOKEN,
        bucket=Named(name=known("training-bucket"), arn=known(BUCKET)),
    )


def head_args(shared: RayNodeArgs) -> RayHeadArgs:
    """A head with valid defaults."""
    price = Named(name=known("worker-price"), arn=known(PRICE))
    return RayHeadArgs(
        node=shared, provider="head-provider", size=HEAD_SIZE, registry_arn="arn:registry", worker_price=price
    )


def workers_args(shared: RayNodeArgs, workers: Workers = FIXED) -> RayWorkersArgs:
    """Two workers with valid defaults."""
    return RayWorkersArgs(
        node=shared, provider="workers-provider", size=WORKER_SIZE, workers=workers, head_host="head.x.internal"
    )


def common(size: TaskSize) -> containers.Common:
    """What the containers share, as `node` has it."""
    return containers.Common(image=IMAGE, log_group="ray-logs", region=REGION, token_arn=TOKEN, size=size)


@pytest.fixture
def nodes(cloud: Cloud) -> Cloud:
    """An account with both kinds in it, which depend on one resource of the caller's."""

    def program() -> None:
        network = pulumi.CustomResource("test:index:Network", "network", {})
        association = pulumi.CustomResource("test:index:Association", "association", {})
        shared = node(network)
        both = [RayHead("ray-head", head_args(shared)), RayWorkers("ray-workers", workers_args(shared))]
        ray_node.start(both, after=[association])

    cloud.run(program)
    return cloud


def test_the_head_runs_its_container(nodes: Cloud) -> None:
    (container,) = json.loads(nodes.resources["ray-head-task"].inputs["containerDefinitions"])
    given = {"bucket": "training-bucket", "metrics_namespace": NAMESPACE, "price_parameter": "worker-price"}
    expected = containers.head(common(HEAD_SIZE), **given)
    assert container == expected, "what is tested as data is what is deployed"


def test_a_worker_runs_its_container(nodes: Cloud) -> None:
    (container,) = json.loads(nodes.resources["ray-workers-task"].inputs["containerDefinitions"])
    expected = containers.worker(common(WORKER_SIZE), head_host="head.x.internal")
    assert container == expected, "what is tested as data is what is deployed"


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_has_the_volumes_that_its_container_mounts(nodes: Cloud, kind: str) -> None:
    task = nodes.resources[f"{kind}-task"].inputs
    (container,) = json.loads(task["containerDefinitions"])
    assert [volume["name"] for volume in task["volumes"]] == [
        mount["sourceVolume"] for mount in container["mountPoints"]
    ]


def test_only_the_heads_state_outlives_its_task(nodes: Cloud) -> None:
    *others, state = nodes.resources["ray-head-task"].inputs["volumes"]
    shared = {"scope": "shared", "autoprovision": True, "driver": "local"}
    assert state == {"name": "ray-head-state", "dockerVolumeConfiguration": shared}, (
        "on the instance's disk, which the next task there finds and `destroy` leaves nothing of"
    )
    assert others == nodes.resources["ray-workers-task"].inputs["volumes"] == [{"name": "tmp"}, {"name": "home"}], (
        "what a job writes goes with the task"
    )


@pytest.mark.parametrize(("kind", "size"), [("ray-head", HEAD_SIZE), ("ray-workers", WORKER_SIZE)], ids=KINDS)
def test_a_task_has_its_own_network_interface_and_its_instances_size(nodes: Cloud, kind: str, size: TaskSize) -> None:
    task = nodes.resources[f"{kind}-task"].inputs
    assert task["networkMode"] == "awsvpc", "DNS leads to the task, and Ray's ports cannot clash"
    assert task["requiresCompatibilities"] == ["EC2"], "Fargate has no GPUs"
    assert (task["cpu"], task["memory"]) == (str(size.cpu_units), str(size.memory_mib)), "ECS takes both as strings"
    assert task["runtimePlatform"] == {"cpuArchitecture": "X86_64", "operatingSystemFamily": "LINUX"}
    assert task["family"] == f"ray-on-ecs-dev-{kind}", "two stacks of an account count their own revisions"


@pytest.mark.parametrize("kind", KINDS)
def test_a_service_fits_into_its_fixed_capacity_and_goes_when_told(nodes: Cloud, kind: str) -> None:
    service = nodes.resources[f"{kind}-service"]
    assert service.inputs["deploymentMinimumHealthyPercent"] == 0, "the new task fits only when the old one is gone"
    assert service.inputs["deploymentMaximumPercent"] == 100, "two heads behind one name would part the workers"
    assert service.inputs["availabilityZoneRebalancing"] == "DISABLED", "ECS refuses it at a maximum of 100 %"
    assert service.inputs["waitForSteadyState"] is False, "`up` would wait for the image to be pulled"
    assert service.inputs["forceDelete"] is True, "`destroy` would wait for a job to end"
    assert service.delete_timeout == "30m", "tasks may drain for minutes, and 20 have proven short"
    assert service.inputs["propagateTags"] == "SERVICE", "tasks carry the stack's tags"


@pytest.mark.parametrize("kind", KINDS)
def test_a_service_runs_privately_on_its_own_instances(nodes: Cloud, kind: str) -> None:
    service = nodes.resources[f"{kind}-service"].inputs
    provider = {"ray-head": "head-provider", "ray-workers": "workers-provider"}[kind]
    assert service["capacityProviderStrategies"] == [{"capacityProvider": provider, "weight": 1.0}], (
        "a head on a GPU instance would keep a worker out"
    )
    assert "launchType" not in service, "ECS refuses both a launch type and a strategy"
    assert service["networkConfiguration"] == {
        "subnets": ["subnet-private"],
        "securityGroups": ["sg-1"],
        "assignPublicIp": False,
    }, "nothing of Ray may be reached from the internet"


def test_there_is_one_head_and_as_many_workers_as_asked_for(nodes: Cloud) -> None:
    counts = {kind: nodes.resources[f"{kind}-service"].inputs["desiredCount"] for kind in KINDS}
    assert counts == {"ray-head": 1, "ray-workers": 2}, "one worker for each GPU instance"


def test_only_the_head_has_a_name(nodes: Cloud) -> None:
    assert nodes.resources["ray-head-service"].inputs["serviceRegistries"] == {"registryArn": "arn:registry"}
    assert "serviceRegistries" not in nodes.resources["ray-workers-service"].inputs, (
        "a worker under the head's name would be taken for it"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_roles_of_its_own_with_no_more_than_it_needs(nodes: Cloud, kind: str) -> None:
    task = nodes.resources[f"{kind}-task"].inputs
    assert task["executionRoleArn"].endswith(f":{kind}-execution-role"), "the agent starts the task with this one"
    assert task["taskRoleArn"].endswith(f":{kind}-task-role"), "the training code has this one"
    execution = nodes.resources[f"{kind}-execution-policy"].inputs
    assert json.loads(execution["policy"]) == policies.execution(image_uri=IMAGE, log_group_arn=LOGS, token_arn=TOKEN)
    training = nodes.resources[f"{kind}-task-policy"].inputs
    of_head = {"metrics_namespace": NAMESPACE, "price_arn": PRICE} if kind == "ray-head" else {}
    expected = policies.training(bucket_arn=BUCKET, **of_head)
    assert json.loads(training["policy"]) == expected, "its runs, the head the stack's metrics, and nothing else"
    trusted = json.loads(nodes.resources[f"{kind}-task-role"].inputs["assumeRolePolicy"])
    assert trusted == policies.assumed_by("ecs-tasks.amazonaws.com"), "only tasks take it on"


@pytest.mark.parametrize("kind", KINDS)
def test_a_service_is_created_last_and_destroyed_first(nodes: Cloud, kind: str) -> None:
    direct = nodes.resources[f"{kind}-service"].dependencies
    rights = {f"{each}-{purpose}-policy" for each in KINDS for purpose in ("execution", "task")}
    assert {"association", "network", *rights} <= direct, "a service that outlives its roles hangs in DRAINING"


@pytest.mark.parametrize(
    ("workers", "count"), [(ELASTIC, 0), (IDLE, 0), (GROWING, 2)], ids=["elastic", "idle", "growing"]
)
def test_elastic_workers_begin_with_the_lowest_number_and_are_left_to_the_scaler(
    cloud: Cloud, workers: Workers, count: int
) -> None:
    def program() -> None:
        network = pulumi.CustomResource("test:index:Network", "network", {})
        RayWorkers("ray-workers", workers_args(node(network), workers)).start([])

    cloud.run(program)
    service = cloud.resources["ray-workers-service"]
    assert service.inputs["desiredCount"] == count, "no job wants more yet"
    breaker = service.inputs["deploymentCircuitBreaker"]
    assert breaker == {"enable": True, "rollback": False}, (
        "tasks that fail for ever would keep the scaler from stopping"
    )
    assert service.ignore_changes == ("desiredCount",), "`pulumi up --refresh` would take a job's workers away"


def test_a_fixed_number_is_held(nodes: Cloud) -> None:
    assert nodes.resources["ray-workers-service"].ignore_changes == (), "a change of workerCount has to arrive"
    assert nodes.resources["ray-head-service"].ignore_changes == (), "there is one head, always"
