"""File systems of the nodes: commands that mount them, security group rules, and an FSx for Lustre file system."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pulumi
import pulumi_aws as aws

from infra.definitions.mounts import LustreFileSystem, Mounts, mount_all
from infra.types import NetworkRef, ResourceRef, SecurityOptions, in_zone
from ray_on_ecs.contract import FSX_MOUNT

# Lustre's servers also open connections to their clients.
# https://docs.aws.amazon.com/fsx/latest/LustreGuide/limit-access-security-groups.html
LUSTRE_PORTS = ((988, 988), (1018, 1023))
NFS_PORTS = ((2049, 2049),)
# Its price is in infra/config/idle_cost.py.
DEPLOYMENT, MBPS_PER_TIB = "PERSISTENT_2", 125


@dataclass(frozen=True, kw_only=True)
class FileSystemsArgs:
    """Inputs of FileSystems.

    Attributes:
        mounts: Existing file systems.
        lustre_group_id: Security group of the existing one of FSx.
        efs_group_ids: Security groups of the mount targets of EFS.
        lustre_gib: Capacity of a new file system of FSx, in `zone`, or 0.
        bucket: The stack's bucket, to which a new file system is linked.
    """

    mounts: Mounts
    lustre_group_id: str = ""
    efs_group_ids: tuple[str, ...] = ()
    lustre_gib: int = 0
    vpc_id: pulumi.Input[str]
    network: NetworkRef
    bucket: ResourceRef
    security: SecurityOptions = field(default_factory=SecurityOptions)


class FileSystems(pulumi.ComponentResource):
    """Rules that admit the instances to file systems and Lustre's servers to the instances; a new file system of FSx.

    Rules are added to the security groups of existing file systems, and deleted with the stack.
    """

    commands: pulumi.Output[str]

    def __init__(self, name: str, args: FileSystemsArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("ray-on-ecs:infra:FileSystems", name, None, opts)
        instances = args.network.instances_group_id
        self.commands = pulumi.Output.from_input(mount_all(args.mounts))
        if args.lustre_gib:
            self.commands = self._new_lustre(name, args)
        elif args.lustre_group_id:
            self._admit_lustre(name, args.lustre_group_id, instances)
        for group_id in args.efs_group_ids:
            self._admit(f"{name}-efs-{group_id}", group_id, instances, NFS_PORTS)
        self.register_outputs({})

    def _new_lustre(self, name: str, args: FileSystemsArgs) -> pulumi.Output[str]:
        """File system whose files are those of the bucket's prefix, and are stored there when they change.

        https://docs.aws.amazon.com/fsx/latest/LustreGuide/create-dra-linked-data-repo.html
        """
        child = pulumi.ResourceOptions(parent=self)
        # The provider would wait for half an hour, and for ten minutes for the link.
        hours = pulumi.CustomTimeouts(create="1h", update="1h", delete="1h")
        group = aws.ec2.SecurityGroup(
            f"{name}-lustre-group", description="FSx for Lustre: Ray instances", vpc_id=args.vpc_id, opts=child
        )
        servers = self._admit(f"{name}-lustre-servers", group.id, group.id, LUSTRE_PORTS)
        egress = aws.vpc.SecurityGroupEgressRule(
            f"{name}-lustre-egress",
            description="Lustre clients",
            security_group_id=group.id,
            cidr_ipv4="0.0.0.0/0",
            ip_protocol="-1",
            opts=child,
        )
        self._admit_lustre(name, group.id, args.network.instances_group_id)
        made = aws.fsx.LustreFileSystem(
            f"{name}-lustre",
            storage_capacity=args.lustre_gib,
            subnet_ids=in_zone(args.network.subnets, args.network.zone),
            security_group_ids=[group.id],
            deployment_type=DEPLOYMENT,
            per_unit_storage_throughput=MBPS_PER_TIB,
            file_system_type_version="2.15",
            data_compression_type="LZ4",
            kms_key_id=args.security.kms_key_arn or None,
            opts=pulumi.ResourceOptions(
                parent=self,
                custom_timeouts=hours,
                # FSx refuses a security group in which its servers don't reach each other (InvalidNetworkSettings).
                # https://docs.aws.amazon.com/fsx/latest/APIReference/API_CreateFileSystem.html
                depends_on=[*servers, egress],
                # Another zone or key would replace a file system in use, with what is not exported yet.
                ignore_changes=["subnetIds", "kmsKeyId"],
            ),
        )
        changes = ["NEW", "CHANGED", "DELETED"]
        aws.fsx.DataRepositoryAssociation(
            f"{name}-lustre-bucket",
            file_system_id=made.id,
            file_system_path="/",
            data_repository_path=pulumi.Output.concat("s3://", args.bucket.name, "/", FSX_MOUNT),
            batch_import_meta_data_on_create=True,
            s3={"auto_import_policy": {"events": changes}, "auto_export_policy": {"events": changes}},
            opts=pulumi.ResourceOptions(parent=self, custom_timeouts=hours),
        )
        names = pulumi.Output.all(dns_name=made.dns_name, mount_name=made.mount_name)
        return names.apply(lambda names: mount_all(replace(args.mounts, lustre=LustreFileSystem(**names, is_new=True))))

    def _admit_lustre(self, name: str, group_id: pulumi.Input[str], instances: pulumi.Input[str]) -> None:
        self._admit(f"{name}-lustre", group_id, instances, LUSTRE_PORTS)
        self._admit(f"{name}-instances-lustre", instances, group_id, LUSTRE_PORTS)

    def _admit(
        self, name: str, group_id: pulumi.Input[str], source_id: pulumi.Input[str], ports: tuple[tuple[int, int], ...]
    ) -> list[pulumi.Resource]:
        return [
            aws.vpc.SecurityGroupIngressRule(
                f"{name}-{first}",
                security_group_id=group_id,
                referenced_security_group_id=source_id,
                ip_protocol="tcp",
                from_port=first,
                to_port=last,
                opts=pulumi.ResourceOptions(parent=self),
            )
            for first, last in ports
        ]
