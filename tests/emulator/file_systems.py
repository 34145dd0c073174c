"""A VPC with file systems of FSx and EFS in the emulated account, and what moto lacks of FSx for Lustre."""

from __future__ import annotations

import json
import uuid
from typing import Any
from unittest import mock

import boto3
from moto.ec2.models import subnets, vpcs
from moto.efs.models import EFSBackend, efs_backends
from moto.fsx.models import FileSystem, fsx_backends
from moto.fsx.responses import FSxResponse

from tests.emulator.monitor import ACCOUNT

# IDs for --config, as in `--config vpcId=vpc-0a0b0c0d --config subnetIds=subnet-0a0b0c0d`.
VPC, SUBNET, LUSTRE, EFS = "vpc-0a0b0c0d", "subnet-0a0b0c0d", "fs-0a0b0c0d", "fs-0e0f0a0b"
BUCKET = "my-data"


def create(region: str) -> None:
    """Create a bucket with data, and the VPC with a subnet in the first zone and the file systems there."""
    boto3.client("s3").create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": region})
    ec2 = boto3.client("ec2")
    ec2.describe_vpcs()  # moto creates the default VPC now, and not with the IDs below
    fixed = mock.patch.object
    with fixed(vpcs, "random_vpc_id", lambda: VPC), fixed(subnets, "random_subnet_id", lambda: SUBNET):
        ec2.create_vpc(CidrBlock="10.9.0.0/16")
        ec2.create_subnet(VpcId=VPC, CidrBlock="10.9.0.0/20", AvailabilityZone=f"{region}a")
    for attribute in ("EnableDnsSupport", "EnableDnsHostnames"):
        ec2.modify_vpc_attribute(VpcId=VPC, **{attribute: {"Value": True}})
    efs: EFSBackend = efs_backends[ACCOUNT][region]
    file_system = boto3.client("efs").create_file_system(CreationToken="emulator")["FileSystemId"]
    efs.file_systems_by_id[EFS] = efs.file_systems_by_id.pop(file_system)
    efs.file_systems_by_id[EFS].file_system_id = EFS
    boto3.client("efs").create_mount_target(FileSystemId=EFS, SubnetId=SUBNET)
    fsx = fsx_backends[ACCOUNT][region]
    file_system = boto3.client("fsx").create_file_system(
        FileSystemType="LUSTRE",
        StorageCapacity=1200,
        SubnetIds=[SUBNET],
        LustreConfiguration={"DeploymentType": "PERSISTENT_2", "PerUnitStorageThroughput": 125},
    )["FileSystem"]["FileSystemId"]
    fsx.file_systems[LUSTRE] = fsx.file_systems.pop(file_system)
    fsx.file_systems[LUSTRE].file_system_id = LUSTRE


_to_dict = FileSystem.to_dict


def _described(self: Any) -> dict[str, Any]:
    """Description of a file system, with the network interface and the states that moto leaves out."""
    ec2 = boto3.client("ec2")
    [subnet] = ec2.describe_subnets(SubnetIds=self.subnet_ids[:1])["Subnets"]
    if not hasattr(self, "interface"):
        groups = {"Groups": self.security_group_ids} if self.security_group_ids else {}
        interface = ec2.create_network_interface(SubnetId=subnet["SubnetId"], **groups)
        self.interface = interface["NetworkInterface"]["NetworkInterfaceId"]
    lustre = {"MountName": "abcdefgh", "WeeklyMaintenanceStartTime": "1:00:00", **(self.lustre_configuration or {})}
    return {
        **_to_dict(self),
        "Lifecycle": "AVAILABLE",
        "VpcId": subnet["VpcId"],
        "OwnerId": ACCOUNT,
        "CreationTime": 1.8e9,
        "FileSystemTypeVersion": "2.15",
        "StorageType": "SSD",
        "NetworkInterfaceIds": [self.interface],
        "LustreConfiguration": lustre,
    }


def _not_found(original: Any) -> Any:
    def describe(self: Any) -> Any:
        answer = json.loads(original(self))
        if not answer["FileSystems"]:
            error = {"__type": "FileSystemNotFound", "message": "File system does not exist."}
            return 400, {"status": 400, "x-amzn-errortype": "FileSystemNotFound"}, json.dumps(error)
        return json.dumps(answer)

    return describe


def _delete(original: Any) -> Any:
    def delete(self: Any) -> Any:
        found = self.fsx_backend.file_systems.get(json.loads(self.body)["FileSystemId"])
        if found and hasattr(found, "interface"):
            boto3.client("ec2").delete_network_interface(NetworkInterfaceId=found.interface)
        return original(self)

    return delete


_ASSOCIATIONS: dict[str, dict[str, Any]] = {}


def _create_association(self: Any) -> str:
    asked = json.loads(self.body)
    name = f"dra-{uuid.uuid4().hex[:17]}"
    arn = f"arn:aws:fsx:{self.region}:{ACCOUNT}:association/{asked['FileSystemId']}/{name}"
    kept = ("FileSystemId", "FileSystemPath", "DataRepositoryPath", "S3", "BatchImportMetaDataOnCreate", "Tags")
    _ASSOCIATIONS[name] = {
        **{key: asked[key] for key in kept if key in asked},
        **{"AssociationId": name, "ResourceARN": arn, "Lifecycle": "AVAILABLE", "ImportedFileChunkSize": 1024},
    }
    self.fsx_backend.tagger.tag_resource(arn, asked.get("Tags", []))
    return json.dumps({"Association": _ASSOCIATIONS[name]})


def _describe_associations(self: Any) -> str:
    names = json.loads(self.body).get("AssociationIds") or list(_ASSOCIATIONS)
    return json.dumps({"Associations": [_ASSOCIATIONS[name] for name in names if name in _ASSOCIATIONS]})


def _delete_association(self: Any) -> str:
    return json.dumps({**_ASSOCIATIONS.pop(json.loads(self.body)["AssociationId"]), "Lifecycle": "DELETING"})


for _name, _function in {
    "create_data_repository_association": _create_association,
    "describe_data_repository_associations": _describe_associations,
    "delete_data_repository_association": _delete_association,
    "describe_file_systems": _not_found(FSxResponse.describe_file_systems),
    "delete_file_system": _delete(FSxResponse.delete_file_system),
}.items():
    setattr(FSxResponse, _name, _function)
FileSystem.to_dict = _described  # type: ignore[method-assign]
