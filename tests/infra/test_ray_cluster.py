"""The cluster as a component: in programs of others, two in one, and in other languages."""

from __future__ import annotations

import dataclasses
import json
import runpy
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import grpc
import pulumi
import pytest
from pulumi.runtime.proto import provider_pb2, provider_pb2_grpc

from infra.config.settings import Settings
from infra.ray_cluster import RayCluster, RayClusterArgs
from tests.infra.fake_aws import Cloud

ROOT = Path(__file__).parents[2]
IMAGE = "public.example/ray@sha256:" + "a" * 64


def test_two_in_one_program_do_not_collide(cloud: Cloud) -> None:
    def program() -> None:
        for name in ("vision", "language"):
            cpu_workers: RayClusterArgs = {"cpu_worker_instance_types": ["c6i.large"], "cpu_worker_count": 1}
            RayCluster(name, {**cpu_workers, "image_uri": IMAGE, "min_workers": 0, "tags": {"team": name}})

    cloud.run(program)  # refuses two resources of one name and type
    parts = [made for made in cloud.resources.values() if made.type.startswith("aws")]
    of = {name: [each for each in parts if each.name.startswith(f"{name}-")] for name in ("vision", "language")}
    assert len(of["vision"]) == len(of["language"]) == len(parts) / 2, "one would take the other's"
    tagged = [each for each in of["vision"] if isinstance(each.inputs.get("tags"), dict)]
    assert {each.inputs["tags"]["team"] for each in tagged} == {"vision"}, "each has its own tags"
    hosts = [
        each.inputs["name"] for each in cloud.of_type("aws:servicediscovery/privateDnsNamespace:PrivateDnsNamespace")
    ]
    assert hosts == ["vision-ray-dev-c0ffee.internal", "language-ray-dev-c0ffee.internal"]


def given_network(zones: list[str]) -> RayClusterArgs:
    """A VPC that the same program makes."""
    subnets: list[pulumi.Input[str]] = [pulumi.Output.from_input(f"subnet-{letter}") for letter in "ab"]
    return {
        "vpc_id": pulumi.Output.from_input("vpc-new"),
        "subnet_ids": subnets,
        "availability_zones": zones,
        "image_uri": IMAGE,
    }


def test_a_network_of_the_same_program_is_asked_nothing(cloud: Cloud) -> None:
    cloud.run(lambda: RayCluster("vision", given_network(["us-west-2a", "us-west-2b"])))
    asked = {token.rpartition(":")[2] for token, _ in cloud.calls}
    assert asked.isdisjoint({"getVpc", "getSubnet"}), "it is not there yet"
    assert cloud.resources["vision-workers-group"].inputs["vpcZoneIdentifiers"] == ["subnet-a"]
    assert cloud.resources["vision-network-tasks-group"].inputs["vpcId"] == "vpc-new"
    assert not cloud.of_type("awsx:ec2:Vpc"), "there is one"


@pytest.mark.parametrize(
    ("zones", "line"),
    [
        (["us-west-2a"], "availability_zones: us-west-2a for 2 subnet_ids of a VPC that the same program makes; give"),
        (["us-west-2a", "us-west-2z"], "subnetIds: 'us-west-2z' lies in us-west-2z, which does not offer"),
    ],
)
def test_zones_that_do_not_fit_the_subnets_are_refused(cloud: Cloud, zones: list[str], line: str) -> None:
    with pytest.raises(pulumi.RunError) as refused:
        cloud.run(lambda: RayCluster("vision", given_network(zones)))
    assert str(refused.value).startswith(line)
    assert cloud.resources == {}, "nothing is made"


def with_subnets(subnets: Any) -> Any:
    """The same VPC with other subnets."""
    return {**given_network(["us-west-2a"]), "subnet_ids": subnets}


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (lambda: {"worker_cout": 2}, "worker_cout: is no argument of RayCluster"),
        (lambda: with_subnets(pulumi.Output.from_input(["subnet-a"])), "subnet_ids: is an Output; give a list"),
        (
            lambda: {**given_network(["us-west-2a", "us-west-2b"]), "nat_gateway": False},
            "nat_gateway: False is of a VPC",
        ),
        (lambda: {"worker_count": -1}, "workerCount: -1 is below 0"),
    ],
)
def test_arguments_that_cannot_work_are_refused_in_one_line(cloud: Cloud, args: Any, line: str) -> None:
    with pytest.raises(pulumi.RunError) as refused:
        cloud.run(lambda: RayCluster("vision", args()))
    assert str(refused.value).startswith(line)
    assert cloud.resources == {}, "nothing is made"


def test_a_subnet_of_the_same_program_in_a_vpc_that_is_there_is_enough(cloud: Cloud) -> None:
    args = with_subnets([pulumi.Output.from_input("subnet-new")])
    cloud.run(lambda: RayCluster("vision", {**args, "vpc_id": "vpc-0a1b"}))
    assert cloud.resources["vision-workers-group"].inputs["vpcZoneIdentifiers"] == ["subnet-new"]


def test_two_default_clusters_in_one_program_have_other_names_throughout(cloud: Cloud) -> None:
    def program() -> None:
        RayCluster("vision", {})
        RayCluster("speech", {})

    cloud.run(program)
    builds = [made.inputs["imageName"] for made in cloud.of_type("awsx:ecr:Image")]
    assert builds == ["vision-image", "speech-image"]
    assert len(cloud.of_type("awsx:ec2:Vpc")) == 2


def test_numbers_of_other_languages_are_whole_again(cloud: Cloud) -> None:
    counts: Any = {"min_workers": 0.0, "max_workers": 4.0, "worker_count": 2.0, "max_hourly_usd": 99.0}
    cloud.run(lambda: RayCluster("vision", {"image_uri": IMAGE, **counts}) and None)
    train = cloud.resources["vision-sessions-train"].inputs["content"]
    assert "--num-workers 2 " in train, "Pulumi hands integers over as floats"


def test_the_providers_default_tags_reach_what_it_leaves_out(cloud: Cloud) -> None:
    cloud.config = {"aws:defaultTags": json.dumps({"tags": {"team": "vision", "ray-on-ecs:stack": "theirs"}})}
    cloud.run(lambda: RayCluster("vision", {"image_uri": IMAGE}))
    group = [(tag["key"], tag["value"]) for tag in cloud.resources["vision-workers-group"].inputs["tags"]]
    assert ("team", "vision") in group, "the AWS provider leaves groups out"
    assert [value for key, value in group if key == "ray-on-ecs:stack"] == ["dev"], (
        "of two tags of one key AWS refuses one"
    )
    [instance, *_] = cloud.resources["vision-workers-template"].inputs["tagSpecifications"]
    assert instance["tags"] == {
        "Name": "dev-vision-workers-instance",
        "ray-on-ecs:project": "ray-on-ecs",
        "ray-on-ecs:stack": "dev",
        "team": "vision",
    }
    assert "team" not in cloud.resources["vision-storage-bucket"].inputs["tags"], "the provider adds them itself"


def test_another_provider_is_refused(cloud: Cloud) -> None:
    def program() -> None:
        other = pulumi.ProviderResource("aws", "other", {})
        RayCluster("vision", {"image_uri": IMAGE}, pulumi.ResourceOptions(providers={"aws": other}))

    with pytest.raises(pulumi.RunError, match=r"^vision: .* the default AWS provider"):
        cloud.run(program)


def test_the_example_makes_a_vpc_and_a_cluster_in_it(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ROOT / "examples" / "own_vpc"
    exported: dict[str, Any] = {}
    monkeypatch.setattr(pulumi, "export", exported.__setitem__)
    monkeypatch.chdir(folder)
    cloud.run(lambda: runpy.run_path(str(folder / "__main__.py")) and None)
    vpc = cloud.resources["company"].inputs
    assert vpc["vpcEndpointStrategy"] == "Auto", "S3's endpoint would be attached to no route table"
    assert vpc["availabilityZoneNames"] == ["us-west-2a", "us-west-2b"]
    group = cloud.resources["vision-workers-group"].inputs
    assert group["vpcZoneIdentifiers"] == ["subnet-private-us-west-2a"]
    build = cloud.resources["vision-image-build"].inputs
    assert (folder / build["dockerfile"]).is_file(), "awsx builds from the program's folder"
    assert cloud.value(exported["bucket"]) == "training-bucket"


def test_the_example_takes_the_zones_that_there_are(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud.zones = ("us-west-2b", "us-west-2d", "us-west-2-lax-1a")
    folder = ROOT / "examples" / "own_vpc"
    monkeypatch.chdir(folder)
    cloud.run(lambda: runpy.run_path(str(folder / "__main__.py")) and None)
    assert cloud.resources["company"].inputs["availabilityZoneNames"] == ["us-west-2b", "us-west-2d"]


@pytest.fixture(scope="module")
def schema() -> Generator[dict[str, Any]]:
    """What the hosted component tells Pulumi of itself."""
    command = [sys.executable, str(ROOT / "component" / "__main__.py"), "127.0.0.1:1"]
    with subprocess.Popen(command, cwd=ROOT / "component", stdout=subprocess.PIPE, text=True) as host:
        try:
            assert host.stdout is not None
            port = int(host.stdout.readline())  # the engine, too, reads it there
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                answer = provider_pb2_grpc.ResourceProviderStub(channel).GetSchema(provider_pb2.GetSchemaRequest())
            yield json.loads(answer.schema)
        finally:
            host.kill()


def test_other_languages_are_offered_the_cluster(schema: dict[str, Any]) -> None:
    assert schema["name"] == "ray-on-ecs"
    [(token, component)] = schema["resources"].items()
    assert token == "ray-on-ecs:index:RayCluster"
    assert component["isComponent"] is True
    assert not component.get("requiredInputs"), "every argument has a default"
    assert all(each.get("description") for each in component["inputProperties"].values()), "people read these"


def test_what_aws_is_asked_while_planning_is_plain(schema: dict[str, Any]) -> None:
    inputs = schema["resources"]["ray-on-ecs:index:RayCluster"]["inputProperties"]
    assert len(inputs) == len(dataclasses.fields(Settings))
    later = {name for name, each in inputs.items() if not each.get("plain") or not each.get("items", each).get("plain")}
    assert later == {"vpcId", "subnetIds"}, "an Input is known too late to be asked about"
    assert inputs["workerInstanceTypes"]["items"]["type"] == "string"
    assert inputs["tags"]["additionalProperties"]["type"] == "string"


def test_its_outputs_are_the_stacks(schema: dict[str, Any]) -> None:
    outputs = schema["resources"]["ray-on-ecs:index:RayCluster"]["properties"]
    assert {"bucket", "headInstanceId", "trainCommand", "estimatedHourlyUsd", "connection"} <= outputs.keys()
    assert outputs["connection"]["additionalProperties"]["$ref"] == "pulumi.json#/Any"
    assert all(each.get("description") for each in outputs.values())
