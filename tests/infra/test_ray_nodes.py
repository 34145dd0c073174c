"""The head and the workers: roles, task definitions and services, alike but for what makes them differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pulumi
import pytest

from infra.definitions import containers, policies
from infra.definitions.sizing import TaskSize
from infra.definitions.user_data import INSTANCE_DIR
from infra.ray_nodes import TaskDefaults
from infra.ray_service import RayService, RayServiceArgs
from infra.ray_task import RayTask
from infra.references import AccountRules, Location, NetworkRef, ResourceRef
from tests.infra.fake_aws import ACCOUNT, DIGEST, REGION, REGISTRY, Cloud

IMAGE = f"{REGISTRY}/training@{DIGEST}"
LOGS = "arn:aws:logs:us-west-2:123456789012:log-group:ray-logs"
TOKEN = "arn:aws:ssm:us-west-2:123456789012:parameter/auth"
FACTS = "arn:aws:ssm:us-west-2:123456789012:parameter/cluster-info"
GROUP = "arn:aws:autoscaling:us-west-2:123456789012:autoScalingGroup:1:autoScalingGroupName/workers-group"
BUCKET = "arn:aws:s3:::training-bucket"
CLUSTER_TASKS = f"arn:aws:ecs:{REGION}:{ACCOUNT}:task/ray-cluster/*"
HEAD_SIZE = TaskSize(vcpus=4, memory_mib=14336, gpus=0)
WORKER_SIZE = TaskSize(vcpus=48, memory_mib=185600, gpus=4)
KINDS = ["ray-head", "ray-workers"]
TASKS = ["ray-head", "ray-worker"]
NAMESPACE = "ray-on-ecs/ray-cluster"


def known(value: str) -> pulumi.Output[str]:
    """A value as a component hands it on."""
    return pulumi.Output.from_input(value)


def cluster() -> ResourceRef:
    """The ECS cluster."""
    return ResourceRef(name=known("ray-cluster"), arn=known("arn:cluster"))


def tasks() -> TaskDefaults:
    """What both kinds have in common, with valid defaults."""
    return TaskDefaults(
        cluster=cluster(),
        location=Location(
            partition="aws", account=ACCOUNT, region=REGION, worker_zones=("us-west-2a",), zones=("us-west-2a",)
        ),
        rules=AccountRules(),
        image_uri=IMAGE,
        logs=ResourceRef(name=known("ray-logs"), arn=known(LOGS)),
        token_parameter_arn=TOKEN,
        bucket=ResourceRef(name=known("training-bucket"), arn=known(BUCKET)),
    )


def service(name: str, task: RayTask, after: Sequence[pulumi.Resource], **args: Any) -> RayService:
    """A service with valid defaults, in a network of its own."""
    network = pulumi.CustomResource("test:index:Network", f"{name}-network", {})
    subnets = {"us-west-2a": known("subnet-private"), "us-west-2b": known("subnet-other")}
    ref = NetworkRef(subnets=subnets, tasks_group_id=known("sg-1"), instances_group_id=known("sg-2"), network=network)
    return RayService(
        name,
        RayServiceArgs(
            cluster=cluster(),
            network=ref,
            zones=("us-west-2a",),
            task_definition_arn=task.definition_arn,
            capacity_provider=f"{name}-provider",
            after=after,
            **args,
        ),
    )


def workers_group() -> ResourceRef:
    return ResourceRef(name=known("workers-group"), arn=known(GROUP))


def common(size: TaskSize) -> containers.ContainerDefaults:
    """What the containers share, as `node` has it."""
    prefix = "/ray-on-ecs/ray-cluster/runs"
    return containers.ContainerDefaults(
        image=IMAGE, log_group="ray-logs", region=REGION, token_arn=TOKEN, secrets_prefix=prefix, size=size
    )


@pytest.fixture
def nodes(cloud: Cloud) -> Cloud:
    """An account with both kinds in it, which depend on one resource of the caller's."""

    def program() -> None:
        association = pulumi.CustomResource("test:index:Association", "association", {})
        facts = ResourceRef(name=known("cluster-info"), arn=known(FACTS))
        group = workers_group()
        head_args = tasks().head(HEAD_SIZE, cluster_info_parameter=facts, group=group, moves=True, cpu_workers=False)
        head = RayTask("ray-on-ecs-ray-head-task", head_args)
        worker = RayTask("ray-on-ecs-ray-worker-task", tasks().worker(WORKER_SIZE, "head.x.internal", workers_group()))
        needed = [association, *head.role_policies, *worker.role_policies]
        service("ray-head", head, needed, count=1, registry_arn="arn:registry")
        service("ray-workers", worker, needed, count=2)

    cloud.run(program)
    return cloud


def test_the_head_runs_its_container(nodes: Cloud) -> None:
    (container,) = json.loads(nodes.resources["ray-head-task-definition"].inputs["containerDefinitions"])
    given: dict[str, Any] = {
        "bucket": "training-bucket",
        "metrics_namespace": NAMESPACE,
        "cluster_info_parameter": "cluster-info",
    }
    expected = containers.head(common(HEAD_SIZE), **given)
    assert container == expected, "what is tested as data is what is deployed"


def test_a_worker_runs_its_container(nodes: Cloud) -> None:
    (container,) = json.loads(nodes.resources["ray-worker-task-definition"].inputs["containerDefinitions"])
    expected = containers.worker(common(WORKER_SIZE), head_host="head.x.internal")
    assert container == expected, "what is tested as data is what is deployed"


@pytest.mark.parametrize("kind", TASKS)
def test_a_task_has_the_volumes_that_its_container_mounts(nodes: Cloud, kind: str) -> None:
    task = nodes.resources[f"{kind}-task-definition"].inputs
    (container,) = json.loads(task["containerDefinitions"])
    assert [volume["name"] for volume in task["volumes"]] == [
        mount["sourceVolume"] for mount in container["mountPoints"]
    ]


def test_only_the_heads_state_outlives_its_task(nodes: Cloud) -> None:
    *others, state = nodes.resources["ray-head-task-definition"].inputs["volumes"]
    shared = {"scope": "shared", "autoprovision": True, "driver": "local"}
    assert state == {"name": "ray-head-state", "dockerVolumeConfiguration": shared}, (
        "on the instance's disk, which the next task there finds and `destroy` leaves nothing of"
    )
    *of_worker, instance = nodes.resources["ray-worker-task-definition"].inputs["volumes"]
    assert others == of_worker == [{"name": "tmp"}, {"name": "home"}], "what a job writes goes with the task"
    assert instance == {"name": "instance", "hostPath": INSTANCE_DIR}, "which the instance has written"


@pytest.mark.parametrize(("kind", "size"), [("ray-head", HEAD_SIZE), ("ray-worker", WORKER_SIZE)], ids=TASKS)
def test_a_task_has_its_own_network_interface_and_its_instances_size(nodes: Cloud, kind: str, size: TaskSize) -> None:
    task = nodes.resources[f"{kind}-task-definition"].inputs
    assert task["networkMode"] == "awsvpc", "DNS leads to the task, and Ray's ports cannot clash"
    assert task["requiresCompatibilities"] == ["EC2"], "Fargate has no GPUs"
    assert (task["cpu"], task["memory"]) == (str(size.cpu_units), str(size.memory_mib)), "ECS takes both as strings"
    assert task["runtimePlatform"] == {"cpuArchitecture": "X86_64", "operatingSystemFamily": "LINUX"}
    assert task["family"] in ("ray-cluster-head", "ray-cluster-workers"), (
        "two stacks of an account count their own revisions"
    )


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
    assert service["capacityProviderStrategies"] == [{"capacityProvider": f"{kind}-provider", "weight": 1.0}], (
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


@pytest.mark.parametrize("kind", TASKS)
def test_each_kind_has_roles_of_its_own_with_no_more_than_it_needs(nodes: Cloud, kind: str) -> None:
    task = nodes.resources[f"{kind}-task-definition"].inputs
    assert task["executionRoleArn"].endswith(f"-{kind}-task-execution"), "the agent starts the task with this one"
    assert task["taskRoleArn"].endswith(f"-{kind}-task-role"), "the training code has this one"
    execution = nodes.resources[f"{kind}-task-execution-policy"].inputs
    assert json.loads(execution["policy"]) == policies.execution(
        partition="aws", image_uri=IMAGE, log_group_arn=LOGS, token_arn=TOKEN
    )
    training = nodes.resources[f"{kind}-task-role-policy"].inputs
    grants: dict[str, dict[str, Any]] = {
        "ray-head": {
            "metrics_namespace": NAMESPACE,
            "parameter_arn": FACTS,
            "group_arn": GROUP,
            "writes_secrets": True,
        },
        "ray-worker": {"own_group_arn": GROUP},
    }
    secrets = f"arn:aws:ssm:{REGION}:{ACCOUNT}:parameter/ray-on-ecs/ray-cluster/runs/*"
    common: dict[str, Any] = {"partition": "aws", "bucket_arn": BUCKET, "tasks_arn": CLUSTER_TASKS}
    expected = policies.training(**common, secrets_arn=secrets, **grants[kind])
    assert json.loads(training["policy"]) == expected
    trusted = json.loads(nodes.resources[f"{kind}-task-role"].inputs["assumeRolePolicy"])
    of_tasks = policies.assumed_by_tasks(partition="aws", region=REGION, account=ACCOUNT)
    assert trusted == of_tasks, "only tasks of this account take it on"


@pytest.mark.parametrize("kind", KINDS)
def test_a_service_is_created_last_and_destroyed_first(nodes: Cloud, kind: str) -> None:
    direct = nodes.resources[f"{kind}-service"].dependencies
    rights = {f"{each}-{policy}" for each in TASKS for policy in ("task-execution-policy", "task-role-policy")}
    assert {"association", f"{kind}-network", *rights} <= direct, "a service that outlives its roles hangs in DRAINING"


def test_an_autoscaled_service_begins_with_a_number_and_is_left_to_the_scaler(cloud: Cloud) -> None:
    def program() -> None:
        worker = RayTask("ray-on-ecs-ray-worker-task", tasks().worker(WORKER_SIZE, "head.x.internal", workers_group()))
        service("ray-workers", worker, [], count=0, autoscaled=True)

    cloud.run(program)
    made = cloud.resources["ray-workers-service"]
    assert made.inputs["desiredCount"] == 0, "no job wants more yet"
    breaker = made.inputs["deploymentCircuitBreaker"]
    assert breaker == {"enable": True, "rollback": False}, (
        "tasks that fail for ever would keep the scaler from stopping"
    )
    assert made.ignore_changes == ("desiredCount",), "`pulumi up --refresh` would take a job's workers away"


def test_a_fixed_number_is_held(nodes: Cloud) -> None:
    assert nodes.resources["ray-workers-service"].ignore_changes == (), "a change of workerCount has to arrive"
    assert nodes.resources["ray-head-service"].ignore_changes == (), "there is one head, always"


@pytest.mark.parametrize(
    ("word", "forced", "triggers"),
    [({}, None, None), ({"redeploy": "again"}, True, {"redeploy": "again"})],
    ids=["none", "a word"],
)
def test_a_word_deploys_again_what_ecs_has_given_up(
    cloud: Cloud, word: dict[str, str], forced: bool | None, triggers: dict[str, str] | None
) -> None:
    def program() -> None:
        worker = RayTask("ray-on-ecs-ray-worker-task", tasks().worker(WORKER_SIZE, "head.x.internal", workers_group()))
        service("ray-workers", worker, [], count=0, redeploy=word)

    cloud.run(program)
    made = cloud.resources["ray-workers-service"].inputs
    assert (made.get("forceNewDeployment"), made.get("triggers")) == (forced, triggers), (
        "forced without need, every change of the number would end what runs"
    )
