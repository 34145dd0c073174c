"""RayCluster component in other programs, twice in one program, and from other languages."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import grpc
import pulumi
import pulumi_aws as aws
import pytest
from pulumi.runtime.proto import provider_pb2, provider_pb2_grpc

from component.__main__ import Host
from component.ray_cluster import RayCluster as HostedCluster
from infra.config import RayClusterArgs
from infra.config.args import defaults
from infra.ray_cluster import RayCluster
from tests.infra.fake_aws import ACCOUNT, REGION, Cloud, later
from tests.infra.stacks import KEY

ROOT = Path(__file__).parents[2]
POLICY = f"arn:aws:iam::{ACCOUNT}:policy/"
IMAGE = "public.example/ray@sha256:" + "a" * 64


def test_two_in_one_program_do_not_collide(cloud: Cloud) -> None:
    def program() -> None:
        for name in ("vision", "language"):
            args = RayClusterArgs(cpu_worker_instance_types=["c6i.large"], cpu_worker_count=1, tags={"team": name})
            RayCluster(name, args)

    cloud.run(program)  # refuses two resources of one name and type
    parts = [made for made in cloud.resources.values() if made.type.startswith("aws")]
    of = {
        name: [resource for resource in parts if resource.name.startswith(f"{name}-")]
        for name in ("vision", "language")
    }
    assert len(of["vision"]) == len(of["language"]) == len(parts) / 2
    tagged = [resource for resource in of["vision"] if isinstance(resource.inputs.get("tags"), dict)]
    assert {resource.inputs["tags"]["team"] for resource in tagged} == {"vision"}
    hosts = [
        resource.inputs["name"]
        for resource in cloud.of_type("aws:servicediscovery/privateDnsNamespace:PrivateDnsNamespace")
    ]
    assert hosts == ["vision-ray-dev-c0ffee.internal", "language-ray-dev-c0ffee.internal"]
    images = [build.inputs["imageName"] for build in cloud.of_type("awsx:ecr:Image")]
    assert images == ["vision-image", "language-image"]
    assert len(cloud.of_type("aws:ec2/vpc:Vpc")) == 2


def given_network(zones: list[str], **fields: Any) -> RayClusterArgs:
    """A VPC that the same program makes."""
    subnets: list[pulumi.Input[str]] = [pulumi.Output.from_input(f"subnet-{letter}") for letter in "ab"[: len(zones)]]
    given: dict[str, Any] = {
        "vpc_id": later("vpc-new"),
        "subnet_ids": subnets,
        "availability_zones": zones,
        "image_uri": IMAGE,
    }
    return RayClusterArgs(**{**given, **fields})


def test_network_in_same_program_is_not_looked_up(cloud: Cloud) -> None:
    cloud.run(lambda: RayCluster("vision", given_network(["us-west-2a", "us-west-2b"])))
    asked = {token.rpartition(":")[2] for token, _ in cloud.calls}
    assert asked.isdisjoint({"getVpc", "getSubnet"})
    assert cloud.resources["vision-workers-group"].inputs["vpcZoneIdentifiers"] == ["subnet-a"]
    assert cloud.resources["vision-network-tasks-group"].inputs["vpcId"] == "vpc-new"
    assert not cloud.of_type("aws:ec2/vpc:Vpc")


def test_new_subnet_in_existing_vpc(cloud: Cloud) -> None:
    args = given_network(["us-west-2a"], vpc_id="vpc-0a1b", subnet_ids=[later("subnet-new")])
    cloud.run(lambda: RayCluster("vision", args))
    assert cloud.resources["vision-workers-group"].inputs["vpcZoneIdentifiers"] == ["subnet-new"]


def test_errors_name_fields_of_python_beside_a_stack(cloud: Cloud) -> None:
    def program() -> None:
        args = RayClusterArgs(head_instance_type="m5.huge", image_uri=IMAGE)
        RayClusterArgs.from_config()
        RayCluster("vision", args)

    with pytest.raises(pulumi.RunError, match=r"^head_instance_type: 'm5\.huge' is not offered in any zone of"):
        cloud.run(program)
    assert cloud.resources.keys() == {"vision"}


def test_a_refusal_is_one_line_in_other_languages(cloud: Cloud) -> None:
    host = Host([HostedCluster], "ray-on-ecs")
    inputs: dict[str, Any] = {"headInstanceType": "m5.huge"}
    with pytest.raises(pulumi.errors.InputPropertyError) as refused:
        cloud.run(lambda: host.construct("vision", "ray-on-ecs:index:RayCluster", inputs))
    assert refused.value.property_path == "headInstanceType"
    assert refused.value.reason.startswith("'m5.huge' is not offered in any zone of us-west-2; ")


class Renamed(Cloud):
    """The account of a cluster that was named speech and is named music: an alias keeps IDs and generated names."""

    def new_resource(self, args: Any) -> tuple[str, dict[str, Any]]:
        """Answer as for the earlier name."""
        identity, outputs = super().new_resource(args)
        return identity.replace("music", "speech"), json.loads(json.dumps(outputs).replace("music", "speech"))


def test_a_renamed_cluster_keeps_its_physical_names() -> None:
    """Policies, conditions and other inputs have names from resources, and none from the cluster's new name."""
    cloud = Renamed(kept={"hex": "speech-ray-dev-c0ffee"})
    args = RayClusterArgs(spot=True, alert_email="team@example.com", image_build="codebuild", kms_key_arn=KEY)
    cloud.run(lambda: RayCluster("music", args))
    renamed = {
        (made.name, key)
        for made in cloud.resources.values()
        for key, value in made.inputs.items()
        if "tags" not in key.lower() and "music" in str(value)
    }
    assert renamed == {("music-choices-id", "prefix")}
    assert cloud.resources["music-choices-id"].ignore_changes == ("prefix", "keepers")
    trust = cloud.resources["music-image-role"].inputs["assumeRolePolicy"]
    assert f"arn:aws:codebuild:{REGION}:{ACCOUNT}:project/*" in trust


def test_provider_host_maps_other_languages(cloud: Cloud) -> None:
    host = Host([HostedCluster], "ray-on-ecs")
    inputs: dict[str, Any] = {
        "imageUri": IMAGE,
        "workerInstanceTypes": ["g5.xlarge"],
        "workerCount": 2.0,  # Pulumi passes integers as floats
        "maxWorkers": 4.0,
        "maxHourlyUsd": 99.0,
        "tags": {"costCenter": "42"},
        "alertEmail": None,
    }
    state = cloud.run(lambda: host.construct("vision", "ray-on-ecs:index:RayCluster", inputs).state)
    assert "--num-workers 2 " in cloud.resources["vision-sessions-train"].inputs["content"]
    assert cloud.resources["vision-workers-group"].inputs["maxSize"] == 4
    assert cloud.resources["vision-storage-bucket"].inputs["tags"]["costCenter"] == "42"
    assert cloud.value(state["taskRoleArns"]).keys() == {"head", "workers"}
    assert cloud.value(state["imageUri"]) == IMAGE


def test_default_tags_reach_groups_and_launch_templates(cloud: Cloud) -> None:
    cloud.default_tags = {"team": "vision", "ray-on-ecs:stack": "theirs"}
    cloud.run(lambda: RayCluster("vision", RayClusterArgs(image_uri=IMAGE)))
    group = [(tag["key"], tag["value"]) for tag in cloud.resources["vision-workers-group"].inputs["tags"]]
    assert ("team", "vision") in group
    assert [value for key, value in group if key == "ray-on-ecs:stack"] == ["dev"]
    [instance, *_] = cloud.resources["vision-workers-template"].inputs["tagSpecifications"]
    assert instance["tags"] == {
        "Name": "dev-vision-workers-instance",
        "ray-on-ecs:project": "ray-on-ecs",
        "ray-on-ecs:stack": "dev",
        "team": "vision",
    }
    assert "team" not in cloud.resources["vision-storage-bucket"].inputs["tags"]


@pytest.mark.parametrize("as_mapping", [False, True])
def test_everything_goes_through_an_explicit_provider(cloud: Cloud, as_mapping: bool) -> None:
    cloud.region = "eu-west-1"
    cloud.zones = ("eu-west-1a", "eu-west-1b")
    created = {}

    def program() -> None:
        provider = aws.Provider("ireland", region="eu-west-1")
        chosen: dict[str, Any] = {"providers": {"aws": provider}} if as_mapping else {"provider": provider}
        created["cluster"] = RayCluster(
            "vision", RayClusterArgs(tags={"team": "vision"}), pulumi.ResourceOptions(**chosen)
        )

    cloud.run(program)
    [provider] = cloud.providers
    assert "::ireland::" in provider
    parts = [part for part in cloud.resources.values() if part.type.startswith("aws:")]
    assert {part.provider for part in parts} == {provider}
    [build] = cloud.of_type("awsx:ecr:Image")
    assert build.providers == {"aws": provider}
    [definition] = json.loads(cloud.resources["vision-worker-task-definition"].inputs["containerDefinitions"])
    assert {"name": "AWS_REGION", "value": "eu-west-1"} in definition["environment"]
    assert cloud.value(created["cluster"].connection)["region"] == "eu-west-1"


def test_provider_with_unknown_configuration_is_refused(cloud: Cloud) -> None:
    cloud.account = ""  # the engine's answer in a preview of an unconfigured provider
    with pytest.raises(pulumi.RunError, match=r"^provider: the AWS provider's configuration must be known while "):
        cloud.run(lambda: RayCluster("vision", RayClusterArgs(image_uri=IMAGE)))


def test_outputs_are_taken_as_they_become_known(cloud: Cloud) -> None:
    cloud.absent = ("getKey", "getPolicy", "getSecret", "getBucket")
    key, boundary, policy = f"arn:aws:kms:{REGION}:{ACCOUNT}:key/1a2b", f"{POLICY}boundary", f"{POLICY}read"
    secret = f"arn:aws:secretsmanager:{REGION}:{ACCOUNT}:secret:registry"
    args = RayClusterArgs(
        image_uri=later(IMAGE),
        registry_secret_arn=later(secret),
        bucket_name=later("company-runs"),
        data_buckets=[later("company-data/images")],
        job_secrets=[later(f"{secret}-of-jobs")],
        tags={"team": later("vision")},
        permissions_boundary=later(boundary),
        task_policy_arns=[later(policy)],
        instance_policy_arns=[later(policy)],
        kms_key_arn=later(key),
        environment={"HF_HOME": later("/tmp/hf")},
    )
    cluster = cloud.run(lambda: RayCluster("vision", args))
    [definition] = json.loads(cloud.resources["vision-head-task-definition"].inputs["containerDefinitions"])
    assert definition["image"] == IMAGE
    assert definition["repositoryCredentials"] == {"credentialsParameter": secret}
    assert {"name": "HF_HOME", "value": "/tmp/hf"} in definition["environment"]
    role = cloud.resources["vision-head-task-role"].inputs
    assert (role["permissionsBoundary"], role["tags"]["team"]) == (boundary, "vision")
    assert cloud.resources["vision-head-task-role-policy-0"].inputs["policyArn"] == policy
    assert cloud.resources["vision-head-instance-role-policy-0"].inputs["policyArn"] == policy
    policies = cloud.resources["vision-head-task-role-policy"].inputs["policy"]
    named = (key, "arn:aws:s3:::company-runs/*", "arn:aws:s3:::company-data/images/*", f"{secret}-of-jobs")
    assert all(text in policies for text in named)
    assert cloud.resources["vision-auth-parameter"].inputs["keyId"] == key
    assert cloud.value(cluster.bucket) == "company-runs"


def test_a_preview_with_unknown_outputs_evaluates(cloud: Cloud) -> None:
    cloud.preview = True

    def program() -> None:
        key = aws.kms.Key("key")
        RayCluster("vision", RayClusterArgs(image_uri=IMAGE, kms_key_arn=key.arn, tags={"key": key.arn}))

    cloud.run(program)
    assert "vision-ray-head-service" in cloud.resources


def test_network_roles_and_task_definitions_are_outputs(cloud: Cloud) -> None:
    args = RayClusterArgs(image_uri=IMAGE, cpu_worker_instance_types=["c6i.large"], cpu_worker_count=1)
    cluster = cloud.run(lambda: RayCluster("vision", args))
    assert cloud.value(cluster.vpc_id) == "vision-network-vpc-main-id"
    subnets = [f"vision-network-vpc-private-us-west-2{letter}-subnet-id" for letter in "abc"]
    assert cloud.value(cluster.subnet_ids) == subnets
    assert cloud.value(cluster.security_group_id) == "vision-network-tasks-group-id"
    kinds = {"head": "head", "workers": "worker", "cpu-workers": "cpu-worker"}
    arn = f"arn:aws:service:{REGION}:{ACCOUNT}:vision-"
    assert cloud.value(cluster.task_role_arns) == {kind: f"{arn}{name}-task-role" for kind, name in kinds.items()}
    assert cloud.value(cluster.task_definition_arns) == {
        kind: f"{arn}{name}-task-definition" for kind, name in kinds.items()
    }


def test_own_vpc_example_creates_vpc_and_cluster(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ROOT / "examples" / "own_vpc"
    exported: dict[str, Any] = {}
    monkeypatch.setattr(pulumi, "export", exported.__setitem__)
    monkeypatch.chdir(folder)
    cloud.run(lambda: runpy.run_path(str(folder / "__main__.py")) and None)
    vpc = cloud.resources["company"].inputs
    assert vpc["vpcEndpointStrategy"] == "Auto"
    assert vpc["availabilityZoneNames"] == ["us-west-2a", "us-west-2b"]
    group = cloud.resources["vision-workers-group"].inputs
    assert group["vpcZoneIdentifiers"] == ["subnet-private-us-west-2a"]
    build = cloud.resources["vision-image-build"].inputs
    assert (folder / build["dockerfile"]).is_file()
    assert cloud.value(exported["bucket"]) == "training-bucket"


def test_the_example_takes_the_zones_that_there_are(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud.zones = ("us-west-2b", "us-west-2d", "us-west-2-lax-1a")
    folder = ROOT / "examples" / "own_vpc"
    monkeypatch.chdir(folder)
    cloud.run(lambda: runpy.run_path(str(folder / "__main__.py")) and None)
    assert cloud.resources["company"].inputs["availabilityZoneNames"] == ["us-west-2b", "us-west-2d"]


@pytest.fixture(scope="module")
def schema() -> Generator[dict[str, Any]]:
    """Schema of the hosted component."""
    command = [sys.executable, str(ROOT / "component" / "__main__.py"), "127.0.0.1:1"]
    with subprocess.Popen(command, cwd=ROOT / "component", stdout=subprocess.PIPE, text=True) as host:
        try:
            assert host.stdout is not None
            port = int(host.stdout.readline())  # like the engine
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                answer = provider_pb2_grpc.ResourceProviderStub(channel).GetSchema(provider_pb2.GetSchemaRequest())
            yield json.loads(answer.schema)
        finally:
            host.kill()


def test_other_languages_are_offered_the_cluster(schema: dict[str, Any]) -> None:
    assert (schema["name"], schema["version"]) == ("ray-on-ecs", "0.0.0")
    [(token, component)] = schema["resources"].items()
    assert token == "ray-on-ecs:index:RayCluster"
    assert component["isComponent"] is True
    assert not component.get("requiredInputs")
    assert all(item.get("description") for item in component["inputProperties"].values())


def test_what_aws_is_asked_while_planning_is_plain(schema: dict[str, Any]) -> None:
    inputs = schema["resources"]["ray-on-ecs:index:RayCluster"]["inputProperties"]
    assert len(inputs) == len(defaults())

    def is_plain(argument: dict[str, Any]) -> bool:
        return bool(argument.get("plain")) and all(
            part.get("plain") for part in (argument.get("items"), argument.get("additionalProperties")) if part
        )

    assert {name for name, argument in inputs.items() if not is_plain(argument)} == {
        *("vpcId", "subnetIds", "imageUri", "registrySecretArn", "bucketName", "dataBuckets", "jobSecrets", "tags"),
        *("permissionsBoundary", "taskPolicyArns", "instancePolicyArns", "kmsKeyArn", "environment"),
    }


def test_its_outputs_are_the_stacks(schema: dict[str, Any]) -> None:
    outputs = schema["resources"]["ray-on-ecs:index:RayCluster"]["properties"]
    assert {"bucket", "headInstanceId", "trainCommand", "estimatedHourlyUsd", "connection"} <= outputs.keys()
    assert outputs["subnetIds"]["items"]["type"] == "string"
    assert outputs["taskRoleArns"]["additionalProperties"]["type"] == "string"
    assert outputs["connection"]["additionalProperties"]["$ref"] == "pulumi.json#/Any"
    assert all(item.get("description") for item in outputs.values())
