"""File systems of the nodes: look-ups, security group rules, a new FSx for Lustre, and the instances' permissions."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from infra.config import RayClusterArgs, file_systems
from infra.config.file_systems import FileSystemPlan
from infra.definitions.mounts import LustreFileSystem, Mounts
from infra.errors import SettingError
from infra.tags import tags
from infra.types import Location
from tests.infra.fake_aws import ACCOUNT, REGION, Cloud, node_spec
from tests.infra.fake_file_systems import EFS, GOOD, LUSTRE, VPC, FakeFileSystems
from tests.infra.stacks import KEY, deployed

NETWORK: dict[str, Any] = {"vpc_id": VPC, "subnet_ids": ("subnet-0c2d",)}
LOCATION = Location(
    partition="aws", account=ACCOUNT, region=REGION, zones=("us-west-2b",), worker_zones=("us-west-2b",)
)


def look_up(
    monkeypatch: pytest.MonkeyPatch, *zones: str, answers: dict[str, Any] | None = None, **settings: Any
) -> FileSystemPlan:
    """Look up the file systems of these settings, for nodes in these zones."""
    monkeypatch.setattr(file_systems, "client", FakeFileSystems(answers or {}).client)
    nodes = {zone: node_spec(zones=(zone,)) for zone in zones or ("us-west-2b",)}
    return file_systems.look_up(RayClusterArgs(**{**NETWORK, **settings}), "ray", LOCATION, nodes)


def test_existing_file_systems_are_mounted(cloud: Cloud, monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    plan = cloud.run(lambda: look_up(monkeypatch, fsx_lustre=LUSTRE, efs=EFS, mounts={"data": "s3://my-data/faces"}))
    lustre = LustreFileSystem(dns_name=GOOD["fsx"]["DNSName"], mount_name="abcdefgh")
    assert plan.mounts == Mounts(s3={"data": "my-data/faces"}, lustre=lustre, efs=EFS)
    assert (plan.lustre_group_id, plan.efs_group_ids) == ("sg-fsx", ("sg-efs",))
    assert not warnings


@pytest.mark.parametrize("order", [1, -1])
def test_order_of_security_groups_changes_no_rule(cloud: Cloud, monkeypatch: pytest.MonkeyPatch, order: int) -> None:
    groups = [{"GroupId": "sg-a"}, {"GroupId": "sg-b"}][::order]
    interfaces = [{**interface, "Groups": groups} for interface in GOOD["interfaces"]]
    answers = {"interfaces": interfaces}
    plan = cloud.run(lambda: look_up(monkeypatch, answers=answers, fsx_lustre=LUSTRE, efs=EFS))
    assert (plan.lustre_group_id, plan.efs_group_ids) == ("sg-a", ("sg-a",))


def test_rules_of_efs_have_their_groups_names() -> None:
    assert "file-systems-efs-sg-efs-2049" in deployed("existing network and image").resources


TARGET = GOOD["targets"][0]
UNFIT: list[tuple[str, dict[str, Any], str]] = [
    ("fsx_lustre", {"fsx": {"FileSystemType": kind}}, f"is of type {kind}; use one of FSx for Lustre")
    for kind in ("WINDOWS", "ONTAP", "OPENZFS")
]
UNFIT += [
    ("fsx_lustre", {"fsx": {"Lifecycle": state}}, f"is {state}; wait for it, or use another")
    for state in ("CREATING", "FAILED", "DELETING", "MISCONFIGURED", "MISCONFIGURED_UNAVAILABLE")
]
UNFIT += [
    ("efs", {"efs": {"LifeCycleState": state}}, f"is {state}; wait for it, or use another")
    for state in ("creating", "deleting", "deleted", "error")
]
UNFIT += [
    ("fsx_lustre", {"fsx": {"VpcId": "vpc-2"}}, f"is in vpc-2; use one in {VPC}"),
    ("fsx_lustre", {"fsx": {"NetworkInterfaceIds": []}}, "has no network interface with a security group"),
    ("fsx_lustre", {"fsx": "FileSystemNotFound"}, "could not be found"),
    ("fsx_lustre", {"fsx": "AccessDeniedException"}, "(fsx:DescribeFileSystems and "),
    ("fsx_lustre", {"interfaces": "UnauthorizedOperation"}, " and ec2:DescribeNetworkInterfaces: "),
    (
        "efs",
        {"efs": {"AvailabilityZoneName": "us-west-2a"}},
        "is One Zone storage in us-west-2a; let availability_zones",
    ),
    ("efs", {"targets": []}, "has no mount target; create one in each zone of the nodes (us-west-2b)"),
    ("efs", {"targets": [{**TARGET, "VpcId": "vpc-2"}]}, f"is in vpc-2; use one in {VPC}"),
    (
        "efs",
        {"targets": [{**TARGET, "AvailabilityZoneName": "us-west-2a"}]},
        "has available mount targets only in us-west-2a",
    ),
    ("efs", {"targets": [{**TARGET, "LifeCycleState": "creating"}]}, "create one in us-west-2b, too"),
    ("efs", {"efs": "FileSystemNotFound"}, "could not be found"),
    ("efs", {"efs": "AccessDeniedException"}, "(elasticfilesystem:DescribeFileSystems, "),
    ("efs", {"targets": "AccessDeniedException"}, ", elasticfilesystem:DescribeMountTargets and "),
    ("efs", {"interfaces": "UnauthorizedOperation"}, " and ec2:DescribeNetworkInterfaces: "),
]


@pytest.mark.parametrize(("field", "answers", "words"), UNFIT)
def test_unfit_file_system_is_refused(
    monkeypatch: pytest.MonkeyPatch, field: str, answers: dict[str, Any], words: str
) -> None:
    name = {"fsx_lustre": LUSTRE, "efs": EFS}[field]
    with pytest.raises(SettingError, match=f"^{field}: '{name}' ") as refused:
        look_up(monkeypatch, answers=answers, **{field: name})
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_lustre_in_another_zone_is_named(monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    look_up(monkeypatch, "us-west-2a", "us-west-2b", fsx_lustre=LUSTRE)
    [line] = warnings
    assert "is in us-west-2b, and the nodes in us-west-2a or us-west-2b: traffic between zones is charged" in line
    assert "; set availability_zones, or the zones of the pools, to that zone" in line


def own(capacity: int, name: str = "ray-file-systems-lustre") -> dict[str, Any]:
    """A file system that a stack has made."""
    return {"StorageCapacity": capacity, "Tags": [{"Key": key, "Value": value} for key, value in tags(name).items()]}


def test_new_lustre_does_not_shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    file_systems = [{"StorageCapacity": 9600}, own(4800), own(7200, "other-file-systems-lustre")]
    for gib in (4800, 7200):
        look_up(monkeypatch, answers={"made": file_systems}, fsx_lustre_gib=gib)
    for gib in (1200, 2400):
        with pytest.raises(SettingError, match=f"^fsx_lustre_gib: '{gib}' is less than the 4800 of"):
            look_up(monkeypatch, answers={"made": file_systems}, fsx_lustre_gib=gib)


def test_key_of_the_linked_bucket_is_named(monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    look_up(monkeypatch, fsx_lustre_gib=1200, kms_key_arn=KEY)
    [line] = warnings
    assert (
        "only if the policy of kms_key_arn admits AWSServiceRoleForFSxS3Access_fs-*; add the statement of docs" in line
    )


def test_efs_needs_a_target_in_each_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match="create one in us-west-2a and us-west-2b, too"):
        look_up(monkeypatch, "us-west-2a", "us-west-2b", efs=EFS)


def rules(cloud: Cloud) -> set[tuple[str, str, int, int]]:
    """Rules of file systems: the group that admits, the admitted one, and the ports."""
    rules = [
        resource.inputs
        for name, resource in cloud.resources.items()
        if name.startswith("file-systems-") and resource.type.endswith("IngressRule")
    ]
    keys = ("securityGroupId", "referencedSecurityGroupId", "fromPort", "toPort")
    return {tuple(rule[key] for key in keys) for rule in rules}


def group(cloud: Cloud, name: str) -> str:
    """ID of a security group of the stack."""
    return f"{cloud.resources[name].name}-id"


def test_rules_admit_instances_to_existing_file_systems() -> None:
    cloud = deployed("existing network and image")
    instances = group(cloud, "network-instances-group")
    lustre = {(988, 988), (1018, 1023)}
    assert rules(cloud) == {
        *(("sg-fsx", instances, *ports) for ports in lustre),
        *((instances, "sg-fsx", *ports) for ports in lustre),
        ("sg-efs", instances, 2049, 2049),
    }


def test_new_lustre_waits_for_its_servers_rules() -> None:
    needed = deployed("large workers").needs("file-systems-lustre")
    assert {f"file-systems-lustre-{rule}" for rule in ("servers-988", "servers-1018", "egress")} <= needed


def test_new_lustre_is_linked_to_the_bucket() -> None:
    cloud = deployed("large workers")
    lustre, link = cloud.resources["file-systems-lustre"], cloud.resources["file-systems-lustre-bucket"].inputs
    assert lustre.inputs["storageCapacity"] == 1200
    assert lustre.inputs["securityGroupIds"] == [group(cloud, "file-systems-lustre-group")]
    assert link["dataRepositoryPath"] == "s3://training-bucket/fsx"
    assert link["fileSystemPath"] == "/"
    for policy in ("autoImportPolicy", "autoExportPolicy"):
        assert link["s3"][policy]["events"] == ["NEW", "CHANGED", "DELETED"]
    servers, instances = group(cloud, "file-systems-lustre-group"), group(cloud, "network-instances-group")
    pairs = {(admits, admitted) for admits, admitted, *_ in rules(cloud)}
    assert pairs == {(servers, servers), (servers, instances), (instances, servers)}
    assert "FSx for Lustre 174.00" in cloud.exports["idle_cost"]


def user_data_of(cloud: Cloud, kind: str) -> str:
    """User data of one kind of node."""
    return base64.b64decode(cloud.resources[f"{kind}-template"].inputs["userData"]).decode()


@pytest.mark.parametrize("kind", ["head", "workers"])
def test_all_kinds_of_nodes_mount(kind: str) -> None:
    text = user_data_of(deployed("existing network and image"), kind)
    assert "--prefix faces/" in text
    assert f"{LUSTRE}.fsx.us-west-2.amazonaws.com@tcp:/abcdefgh" in text
    assert f"{EFS}:/" in text


@pytest.mark.parametrize("kind", ["head", "workers"])
def test_instances_read_the_mounted_prefix_alone(kind: str) -> None:
    cloud = deployed("existing network and image")
    policy = json.loads(cloud.resources[f"{kind}-instance-mounts"].inputs["policy"])
    actions = [statement["Action"] for statement in policy["Statement"]]
    of_efs = ["elasticfilesystem:ClientMount", "elasticfilesystem:ClientWrite"]
    assert actions == [["s3:GetObject"], ["s3:ListBucket"], ["kms:Decrypt"], of_efs]
    objects, listing, _, efs = policy["Statement"]
    assert efs["Resource"] == f"arn:aws:elasticfilesystem:{REGION}:{ACCOUNT}:file-system/{EFS}"
    assert objects["Resource"] == ["arn:aws:s3:::my-data/faces", "arn:aws:s3:::my-data/faces/*"]
    assert listing["Condition"] == {"StringLikeIfExists": {"s3:prefix": ["faces", "faces/*"]}}
    assert f"{kind}-instance-mounts" in cloud.needs(f"{kind}-group")


@pytest.mark.parametrize(("name", "number"), [("existing network and image", 1), ("large workers", 1), ("default", 0)])
def test_tasks_of_stacks_with_mounts_have_their_folder(name: str, number: int) -> None:
    folder = {"name": "mounts", "hostPath": "/mnt/ray-on-ecs"}
    mount = {"sourceVolume": "mounts", "containerPath": "/mnt"}
    tasks = [
        resource.inputs for resource in deployed(name).resources.values() if "containerDefinitions" in resource.inputs
    ]
    containers = [container for task in tasks for container in json.loads(task["containerDefinitions"])]
    assert [task["volumes"].count(folder) for task in tasks] == [number] * len(tasks)
    assert [container["mountPoints"].count(mount) for container in containers] == [number] * len(tasks)
    assert len(tasks) > 1


def test_stack_without_mounts_has_none() -> None:
    cloud = deployed("default")
    assert not [name for name in cloud.resources if "mounts" in name or "file-systems" in name]
    assert "ray-on-ecs-mounts" not in user_data_of(cloud, "head")
