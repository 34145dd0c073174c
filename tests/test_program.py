"""The whole program: what `pulumi up` and `pulumi preview` make of __main__.py."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pulumi
import pytest

from infra.settings import SettingError
from tests.infra.fake_aws import DIGEST, REGISTRY, SECRET, Cloud

ROOT = Path(__file__).parents[1]
EXPORTS = {
    "bucket",
    "head_instance_id",
    "cluster_name",
    "image_uri",
    "log_group",
    "train_command",
    "shell_command",
    "dashboard_command",
    "token_command",
}
SERVICES = ["ray-head-service", "ray-workers-service"]
GROUPS = ["head-group", "workers-group"]
READY_IMAGE = f"public.example/ray@{DIGEST}"


def deploy(monkeypatch: pytest.MonkeyPatch, config: dict[str, str] | None = None, preview: bool = False) -> Cloud:
    """Run the program on a stack with this configuration."""
    cloud = Cloud(config=config or {}, preview=preview)
    exported: dict[str, pulumi.Output[Any]] = {}
    monkeypatch.setattr(pulumi, "export", lambda name, value: exported.update({name: pulumi.Output.from_input(value)}))
    monkeypatch.chdir(ROOT)
    cloud.run(lambda: runpy.run_path(str(ROOT / "__main__.py"), run_name="__main__") and None)
    cloud.exports = {name: cloud.value(output) for name, output in exported.items()}
    return cloud


@pytest.fixture(scope="module")
def stack() -> Cloud:
    """The default stack, deployed once for the tests that only look at it."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        return deploy(monkeypatch)


def container(cloud: Cloud, task: str) -> dict[str, Any]:
    """The container of a task definition."""
    (definition,) = json.loads(cloud.resources[task].inputs["containerDefinitions"])
    return definition


def environment(cloud: Cloud, task: str) -> dict[str, str]:
    """The environment of a task's container."""
    return {entry["name"]: entry["value"] for entry in container(cloud, task)["environment"]}


def takes_tags(resource_type: str) -> bool:
    """Whether the SDK's class for a type has tags."""
    package, module, name = resource_type.split(":")
    library = __import__({"aws": "pulumi_aws", "awsx": "pulumi_awsx"}[package], fromlist=[""])
    return hasattr(getattr(getattr(library, module.split("/")[0]), name), "tags")


def test_the_table_of_contents_stays_one() -> None:
    lines = (ROOT / "__main__.py").read_text().splitlines()
    assert len(lines) < 80, "what does not fit on a page belongs into a component"


def test_everything_is_exported(stack: Cloud) -> None:
    assert stack.exports.keys() == EXPORTS, "people and scripts read these by name"
    assert all(stack.exports.values()), "an empty output cannot be used"


def test_the_exports_are_those_of_the_resources(stack: Cloud) -> None:
    plain = {name: value for name, value in stack.exports.items() if not name.endswith("_command")}
    assert plain == {
        "bucket": "training-bucket",
        "head_instance_id": "i-0123456789abcdef0",
        "cluster_name": "ray-cluster",
        "image_uri": f"{REGISTRY}/training@{DIGEST}",
        "log_group": "ray-logs",
    }


def test_the_commands_reach_this_stack(stack: Cloud) -> None:
    for name in ("train_command", "shell_command", "dashboard_command"):
        assert "--region us-west-2 --target i-0123456789abcdef0 " in stack.exports[name], f"{name} goes elsewhere"
    assert '"host":["head.ray-on-ecs-dev.internal"]' in stack.exports["dashboard_command"]
    assert " --name auth-parameter " in stack.exports["token_command"]


def test_every_component_is_at_the_top_and_everything_else_in_one(stack: Cloud) -> None:
    components = {name for name, made in stack.resources.items() if made.type.startswith("ray-on-ecs:")}
    assert components == {
        *("network", "storage", "image", "auth", "discovery", "ray", "head", "workers", "ray-head", "ray-workers")
    }, "these are the architecture"
    for name, made in stack.resources.items():
        expected = {"ray-on-ecs-dev"} if name in components else components
        assert made.parent in expected, f"{name} stands outside of the component that owns it"


def test_every_child_is_named_after_its_component(stack: Cloud) -> None:
    for name, made in stack.resources.items():
        if not made.type.startswith("ray-on-ecs:"):
            assert name.startswith(f"{made.parent}-"), f"{name} does not say where it belongs"


def test_everything_that_takes_tags_has_them(stack: Cloud) -> None:
    wanted = {"project": "ray-on-ecs", "stack": "dev"}
    checked = 0
    for name, made in stack.resources.items():
        if not made.type.startswith(("aws:", "awsx:")) or not (takes_tags(made.type) or "tags" in made.inputs):
            continue
        if made.type == "aws:ec2/launchTemplate:LaunchTemplate":
            assert made.inputs["tagSpecifications"], "it tags what it launches"
            continue
        tags = made.inputs.get("tags")
        assert tags, f"{name} carries no tags, and cost reports miss it"
        if isinstance(tags, list):
            tags = {tag["key"]: tag["value"] for tag in tags}
        assert wanted.items() <= tags.items(), f"{name} does not say which stack it belongs to"
        checked += 1
    assert checked >= 25, "the SDK keeps its tags elsewhere, and nothing was checked"


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_is_created_after_all_it_runs_on_and_destroyed_before(stack: Cloud, service: str) -> None:
    needed = {
        "the association": {"ray-capacity-providers"},
        "the network": {"network-vpc", "network-ingress", "network-egress"},
        "its roles' policies": {
            f"{service.removesuffix('-service')}-execution-policy",
            f"{service.removesuffix('-service')}-task-policy",
        },
        "the instances and their rights": {*GROUPS, "head-instance-ecs", "workers-instance-ecs"},
        "the logs": {"ray-logs"},
        "the token": {"auth-parameter"},
    }
    needs = stack.needs(service)
    for what, names in needed.items():
        assert names <= needs, f"without {what} `up` fails, or `destroy` hangs in DRAINING"


def test_the_head_leaves_before_its_name_does(stack: Cloud) -> None:
    assert "discovery-head" in stack.needs("ray-head-service"), "Cloud Map refuses to delete a service in use"


@pytest.mark.parametrize("group", GROUPS)
def test_instances_start_in_a_finished_network_and_leave_before_the_cluster(stack: Cloud, group: str) -> None:
    needs = stack.needs(group)
    assert {"network-vpc", "network-ingress", "network-egress"} <= needs, "an instance without a route joins nothing"
    assert "ray-cluster" in needs, "ECS refuses to delete a cluster with instances"


def test_the_order_has_no_circle(stack: Cloud) -> None:
    for name in stack.resources:
        assert name not in stack.needs(name), f"{name} waits for itself"


def test_services_wait_for_both_capacity_providers_to_be_associated(stack: Cloud) -> None:
    association = stack.resources["ray-capacity-providers"].inputs
    assert association["capacityProviders"] == ["head-capacity-provider", "workers-capacity-provider"]
    assert association["clusterName"] == "ray-cluster"


def test_the_token_is_nowhere_to_be_read(stack: Cloud) -> None:
    for name, made in stack.resources.items():
        if name != "auth-parameter":
            assert SECRET not in json.dumps(made.inputs), f"{name} holds the token"
    assert SECRET not in json.dumps(stack.exports), "exports are printed"
    for task in ("ray-head-task", "ray-workers-task"):
        assert "RAY_AUTH_TOKEN" not in environment(stack, task), "the environment is shown in the console"
        (secret,) = container(stack, task)["secrets"]
        assert secret["valueFrom"].endswith(":auth-parameter"), "ECS reads it from the parameter"


def test_nothing_lets_the_internet_in(stack: Cloud) -> None:
    for made in stack.of_type("aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule"):
        assert made.inputs.keys().isdisjoint({"cidrIpv4", "cidrIpv6"}), "Ray runs whatever it is told"
    for service in SERVICES:
        assert stack.resources[service].inputs["networkConfiguration"]["assignPublicIp"] is False


def test_training_finds_its_gpus_and_its_bucket(stack: Cloud) -> None:
    head = environment(stack, "ray-head-task")
    assert "python -m training --num-workers 2" in stack.exports["train_command"], "one worker for each GPU"
    assert head["TRAINING_STORAGE_PATH"] == "s3://training-bucket/runs", "the task's role allows this prefix alone"
    assert environment(stack, "ray-workers-task")["RAY_HEAD_HOST"] == "head.ray-on-ecs-dev.internal"


def test_a_larger_type_changes_every_number_that_follows_from_it(monkeypatch: pytest.MonkeyPatch, stack: Cloud) -> None:
    cloud = deploy(monkeypatch, {"workerInstanceType": "g5.12xlarge", "workerCount": "4"})
    worker = container(cloud, "ray-workers-task")
    assert worker["resourceRequirements"] == [{"type": "GPU", "value": "4"}], "all four GPUs of each instance"
    assert {"--num-cpus=48", "--num-gpus=4"} <= set(worker["command"]), "Ray offers what the instance has"
    assert cloud.resources["ray-workers-task"].inputs["cpu"] == str(48 * 1024)
    assert cloud.resources["workers-template"].inputs["instanceType"] == "g5.12xlarge"
    assert cloud.resources["workers-group"].inputs["desiredCapacity"] == 4
    assert cloud.resources["ray-workers-service"].inputs["desiredCount"] == 4
    assert "--num-workers 16" in cloud.exports["train_command"], "four instances with four GPUs each"
    assert container(cloud, "ray-head-task") == container(stack, "ray-head-task"), "the head would be restarted"


def test_a_stack_can_be_kept_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    cloud = deploy(monkeypatch, {"workerCount": "0"})
    assert cloud.resources["workers-group"].inputs["desiredCapacity"] == 0, "GPUs are the cost"
    assert cloud.resources["ray-workers-service"].inputs["desiredCount"] == 0, "ECS would look for instances for ever"
    assert cloud.resources["head-group"].inputs["desiredCapacity"] == 1, "the head stays, with its runs and dashboard"
    assert "--num-workers" not in cloud.exports["train_command"], "0 workers are none that train"


def test_a_ready_image_is_used_and_nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    cloud = deploy(monkeypatch, {"imageUri": READY_IMAGE})
    built = [made.name for made in cloud.resources.values() if "ecr" in made.type or made.name.startswith("image")]
    assert built == [], "no Docker is needed then"
    for task in ("ray-head-task", "ray-workers-task"):
        assert container(cloud, task)["image"] == READY_IMAGE, "both kinds run the same image"
    assert cloud.exports["image_uri"] == READY_IMAGE


def test_a_retained_bucket_stays_and_everything_else_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    cloud = deploy(monkeypatch, {"retainBucket": "true"})
    kept = {name for name, made in cloud.resources.items() if made.retain_on_delete}
    assert "storage-bucket" in kept, "its runs are to outlive the stack"
    assert all(name.startswith("storage-") for name in kept), "anything else that stays is paid for by mistake"


def test_a_zone_that_is_asked_for_holds_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    cloud = deploy(monkeypatch, {"availabilityZone": "us-west-2b"})
    assert cloud.resources["network-vpc"].inputs["availabilityZoneNames"] == ["us-west-2b"]


@pytest.mark.parametrize("config", [{}, {"imageUri": READY_IMAGE}, {"workerCount": "0"}, {"retainBucket": "true"}])
def test_a_preview_evaluates_with_nothing_known_yet(monkeypatch: pytest.MonkeyPatch, config: dict[str, str]) -> None:
    preview = deploy(monkeypatch, config, preview=True)
    update = deploy(monkeypatch, config)
    assert preview.resources.keys() == update.resources.keys(), "a preview that shows something else is none"
    assert preview.exports.keys() == EXPORTS, "every output is announced"
    assert preview.exports["head_instance_id"] is None, "the instance does not exist yet"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("headInstanceType", "t3.small"),
        ("headInstanceType", "m7g.large"),
        ("headInstanceType", "m99.large"),
        ("workerInstanceType", "m5.xlarge"),
        ("workerInstanceType", "p3dn.24xlarge"),
        ("workerCount", "-1"),
        ("vpcCidr", "10.0.0.0/8"),
        ("availabilityZone", "eu-west-1a"),
        ("imageUri", "https://example.com"),
        ("retainBucket", "perhaps"),
        ("rootVolumeGiB", "8"),
        ("logRetentionDays", "2"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_exists(
    monkeypatch: pytest.MonkeyPatch, key: str, value: str
) -> None:
    cloud = Cloud(config={key: value})
    monkeypatch.chdir(ROOT)
    with pytest.raises(SettingError, match=f"^{key}: "):
        cloud.run(lambda: runpy.run_path(str(ROOT / "__main__.py"), run_name="__main__"))
    assert cloud.resources == {}, "half a stack would be left to clean up"
