"""Whole-program tests: resources and outputs of __main__.py in updates and previews."""

from __future__ import annotations

import json
import re
import runpy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pulumi
import pytest
from botocore.exceptions import ClientError

from infra.definitions.policies import (
    LOOK_AT_GROUPS,
    LOOK_AT_INSTANCE,
    LOOK_AT_RESERVATIONS,
    SESSION_MANAGER,
    SPOT_PRICES,
)
from infra.errors import SettingError
from infra.tags import SLEEP_TAG
from ray_on_ecs.cluster.stack import find
from ray_on_ecs.cluster_info import parse_cluster_info
from ray_on_ecs.contract import HOURS_OF_MONTH, WORKERS
from ray_on_ecs.node import metrics
from ray_on_ecs.node.demand import Need
from tests.iam import WILDCARD_ACTIONS
from tests.infra.fake_aws import (
    ACCOUNT,
    CLUSTER,
    DIGEST,
    REGION,
    REGISTRY,
    SECRET,
    STACK,
    BuiltImage,
    Cloud,
    group_tags,
)
from tests.infra.stacks import (
    EVERYTHING,
    INSTANCE_POLICY,
    KEY,
    READY_IMAGE,
    STACKS,
    TASK_POLICIES,
    deploy,
    deployed,
    takes_tags,
)

ROOT = Path(__file__).parents[1]
EXPORTS = {
    "bucket",
    "head_instance_id",
    "cluster_name",
    "image_uri",
    "log_group",
    "metrics_dashboard",
    "estimated_hourly_usd",
    "idle_cost",
    "default_gpus",
    "connection",
    "train_command",
    "shell_command",
    "dashboard_command",
    "token_command",
}
SERVICES = ["ray-head-service", "ray-workers-service"]
HEAD_TASK, WORKER_TASK, CPU_WORKER_TASK = (f"{kind}-task-definition" for kind in ("head", "worker", "cpu-worker"))
TASK_OF = dict(zip(SERVICES, (HEAD_TASK, WORKER_TASK), strict=True))
GROUPS = ["head-group", "workers-group"]
ALL_GROUPS = [*GROUPS, "cpu-workers-group"]
SCALERS = ["short", "idle"]


@pytest.fixture
def stack() -> Cloud:
    """The default stack."""
    return deployed("default")


@pytest.fixture
def everything() -> Cloud:
    """A stack with all optional parts."""
    return deployed("everything")


def container(cloud: Cloud, task: str) -> dict[str, Any]:
    """The container of a task definition."""
    (definition,) = json.loads(cloud.resources[task].inputs["containerDefinitions"])
    return definition


def environment(cloud: Cloud, task: str) -> dict[str, str]:
    """The environment of a task's container."""
    return {entry["name"]: entry["value"] for entry in container(cloud, task)["environment"]}


def test_all_outputs_are_exported(stack: Cloud) -> None:
    assert stack.exports.keys() == EXPORTS
    assert all(stack.exports.values())


def test_exports_come_from_the_resources(stack: Cloud) -> None:
    known = {
        "bucket": "training-bucket",
        "head_instance_id": "i-0123456789abcdef0",
        "cluster_name": "ray-on-ecs-ray-dev-c0ffee",
        "log_group": "ray-on-ecs-ray-logs",
        "estimated_hourly_usd": 2.1642,
    }
    plain = {name: value for name, value in stack.exports.items() if not name.endswith("_command")}
    assert plain == {
        **known,
        "default_gpus": 2,
        "image_uri": f"{REGISTRY}/training@{DIGEST}",
        "metrics_dashboard": "ray-on-ecs-ray-dev-c0ffee",
        "idle_cost": "month training: 1,647.70 USD (2.26 an hour) = head 87.75 + disks 8.00 + NAT gateway 36.50 + "
        "CloudWatch 22.50 + image 0.33 + service discovery 0.50 + 2 x g5.xlarge 1,492.12; "
        "month idle: 148.68 USD (0.20 an hour) = head 87.75 + disks 8.00 + NAT gateway 36.50 + CloudWatch 15.60 + "
        "image 0.33 + service discovery 0.50; the first `pulumi up` also starts 2 x g5.xlarge (2.04 USD an hour) "
        "until idle for 30 minutes; `pulumi destroy` ends it",
        "connection": {
            **known,
            "idle_hourly_usd": {
                **{"head": 0.1202, "disks": 0.010959, "NAT gateway": 0.05, "CloudWatch": 0.02137},
                **{"image": 0.000452, "service discovery": 0.000685},
            },
            "asleep_hourly_usd": None,
            "region": REGION,
            "head_host": "head.ray-on-ecs-ray-dev-c0ffee.internal",
            "token_parameter": "ray-on-ecs-auth-parameter",
            "cluster_info_parameter": "ray-on-ecs-cluster-info-parameter",
            "shell_document": "ray-on-ecs-sessions-shell",
            "forward_document": "ray-on-ecs-sessions-forward",
            "services": {kind: f"ray-on-ecs-ray-{kind}-service" for kind in ("head", "workers")},
        },
    }


def test_connection_output_identifies_the_cluster(stack: Cloud, tmp_path: Path) -> None:
    for name, document in {"whole": stack.exports, "alone": stack.exports["connection"]}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
        result = find(None, str(tmp_path / f"{name}.json"))
        assert asdict(result) == {**stack.exports["connection"], "name": name, "project": None}


def test_exported_commands_target_this_stack(stack: Cloud) -> None:
    for name in ("train_command", "shell_command", "dashboard_command"):
        assert "--region us-west-2 --target i-0123456789abcdef0 " in stack.exports[name], name
        assert "--document-name AWS-" not in stack.exports[name]
    assert '"host":["head.ray-on-ecs-ray-dev-c0ffee.internal"]' in stack.exports["dashboard_command"]
    assert " --name ray-on-ecs-auth-parameter " in stack.exports["token_command"]


@pytest.mark.parametrize(
    ("name", "published"), [("default", 37), ("everything", 47), ("pools", 88), ("sleeping", 38), ("NAT instance", 38)]
)
def test_idle_cost_has_the_alarms_of_the_program(name: str, published: int) -> None:
    resources = deployed(name)
    alarms = [alarm.inputs for alarm in resources.of_type("aws:cloudwatch/metricAlarm:MetricAlarm")]
    watched = [sum("metric" in query for query in alarm.get("metricQueries", ())) or 1 for alarm in alarms]
    fast = sum(alarm.get("period") == 10 for alarm in alarms)
    usd = 0.1 * sum(watched) + 0.2 * fast + 3 * len(resources.of_type("aws:cloudwatch/dashboard:Dashboard"))
    hourly = resources.exports["connection"]["idle_hourly_usd"]["CloudWatch"]
    assert hourly * HOURS_OF_MONTH == pytest.approx(usd + 0.3 * published, abs=0.001)


def test_each_metric_of_the_head_has_a_reader(everything: Cloud) -> None:
    alarms = [alarm.inputs for alarm in everything.of_type("aws:cloudwatch/metricAlarm:MetricAlarm")]
    queries = [query["metric"] for alarm in alarms for query in alarm.get("metricQueries", ()) if "metric" in query]
    [dashboard] = everything.of_type("aws:cloudwatch/dashboard:Dashboard")
    read = {each["metricName"] for each in [*alarms, *queries] if "metricName" in each}
    read |= set(re.findall(r'"(\w+)"', dashboard.inputs["dashboardBody"]))
    nothing = Need(requested=0, available=0, used=0, in_use=0)
    published = [datum for with_gpus in (True, False) for datum in metrics.of_kind(WORKERS, nothing, with_gpus)]
    gpu = {"utilizationGpu": 1, "memoryTotal": 2, "memoryUsed": 1}
    published += metrics.utilization({"data": {"summary": [{"raylet": {"state": "ALIVE"}, "gpus": [gpu]}]}})
    assert {datum["MetricName"] for datum in published} <= read


def test_every_resource_has_a_component_as_parent(stack: Cloud) -> None:
    components = {name for name, resource in stack.resources.items() if resource.type.startswith("ray-on-ecs:")}
    assert components == {
        *(
            "choices",
            "network",
            "network-vpc",
            "storage",
            "image",
            "auth",
            "discovery",
            "ray",
            "head",
            "workers",
            "ray-head",
            "ray-workers",
        ),
        *("head-task", "worker-task", "workers-scaling", "monitoring", "cluster-info", "sessions", CLUSTER),
    }
    for name, resource in stack.resources.items():
        parents = {CLUSTER, "network"} if name in components else components - {CLUSTER}
        expected = {STACK} if name == CLUSTER else parents
        assert resource.parent in expected, f"wrong parent of {name}"


def test_children_are_named_after_their_component(everything: Cloud) -> None:
    for name, resource in everything.resources.items():
        if not resource.type.startswith("ray-on-ecs:"):  # a component
            assert name.startswith(f"{resource.parent}-"), name


# Maximum length of names by type, where it is below 128, and Pulumi's random suffix.
LONGEST = {"aws:s3/bucket:Bucket": 63, "aws:iam/role:Role": 64, "aws:budgets/budget:Budget": 100}
RANDOM_END = "-1a2b3c4"


def test_names_fit_their_services(everything: Cloud) -> None:
    for cloud in (everything, deployed("renamed")):
        for resource in cloud.resources.values():
            if resource.type == "ray-on-ecs:index:RayCluster":
                continue
            assert resource.name.startswith(f"{CLUSTER}-"), resource.name
            assert re.fullmatch(r"[a-z0-9-]+", resource.name), resource.name
            longest = LONGEST.get(resource.type, 128)
            assert len(resource.name + RANDOM_END) <= longest, f"{resource.name} is too long"


def test_rename_replaces_no_resource(everything: Cloud) -> None:
    """The engine replaces a resource after a change of its logical name, type, parent or name in AWS."""
    renamed = deployed("renamed")
    assert {(resource.type, resource.name) for resource in renamed.resources.values()} == {
        (resource.type, resource.name) for resource in everything.resources.values()
    }
    for name, resource in renamed.resources.items():
        before = everything.resources[name]
        if not resource.type.startswith("awsx:"):  # a component, whose children have tags
            changed = {key for key in resource.inputs if resource.inputs[key] != before.inputs.get(key)}
            assert changed <= {*resource.ignore_changes, "tags", "tagSpecifications"}, f"{name} changes"


def test_a_second_state_creates_a_second_cluster(stack: Cloud) -> None:
    """The same program and stack name, in the same account, with a state that knows nothing of the first."""
    second = deploy(security_groups=(group_tags(),))
    assert second.resources.keys() == stack.resources.keys()
    named = {"aws:cloudwatch/logGroup:LogGroup", "aws:cloudwatch/dashboard:Dashboard", "aws:ecs/cluster:Cluster"}
    random_names = {
        name
        for name, resource in second.resources.items()
        if "dev-c0ffee" in str(resource.inputs.get("name")) or "dev-c0ffee" in str(resource.inputs.get("dashboardName"))
    }
    for name, resource in second.resources.items():
        if resource.type.startswith("aws:") and resource.type in named and "name" in resource.inputs:
            assert name in random_names, f"{name} has the same name in both clusters"


def test_a_copied_stack_is_refused_in_another_account_or_region() -> None:
    for kept, line in (
        ({"account": "999999999999"}, "aws:allowedAccountIds: the stack is in account 999999999999, and these"),
        ({"region": "eu-west-1"}, "aws:region: 'us-west-2', but this stack is up in eu-west-1; "),
    ):
        with pytest.raises(pulumi.RunError) as refused:
            deploy(preview=True, is_up=True, kept=kept)
        assert str(refused.value).startswith(line)


def test_another_account_is_refused_before_resources_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    account = Cloud(account="999999999999")
    monkeypatch.chdir(ROOT)
    with pytest.raises(pulumi.RunError, match=r"^aws:allowedAccountIds: the stack is in account 123456789012, "):
        account.run(lambda: runpy.run_path(str(ROOT / "__main__.py"), run_name="__main__"))
    assert account.resources.keys() <= {CLUSTER}


def test_taggable_resources_have_tags(everything: Cloud) -> None:
    wanted = {"ray-on-ecs:project": "ray-on-ecs", "ray-on-ecs:stack": "dev", "team": "vision", "cost-center": "42"}
    checked = set()
    for name, resource in everything.resources.items():
        if not resource.type.startswith(("aws:", "awsx:")):
            continue
        if not (takes_tags(resource.type) or "tags" in resource.inputs):
            continue
        if resource.type == "aws:ec2/launchTemplate:LaunchTemplate":
            launched = {entry["resourceType"]: entry["tags"] for entry in resource.inputs["tagSpecifications"]}
            assert launched.keys() == {"instance", "volume", "network-interface"}
            for kind, tags in launched.items():
                assert {**wanted, "Name": f"dev-{resource.name.removesuffix('template')}{kind}"} == tags
            continue
        tags = resource.inputs.get("tags")
        assert tags, f"{name} has no tags"
        if isinstance(tags, list):
            assert [tag["key"] for tag in tags if tag["propagateAtLaunch"]] == ["AmazonECSManaged"]
            tags = {tag["key"]: tag["value"] for tag in tags}
        assert {**wanted, "Name": f"dev-{resource.name}"}.items() <= tags.items(), f"missing tags of {name}"
        checked.add(resource.type)
    assert {"aws:ecs/cluster:Cluster", "aws:ecs/service:Service", "aws:iam/role:Role"} <= checked


def agent_needs(kind: str) -> dict[str, str]:
    """Dependencies of a service, with the consequence of a missing one."""
    name, other = ("head", "worker") if kind == "head" else ("worker", "head")
    return {
        "ray-capacity-providers": "ECS refuses a service whose provider is not associated",
        f"{kind}-group": "a service without instances can't report its tasks stopped, and `destroy` hangs in DRAINING",
        f"{kind}-instance-ecs": "without its policy the ECS agent disconnects, and `destroy` hangs in DRAINING",
        f"{kind}-instance-ssm": "the commands can't reach an instance that is not registered with Session Manager",
        "network-vpc-private-us-west-2c-association": "without its routes, image pulls and reports of tasks fail",
        "network-tasks-ingress": "the workers don't reach the head, and their health checks kill them",
        "network-tasks-egress": "a job can't store its last checkpoint",
        "network-instances-egress": "the agent can't reach ECS, and `destroy` hangs in DRAINING",
        f"{name}-task-execution-policy": "the first tasks can't access image, logs and token",
        f"{name}-task-role-policy": "the first run is refused by S3, and a last checkpoint is lost",
        f"{other}-task-execution-policy": "tasks of the other kind can't restart while this kind runs",
        f"{other}-task-role-policy": "a run needs both kinds until its end",
        "ray-logs": "tasks don't start without their log group",
        "auth-parameter": "tasks don't start without their token",
    }


EDGES = {
    **{("ray-head-service", needed): why for needed, why in agent_needs("head").items()},
    **{("ray-workers-service", needed): why for needed, why in agent_needs("workers").items()},
    ("ray-head-service", "discovery-head"): "Cloud Map refuses to delete a service that a task is registered in",
    ("discovery-head", "discovery-namespace"): "Cloud Map refuses to delete a namespace with a service in it",
    ("ray-capacity-providers", "head-capacity-provider"): "ECS refuses to associate an absent provider",
    ("ray-capacity-providers", "workers-capacity-provider"): "ECS refuses to associate an absent provider",
    ("ray-capacity-providers", "ray-cluster"): "ECS refuses to delete a cluster with providers",
    **{
        (f"{kind}-instance-ecs", "ray-capacity-providers"): "an instance that registers earlier never gets a provider"
        for kind in ("head", "workers", "cpu-workers")
    },
    **{
        (group, needed): why
        for group in ALL_GROUPS
        for needed, why in {
            "ray-cluster": "ECS refuses to delete a cluster that still has instances",
            "network-vpc-private-us-west-2c-association": "an instance without a route can't join the cluster",
            "network-tasks-ingress": "tasks start before they can reach each other",
            "network-instances-egress": "an instance without egress can't join the cluster",
        }.items()
    },
    ("workers-group", "workers-placement-us-west-2c"): "EC2 refuses to delete a placement group with instances",
    ("ray-cluster", "ray-insights"): "Container Insights re-creates the log group after its deletion",
    ("storage-tls-only", "storage-public-access-block"): "S3 answers 409 to concurrent changes",
    (
        "workers-scaling-target",
        "ray-workers-service",
    ): "a target is refused without its service, and orphaned if it outlives it",
    ("head-sleep-target", "ray-head-service"): "an orphan would refuse the next target of this name",
    ("head-sleep-wake-alarm", "head-sleep-wake-policy"): "a request during `destroy` would start a head",
    ("head-sleep-wake-alarm", "head-sleep-instance-policy"): "a request during `destroy` would start an instance",
    ("head-sleep-instance-policy", "head-capacity-provider"): "ECS may not add its policy beside another",
    **{(f"workers-scaling-{kind}-policy", "workers-scaling-target"): "a policy needs its target" for kind in SCALERS},
    **{
        (f"workers-scaling-{kind}-alarm", f"workers-scaling-{kind}-policy"): "an alarm needs its policy"
        for kind in SCALERS
    },
}


@pytest.mark.parametrize(("later", "earlier"), EDGES)
def test_destruction_reverses_the_creation_order(everything: Cloud, later: str, earlier: str) -> None:
    assert earlier in everything.needs(later), EDGES[later, earlier]


@pytest.mark.parametrize("service", SERVICES)
def test_services_have_time_to_stop_their_tasks(stack: Cloud, service: str) -> None:
    (definition,) = json.loads(stack.resources[TASK_OF[service]].inputs["containerDefinitions"])
    timeout = stack.resources[service].delete_timeout
    assert int(timeout.removesuffix("m")) * 60 > 5 * definition["stopTimeout"]


def test_dependencies_have_no_cycle(everything: Cloud) -> None:
    for name in everything.resources:
        assert name not in everything.needs(name), f"cycle through {name}"


@pytest.mark.parametrize("name", ["head-group", "workers-group", "ray-head-service", "ray-workers-service"])
def test_the_way_to_the_internet_outlives_instances_and_services(stack: Cloud, name: str) -> None:
    way = {"network-vpc-private-route", "network-vpc-nat", "network-vpc-address", "network-vpc-public-route"}
    assert way <= stack.needs(name)


def test_token_is_not_exposed(stack: Cloud) -> None:
    for name, resource in stack.resources.items():
        if name != "auth-parameter":
            assert SECRET not in json.dumps(resource.inputs), f"{name} holds the token"
    assert SECRET not in json.dumps(stack.exports)
    for task in (HEAD_TASK, WORKER_TASK):
        assert "RAY_AUTH_TOKEN" not in environment(stack, task)
        (secret,) = container(stack, task)["secrets"]
        assert secret["valueFrom"].endswith(":ray-on-ecs-auth-parameter")


def statements(document: str) -> list[dict[str, Any]]:
    """The statements of a policy document."""
    return json.loads(document)["Statement"]


# ARNs with a wildcard, and the reason.
PARTS = {
    f"arn:aws:ecs:{REGION}:{ACCOUNT}:container-instance/*": "their IDs are random; a condition names the cluster",
    f"arn:aws:ecs:{REGION}:{ACCOUNT}:service/ray-on-ecs-ray-dev-c0ffee/*": "read-only: services of its own cluster",
    f"arn:aws:ec2:{REGION}:{ACCOUNT}:instance/*": "an instance's agent answers for itself alone",
    "arn:aws:s3:::training-bucket/*": "the stack's own bucket",
    "arn:aws:s3:::training-bucket/clusters/*/requests/*": "denied: only people request runs",
    f"arn:aws:service:{REGION}:{ACCOUNT}:ray-on-ecs-ray-logs:*": "the streams of the stack's own log group",
    f"arn:aws:ecs:{REGION}:{ACCOUNT}:task/ray-on-ecs-ray-dev-c0ffee/*": "tasks of the stack's own cluster",
    f"arn:aws:ssm:{REGION}:{ACCOUNT}:parameter/ray-on-ecs/ray-on-ecs-ray-dev-c0ffee/runs/*": "secrets of its runs",
}


def test_wildcards_of_roles_have_written_reasons(everything: Cloud) -> None:
    inline = everything.of_type("aws:iam/rolePolicy:RolePolicy")
    assert inline
    for policy in inline:
        for statement in statements(policy.inputs["policy"]):
            assert "NotAction" not in statement, policy.name
            assert "NotResource" not in statement, policy.name
            for action in statement["Action"]:
                assert "*" not in action, f"{policy.name} allows {action}"
            resource = statement["Resource"]
            if resource == "*":
                assert set(statement["Action"]) <= WILDCARD_ACTIONS.keys(), (
                    f"{policy.name} reaches everything: {statement}"
                )
            elif "*" in resource:
                assert resource in PARTS, f"{policy.name} reaches {resource}"


def test_wildcard_statements_have_conditions_or_are_harmless(everything: Cloud) -> None:
    policies = everything.of_type("aws:iam/rolePolicy:RolePolicy")
    wide = [item for resource in policies for item in statements(resource.inputs["policy"]) if item["Resource"] == "*"]
    assert wide
    harmless = (
        ["ecr:GetAuthorizationToken"],
        ["ecs:DiscoverPollEndpoint"],
        list(SESSION_MANAGER),
        [*LOOK_AT_GROUPS, LOOK_AT_RESERVATIONS, SPOT_PRICES],
        list(LOOK_AT_INSTANCE),
    )
    for statement in wide:
        if statement["Action"] not in harmless:
            [[(key, value)]] = [condition.items() for condition in statement["Condition"].values()]
            assert key in ("cloudwatch:namespace", "ecs:cluster")
            assert value.endswith("/ray-on-ecs-ray-dev-c0ffee")


def test_roles_have_no_policies_managed_by_aws(everything: Cloud) -> None:
    assert not everything.of_type("aws:iam/rolePolicyAttachment:RolePolicyAttachment")


def test_task_policies_attach_only_to_task_roles() -> None:
    cloud = deployed("existing network and image")
    attached = cloud.of_type("aws:iam/rolePolicyAttachment:RolePolicyAttachment")
    assert {resource.inputs["role"] for resource in attached} == {
        "ray-on-ecs-head-task-role",
        "ray-on-ecs-worker-task-role",
    }
    assert sorted({resource.inputs["policyArn"] for resource in attached}) == sorted(TASK_POLICIES)
    needed = cloud.needs("ray-workers-service")
    assert any(item.startswith("worker-task-role-read-features-") for item in needed)


def test_instance_policies_exist_before_the_instances() -> None:
    cloud = deployed("large workers")
    attached = cloud.of_type("aws:iam/rolePolicyAttachment:RolePolicyAttachment")
    assert {resource.inputs["role"] for resource in attached} == {
        "ray-on-ecs-head-instance-role",
        "ray-on-ecs-workers-instance-role",
    }
    assert {resource.inputs["policyArn"] for resource in attached} == {INSTANCE_POLICY}
    assert any(item.startswith("head-instance-role-session-key-") for item in cloud.needs("head-group"))
    assert "network-kms" in cloud.resources


def test_each_role_is_for_one_service(everything: Cloud) -> None:
    roles = everything.of_type("aws:iam/role:Role")
    assert roles
    for role in roles:
        assert role.inputs["permissionsBoundary"] == EVERYTHING["permissionsBoundary"]
        assert role.inputs["path"] == "/teams/ml/"
        (statement,) = statements(role.inputs["assumeRolePolicy"])
        service = "ec2.amazonaws.com" if "instance" in role.name else "ecs-tasks.amazonaws.com"
        condition = statement.pop("Condition", None)
        assert statement == {"Effect": "Allow", "Principal": {"Service": service}, "Action": "sts:AssumeRole"}
        if role.name.endswith("-task-role"):
            assert condition == {
                "ArnLike": {"aws:SourceArn": f"arn:aws:ecs:{REGION}:{ACCOUNT}:*"},
                "StringEquals": {"aws:SourceAccount": ACCOUNT},
            }


def test_program_is_deterministic(everything: Cloud) -> None:
    again = deploy(config=everything.config)
    assert again.resources == everything.resources
    assert again.exports == everything.exports


def test_new_token_restarts_every_node() -> None:
    cloud = deployed("large workers")
    triggers = {name: cloud.resources[name].inputs["triggers"] for name in SERVICES}
    assert triggers == {
        "ray-head-service": {"token": "2026-11"},
        "ray-workers-service": {"token": "2026-11", "redeploy": "again"},
    }
    assert all(cloud.resources[name].inputs["forceNewDeployment"] is True for name in SERVICES)
    assert all("auth-parameter" in cloud.needs(name) for name in SERVICES)


def trains_by(cloud: Cloud) -> str:
    """The command of the session that `train_command` starts."""
    assert "--document-name ray-on-ecs-sessions-train" in cloud.exports["train_command"]
    content = json.loads(cloud.resources["sessions-train"].inputs["content"])
    return content["properties"]["linux"]["commands"]


def test_train_command_has_gpus_and_bucket(stack: Cloud) -> None:
    head = environment(stack, HEAD_TASK)
    assert "ray-on-ecs run ray_train_ddp.py --num-workers 2 --use-gpu" in trains_by(stack)
    assert head["RAY_ON_ECS_STORAGE_PATH"] == "s3://training-bucket/runs"
    assert environment(stack, WORKER_TASK)["RAY_HEAD_HOST"] == "head.ray-on-ecs-ray-dev-c0ffee.internal"


def test_larger_instance_type_changes_all_derived_sizes() -> None:
    cloud = deployed("large workers")
    worker = container(cloud, WORKER_TASK)
    assert worker["resourceRequirements"] == [{"type": "GPU", "value": "4"}]
    assert {"--num-cpus=48", "--num-gpus=4"} <= set(worker["command"])
    assert cloud.resources[WORKER_TASK].inputs["cpu"] == str(48 * 1024)
    assert cloud.resources["workers-template"].inputs["instanceType"] == "g5.12xlarge"
    assert cloud.resources["workers-group"].inputs["maxSize"] == 4
    assert cloud.resources["ray-workers-service"].inputs["desiredCount"] == 4
    assert "--num-workers 16" in trains_by(cloud)


def test_stack_without_gpu_workers() -> None:
    cloud = deployed("no GPU workers")
    assert cloud.resources["workers-group"].inputs["maxSize"] == 0
    (target,) = cloud.of_type("aws:appautoscaling/target:Target")
    assert (target.inputs["minCapacity"], target.inputs["maxCapacity"]) == (0, 0)
    assert not cloud.of_type("aws:appautoscaling/policy:Policy")
    service = cloud.resources["ray-workers-service"]
    assert service.inputs["desiredCount"] == 0
    assert service.ignore_changes == ("desiredCount",)
    assert cloud.resources["head-group"].inputs["desiredCapacity"] == 1
    assert "--num-workers" not in trains_by(cloud)


@pytest.mark.parametrize(
    ("name", "most", "first"), [("default", 2, 2), ("everything", 4, 2), ("more workers", 6, 5), ("from zero", 4, 0)]
)
def test_autoscaled_counts_are_not_reset(name: str, most: int, first: int) -> None:
    cloud = deployed(name)
    service, group = cloud.resources["ray-workers-service"], cloud.resources["workers-group"]
    assert (service.inputs["desiredCount"], service.ignore_changes) == (first, ("desiredCount",))
    assert service.inputs["deploymentCircuitBreaker"] == {"enable": True, "rollback": False}
    assert service.inputs.keys().isdisjoint({"forceNewDeployment", "triggers"})
    assert "desiredCapacity" not in group.inputs
    assert group.inputs["maxSize"] == most
    assert cloud.resources["workers-scaling-target"].inputs["maxCapacity"] == most
    assert cloud.resources["head-group"].inputs["desiredCapacity"] == 1
    workers = first or most
    assert f"--num-workers {workers}" in trains_by(cloud)


def test_worker_changes_do_not_restart_the_head(stack: Cloud) -> None:
    assert deployed("more workers").resources[HEAD_TASK].inputs == stack.resources[HEAD_TASK].inputs, (
        "a new task definition restarts the head, and every job with it"
    )


SLEEPERS = {"head-sleep", "head-sleep-target", "head-sleep-instance-policy"}
SLEEPERS |= {f"head-sleep-{kind}-{part}" for kind in ("sleep", "wake") for part in ("policy", "alarm")}


@pytest.fixture
def sleeping() -> Cloud:
    """The default stack with a head that sleeps."""
    return deployed("sleeping")


def changes(before: Cloud, after: Cloud) -> dict[str, set[str]]:
    """Changed inputs by resource, of those that are in both."""
    changed = {}
    for name in before.resources.keys() & after.resources.keys():
        old, new = before.resources[name].inputs, after.resources[name].inputs
        changed[name] = {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)}
    return {name: keys for name, keys in changed.items() if keys}


def test_sleep_changes_the_head_alone(stack: Cloud, sleeping: Cloud) -> None:
    assert sleeping.resources.keys() - stack.resources.keys() == SLEEPERS
    assert stack.resources.keys() <= sleeping.resources.keys()
    changed = changes(stack, sleeping)
    assert "treatMissingData" in changed.pop("monitoring-head-alarm")
    assert changed == {
        "head-group": {"minSize"},
        "head-capacity-provider": {"autoScalingGroupProvider"},
        "head-task-definition": {"containerDefinitions"},
        "ray-head-service": {"tags"},
    }


def test_updates_neither_wake_nor_end_a_head_that_sleeps(sleeping: Cloud) -> None:
    service, group = sleeping.resources["ray-head-service"], sleeping.resources["head-group"]
    assert (service.inputs["desiredCount"], service.ignore_changes) == (1, ("desiredCount",))
    assert (group.inputs["desiredCapacity"], group.ignore_changes) == (1, ("desiredCapacity",))
    assert "deploymentCircuitBreaker" not in service.inputs, "a head that fails three times goes on trying"


def test_head_starts_when_its_sleep_is_switched_off(stack: Cloud, sleeping: Cloud) -> None:
    """The hook tells by the service's tag, and the update of the service can't be missing."""
    assert SLEEP_TAG in sleeping.resources["ray-head-service"].inputs["tags"]
    assert SLEEP_TAG not in stack.resources["ray-head-service"].inputs["tags"]
    assert stack.resources["ray-head-service"].before_update
    assert not stack.resources["ray-workers-service"].before_update


@pytest.mark.parametrize(
    ("more", "changed"),
    [
        ({"sleepAfterMinutes": "30"}, {"head-task-definition", "head-sleep-sleep-alarm"}),
        ({"headInstanceType": "m5.2xlarge"}, {"head-template", "head-task-definition", "cluster-info-parameter"}),
        ({"rotateToken": "again"}, {"auth-token", "ray-head-service", "ray-workers-service"}),
    ],
    ids=["minutes", "type", "token"],
)
def test_changes_of_a_head_that_sleeps(sleeping: Cloud, more: dict[str, str], changed: set[str]) -> None:
    assert changes(sleeping, deploy(config={**sleeping.config, **more})).keys() == changed


def test_commands_look_up_a_head_that_sleeps(sleeping: Cloud) -> None:
    exports = sleeping.exports
    assert exports.keys() == EXPORTS | {"wake_command"}
    assert "aws:ec2/getInstances:getInstances" not in [token for token, _ in sleeping.calls]
    assert exports["head_instance_id"] == exports["connection"]["head_instance_id"] == ""
    for name in ("train_command", "shell_command", "dashboard_command"):
        assert "--target $(aws ec2 describe-instances " in exports[name], name
        assert "groupName,Values=ray-on-ecs-head-group " in exports[name], name
    assert " --namespace ray-on-ecs/ray-on-ecs-ray-dev-c0ffee " in exports["wake_command"]
    assert environment(sleeping, HEAD_TASK)["SLEEP_AFTER_MINUTES"] == "60"


def test_unknown_cost_is_exported_as_unknown() -> None:
    exports = deployed("existing network and image").exports
    assert exports["estimated_hourly_usd"] == "unknown"
    assert exports["idle_cost"].startswith("unknown")


BUILD_LINE = "image: CodeBuild builds it in `pulumi up`, some 8 minutes, about 0.16 USD"
NO_DOCKER = SettingError("image_build", "local", "needs Docker on this machine, but it is not installed", "start it")


class WithoutImage(BuiltImage):
    """An account whose repository lacks the image."""

    def describe_images(self, **asked: Any) -> dict[str, Any]:
        raise ClientError({"Error": {"Code": "ImageNotFoundException"}}, "DescribeImages")


def test_a_machine_without_docker_plans_a_build_in_codebuild() -> None:
    cloud = deploy(preview=True, image_problem=NO_DOCKER)
    assert cloud.messages.count(BUILD_LINE) == 1
    assert cloud.exports["image_uri"] is None
    assert cloud.of_type("aws:codebuild/project:Project")


def test_a_preview_knows_the_image_that_is_in_the_repository() -> None:
    cloud = deploy(preview=True, is_up=True, image_problem=NO_DOCKER)
    assert BUILD_LINE not in cloud.messages
    assert cloud.exports["image_uri"] == f"{REGISTRY}/training@{DIGEST}"
    changed = deploy(preview=True, is_up=True, image_problem=NO_DOCKER, codebuild=WithoutImage())
    assert changed.messages.count(BUILD_LINE) == 1
    assert changed.exports["image_uri"] is None


def test_docker_after_codebuild_is_refused() -> None:
    with pytest.raises(pulumi.RunError, match=r"^imageBuild: 'auto' is local on this machine, but was codebuild at"):
        deploy(preview=True, is_up=True, kept={"image_builder": "codebuild"})


def test_a_ready_image_needs_neither_docker_nor_codebuild() -> None:
    cloud = deploy(preview=True, config={"imageUri": READY_IMAGE}, image_problem=NO_DOCKER, codebuild=None)
    assert not cloud.of_type("aws:codebuild/project:Project")


def test_existing_network_holds_all_resources() -> None:
    resources = deployed("existing network and image").resources
    assert resources["discovery-namespace"].inputs["vpc"] == "vpc-0a1b"
    assert all(resources[name].inputs["vpcZoneIdentifiers"] == ["subnet-0c2d"] for name in GROUPS)
    assert all(resources[name].inputs["networkConfiguration"]["subnets"] == ["subnet-0c2d"] for name in SERVICES)


def test_no_ingress_from_addresses(stack: Cloud) -> None:
    rules = stack.of_type("aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule")
    assert rules
    assert all(rule.inputs.keys().isdisjoint({"cidrIpv4", "cidrIpv6", "prefixListId"}) for rule in rules)


def test_existing_image_skips_the_build() -> None:
    cloud = deployed("existing network and image")
    resources = cloud.resources.items()
    assert not [name for name, resource in resources if "ecr" in resource.type or name.startswith("image")]
    for task in (HEAD_TASK, WORKER_TASK):
        assert container(cloud, task)["image"] == READY_IMAGE
    assert cloud.exports["image_uri"] == READY_IMAGE
    tagged = deployed("no GPU workers").exports["image_uri"]
    assert tagged == f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/ray@{DIGEST}"


def test_only_a_retained_bucket_survives_destroy() -> None:
    cloud = deployed("large workers")
    kept = {name for name, resource in cloud.resources.items() if resource.retain_on_delete}
    assert "storage-bucket" in kept
    policies = {"head-instance-ecs", "workers-instance-ecs"}  # these go with their roles
    assert all(name.startswith("storage-") for name in kept - policies)


def test_arns_have_the_partition_of_the_account() -> None:
    policies = deployed("in China").of_type("aws:iam/rolePolicy:RolePolicy")
    named = [statement["Resource"] for policy in policies for statement in statements(policy.inputs["policy"])]
    arns = [arn for item in named for arn in ([item] if isinstance(item, str) else item)]
    for part in ("ecr", "my-data", ":task/"):
        written = [arn for arn in arns if part in arn]
        assert written, part
        assert all(arn.startswith("arn:aws-cn:") for arn in written), written


def test_zone_change_keeps_the_network() -> None:
    here, there = (deployed(f"up in zone a, configured for {letter}") for letter in "ab")
    placement = {name for name in (*here.resources, *there.resources) if "-placement-" in name}
    moved = {
        name for name in {*here.resources} - placement if here.resources[name].inputs != there.resources[name].inputs
    }
    assert moved - {"choices-id"} == {*GROUPS, *SERVICES, "cluster-info-parameter"}
    assert placement == {f"workers-placement-us-west-2{letter}" for letter in "ab"}
    [subnet] = there.resources["head-group"].inputs["vpcZoneIdentifiers"]
    assert "private-us-west-2b" in subnet


@pytest.mark.parametrize(
    "name", ["default", "everything", "existing network and image", "no GPU workers", "large workers"]
)
def test_preview_evaluates_with_unknown_values(name: str) -> None:
    preview, update = deploy(**STACKS[name], preview=True), deployed(name)
    assert preview.resources.keys() == update.resources.keys()
    sleeps = "sleepAfterMinutes" in update.config
    assert preview.exports.keys() == EXPORTS | ({"wake_command"} if sleeps else set())
    assert preview.exports["head_instance_id"] == ("" if sleeps else None)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("workerCount", "-1"),  # before the component
        ("headInstanceType", "m99.large"),  # by its zones
        ("headInstanceType", "t3.small"),  # by its size
        ("workerInstanceTypes", "p4d.24xlarge"),  # by the default quota of 64 vCPUs
        ("maxHourlyUsd", "1.5"),
        ("vpcId", "vpc-0a1b"),
    ],
)
def test_invalid_settings_create_no_resources(monkeypatch: pytest.MonkeyPatch, key: str, value: str) -> None:
    cloud = Cloud(config={key: value})
    monkeypatch.chdir(ROOT)
    with pytest.raises(pulumi.RunError, match=f"^{key}: "):
        cloud.run(lambda: runpy.run_path(str(ROOT / "__main__.py"), run_name="__main__"))
    assert cloud.resources.keys() <= {CLUSTER}


# Property with the encryption key by resource type.
ENCRYPTED = {
    "aws:cloudwatch/logGroup:LogGroup": "kmsKeyId",
    "aws:ssm/parameter:Parameter": "keyId",
    "aws:s3/bucketServerSideEncryptionConfiguration:BucketServerSideEncryptionConfiguration": "rules",
    "aws:ecr/repository:Repository": "encryptionConfigurations",
    "aws:ec2/launchTemplate:LaunchTemplate": "blockDeviceMappings",
    "aws:kms/grant:Grant": "keyId",
}


def test_kms_key_encrypts_all_stored_data(everything: Cloud) -> None:
    checked = [resource for resource in everything.resources.values() if resource.type in ENCRYPTED]
    for resource in checked:
        if resource.inputs.get("type") != "String":  # ClusterInfo is not encrypted
            assert KEY in json.dumps(resource.inputs[ENCRYPTED[resource.type]]), f"{resource.name} has another key"
    assert {resource.type for resource in checked} == ENCRYPTED.keys()
    for task in (HEAD_TASK, WORKER_TASK, CPU_WORKER_TASK):
        kind = task.removesuffix("-definition")
        for role in ("execution", "role"):
            document = everything.resources[f"{kind}-{role}-policy"].inputs["policy"]
            assert KEY in document, f"{kind} {role} can't use the key"


def test_stack_without_cpu_workers_has_no_resource_for_them(stack: Cloud) -> None:
    assert not [name for name in stack.resources if "cpu-worker" in name]


# Kinds of the stack with pools, the head first, with the name of their task and the label of their nodes.
POOLS = {
    "head": ("head", None),
    "workers": ("worker", None),
    "workers-a": ("worker-a", None),
    "cpu-workers": ("cpu-worker", "cpu-workers"),
    "h100-workers-a": ("h100-worker-a", "h100"),
    "h100-workers-b": ("h100-worker-b", "h100"),
    "l4-workers": ("l4-worker", "l4"),
    "prep-workers": ("prep-worker", "prep"),
}
ZONES = {"workers-a": "a", "h100-workers-a": "a", "h100-workers-b": "b"}


@pytest.fixture
def pools() -> Cloud:
    """A stack with several pools, two of them in two zones."""
    return deployed("pools")


def test_each_kind_has_its_parts(pools: Cloud) -> None:
    providers = [f"ray-on-ecs-{kind}-capacity-provider" for kind in POOLS]
    assert pools.resources["ray-capacity-providers"].inputs["capacityProviders"] == providers
    connection = pools.exports["connection"]["services"]
    assert connection == {kind: f"ray-on-ecs-ray-{kind}-service" for kind in POOLS}
    for kind, (task, label) in POOLS.items():
        subnet = f"ray-on-ecs-network-vpc-private-us-west-2{ZONES.get(kind, 'c')}-subnet-id"
        assert pools.resources[f"{kind}-group"].inputs["vpcZoneIdentifiers"] == [subnet]
        service = pools.resources[f"ray-{kind}-service"].inputs
        assert service["networkConfiguration"]["subnets"] == [subnet]
        assert service["capacityProviderStrategies"][0]["capacityProvider"] == f"ray-on-ecs-{kind}-capacity-provider"
        assert environment(pools, f"{task}-task-definition").get("RAY_NODE_TYPE_NAME") == label
        assert pools.resources[f"{task}-task-definition"].inputs["family"].endswith(f"-{kind}")


def test_node_groups_of_a_pool_share_its_maximum(pools: Cloud) -> None:
    counts = {}
    for kind in [*POOLS][1:]:
        target = pools.resources[f"{kind}-scaling-target"].inputs
        service = pools.resources[f"ray-{kind}-service"].inputs
        counts[kind] = (target["minCapacity"], service["desiredCount"], target["maxCapacity"])
        assert pools.resources[f"{kind}-group"].inputs["maxSize"] == target["maxCapacity"]
    assert counts == {
        "workers": (0, 2, 4),
        "workers-a": (0, 0, 4),
        "cpu-workers": (0, 1, 1),
        "h100-workers-a": (0, 0, 2),
        "h100-workers-b": (0, 0, 2),
        "l4-workers": (1, 1, 3),
        "prep-workers": (0, 0, 2),
    }


def test_each_pool_has_its_disks_and_markets(pools: Cloud) -> None:
    def disk(kind: str) -> float:
        [volume] = pools.resources[f"{kind}-template"].inputs["blockDeviceMappings"]
        return volume["ebs"]["volumeSize"]

    assert {kind: disk(kind) for kind in POOLS} == {**dict.fromkeys(POOLS, 200), "prep-workers": 500}
    mixed = {kind for kind in POOLS if "mixedInstancesPolicy" in pools.resources[f"{kind}-group"].inputs}
    assert mixed == {"l4-workers"}


def test_placement_groups_are_in_the_zones_of_gpu_workers(pools: Cloud) -> None:
    groups = {group.name for group in pools.of_type("aws:ec2/placementGroup:PlacementGroup")}
    kinds = {"workers": "c", **ZONES, "l4-workers": "c"}
    assert groups == {f"ray-on-ecs-{kind}-placement-us-west-2{zone}" for kind, zone in kinds.items()}
    for kind, zone in kinds.items():
        placed = pools.resources[f"{kind}-group"].inputs["placementGroup"]
        assert placed == f"ray-on-ecs-{kind}-placement-us-west-2{zone}"


def test_head_sets_the_numbers_of_every_kind_and_moves_none(pools: Cloud) -> None:
    for kind in [*POOLS][1:]:
        policy = pools.resources[f"{kind}-scaling-head-policy"].inputs
        assert policy["role"] == "ray-on-ecs-head-task-role"
        count, size = statements(policy["policy"])
        assert count["Resource"].endswith(f"/ray-on-ecs-ray-{kind}-service")
        assert size["Resource"].endswith(f":ray-on-ecs-{kind}-group")
    for policy in pools.of_type("aws:iam/rolePolicy:RolePolicy"):
        assert "autoscaling:UpdateAutoScalingGroup" not in policy.inputs["policy"]


def test_gpu_workers_replace_instances_of_their_own_group(pools: Cloud) -> None:
    for kind, (task, _) in POOLS.items():
        allowed = statements(pools.resources[f"{task}-task-role-policy"].inputs["policy"])
        marked = [each["Resource"] for each in allowed if each["Action"] == ["autoscaling:SetInstanceHealth"]]
        has_gpus = "resourceRequirements" in container(pools, f"{task}-task-definition")
        assert has_gpus == (kind not in ("head", "cpu-workers", "prep-workers"))
        assert [arn.rpartition(":")[2] for arn in marked] == [f"ray-on-ecs-{kind}-group"] * has_gpus


def test_runs_find_every_kind_in_the_cluster_info(pools: Cloud) -> None:
    info = parse_cluster_info(pools.resources["cluster-info-parameter"].inputs["insecureValue"])
    assert info is not None
    groups = info["groups"].items()
    found = {kind: (group["pool"], group["zones"], group["gpu"], group["units"]) for kind, group in groups}
    assert found == {
        "workers": ("default", ["us-west-2c"], "A10G", 1),
        "workers-a": ("default", ["us-west-2a"], "A10G", 1),
        "cpu-workers": ("cpu", ["us-west-2c"], "", 8),
        "h100-workers-a": ("h100", ["us-west-2a"], "H100", 8),
        "h100-workers-b": ("h100", ["us-west-2b"], "H100", 8),
        "l4-workers": ("l4", ["us-west-2c"], "L4", 1),
        "prep-workers": ("prep", ["us-west-2c"], "", 32),
    }
    assert all(group["provider"] == f"ray-on-ecs-{kind}-capacity-provider" for kind, group in info["groups"].items())


@pytest.mark.parametrize("without", ["pools", "a zone"])
def test_more_pools_and_zones_change_nothing_of_the_first(pools: Cloud, without: str) -> None:
    """Only what has a list of all kinds changes; the head does not restart."""
    fewer = {"workerPools": "{}"} if without == "pools" else {"availabilityZones": "us-west-2c"}
    before = deploy(config={**STACKS["pools"]["config"], **fewer})
    changed = {name for name, made in before.resources.items() if made.inputs != pools.resources[name].inputs}
    lists = {"ray-capacity-providers", "cluster-info-parameter", "monitoring-dashboard"}
    assert changed - {"choices-id"} == lists


def test_services_of_a_removed_pool_are_deleted_first(pools: Cloud) -> None:
    """The engine runs this hook before it updates the providers, and deletes what is no longer in the program later."""
    assert pools.resources["ray-capacity-providers"].before_update


def test_command_line_finds_alarms_by_name(everything: Cloud) -> None:
    alarms = everything.of_type("aws:cloudwatch/metricAlarm:MetricAlarm")
    names = {str(alarm.inputs.get("name", "")) for alarm in alarms}
    for kind in ("workers", "workers-a", "cpu-workers"):
        assert {f"{everything.exports['cluster_name']}-{kind}-{alarm}" for alarm in SCALERS} <= names


@pytest.mark.parametrize(
    ("name", "is_up", "is_counted"),
    [
        ("up in zone a, configured for a", True, True),
        ("default", False, False),
        ("more workers", True, False),
        ("from zero", True, False),
    ],
    ids=["the stack's bucket", "a new stack", "a retained bucket", "an existing bucket"],
)
def test_runs_are_counted_if_destroy_deletes_them(name: str, is_up: bool, is_counted: bool) -> None:
    cloud = deploy(**{**STACKS[name], "preview": True, "is_up": is_up})
    assert ("aws:s3/getObjects:getObjects" in [token for token, _ in cloud.calls]) == is_counted
