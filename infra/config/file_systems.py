"""File systems of FSx for Lustre and EFS: AWS's answers by boto3, as the provider has no data source for them.

https://docs.aws.amazon.com/fsx/latest/APIReference/API_DescribeFileSystems.html
https://docs.aws.amazon.com/efs/latest/ug/API_DescribeMountTargets.html
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from infra.config import lookup_rules as rules
from infra.config.clients import client
from infra.config.lookups import REFUSE, Options, Question, ask_all
from infra.definitions.mounts import LustreFileSystem, Mounts
from infra.errors import warn
from infra.tags import tags
from infra.types import Location, NodeSpec, known

if TYPE_CHECKING:
    from infra.config.args import RayClusterArgs


# IAM actions of both look-ups.
INTERFACES, OF_EFS = "ec2:DescribeNetworkInterfaces", "elasticfilesystem:"


@dataclass(frozen=True, kw_only=True)
class FileSystemPlan:
    """File systems of the nodes, and security groups that have to admit the instances to the existing ones."""

    mounts: Mounts = field(default_factory=Mounts)
    lustre_group_id: str = ""
    efs_group_ids: tuple[str, ...] = ()


def look_up(
    args: RayClusterArgs, prefix: str, location: Location, nodes: Mapping[str, NodeSpec], opts: Options = None
) -> FileSystemPlan:
    """Look up the file systems that settings name, and the stack's own; SettingError if one is unfit."""
    if args.fsx_lustre_gib and args.kms_key_arn and not args.bucket_name:
        warn(
            "fsx_lustre_gib: FSx can read and write the bucket only if the policy of kms_key_arn admits "
            f"{rules.LINK_ROLE}; {rules.STATEMENT}"
        )
    zones = {zone for node in nodes.values() for zone in node.zones if node.max_count} or {*location.worker_zones}
    answers = ask_all([*_questions(args, location, zones), *_own(args, prefix, location)], opts)
    lustre = next(answers) if args.fsx_lustre else None
    efs = next(answers) if args.efs else None
    s3 = {name: address.removeprefix("s3://") for name, address in sorted(args.mounts.items())}
    if args.fsx_lustre_gib:
        next(answers)
    found = LustreFileSystem(dns_name=lustre.dns_name, mount_name=lustre.mount_name) if lustre else None
    return FileSystemPlan(
        mounts=Mounts(s3=s3, lustre=found, efs=args.efs),
        lustre_group_id=min(lustre.group_ids) if lustre else "",
        efs_group_ids=tuple(sorted({*efs.group_ids})) if efs else (),
    )


def _questions(args: RayClusterArgs, location: Location, zones: set[str]) -> Iterator[Question]:
    vpc_id = known(args.vpc_id)
    efs = rules.efs(vpc_id, zones)
    asked: dict[str, tuple[str, Any, Any]] = {
        "fsx_lustre": (f"fsx:DescribeFileSystems and {INTERFACES}", _lustre, rules.lustre(vpc_id, zones)),
        "efs": (f"{OF_EFS}DescribeFileSystems, {OF_EFS}DescribeMountTargets and {INTERFACES}", _efs, efs),
    }
    for name, (action, ask, conditions) in asked.items():
        if file_system := getattr(args, name):
            call, hint = partial(ask, file_system, location.region), f"use one of this account in {location.region}"
            yield Question(name, file_system, action, call, conditions, hint, denied=REFUSE)


def _own(args: RayClusterArgs, prefix: str, location: Location) -> Iterator[Question]:
    """Question for the file system that the stack has made."""
    if gib := args.fsx_lustre_gib:
        call = partial(_made, tags(f"{prefix}-file-systems-lustre"), location.region)
        yield Question("fsx_lustre_gib", str(gib), "fsx:DescribeFileSystems", call, rules.own_lustre(gib))


def _made(own_tags: Mapping[str, str], region: str, opts: Options) -> SimpleNamespace:
    pages = client("fsx", region).get_paginator("describe_file_systems").paginate()
    made = [each for page in pages for each in page["FileSystems"] if own_tags.items() <= _tags(each).items()]
    return SimpleNamespace(capacity=max((each["StorageCapacity"] for each in made), default=None))


def _tags(file_system: Mapping[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in file_system.get("Tags", ())}


def _lustre(file_system: str, region: str, opts: Options) -> SimpleNamespace:
    [found] = client("fsx", region).describe_file_systems(FileSystemIds=[file_system])["FileSystems"]
    interfaces = _interfaces(region, found.get("NetworkInterfaceIds", []))
    return SimpleNamespace(
        kind=found["FileSystemType"],
        lifecycle=found["Lifecycle"],
        vpc_id=found["VpcId"],
        dns_name=found.get("DNSName", ""),
        mount_name=found.get("LustreConfiguration", {}).get("MountName", ""),
        zones=sorted({each["AvailabilityZone"] for each in interfaces}),
        group_ids=[group["GroupId"] for each in interfaces for group in each["Groups"]],
    )


def _efs(file_system: str, region: str, opts: Options) -> SimpleNamespace:
    efs = client("efs", region)
    [found] = efs.describe_file_systems(FileSystemId=file_system)["FileSystems"]
    targets = efs.describe_mount_targets(FileSystemId=file_system)["MountTargets"]
    ids = [target["NetworkInterfaceId"] for target in targets]
    return SimpleNamespace(
        lifecycle=found["LifeCycleState"],
        one_zone=found.get("AvailabilityZoneName"),
        vpc_id=targets[0]["VpcId"] if targets else None,
        zones=sorted(each["AvailabilityZoneName"] for each in targets if each["LifeCycleState"] == "available"),
        group_ids=[min(group["GroupId"] for group in each["Groups"]) for each in _interfaces(region, ids)],
    )


def _interfaces(region: str, ids: list[str]) -> list[Any]:
    """Network interfaces, which tell the zones of FSx, and the security groups of both."""
    if not ids:
        return []
    return client("ec2", region).describe_network_interfaces(NetworkInterfaceIds=ids)["NetworkInterfaces"]
