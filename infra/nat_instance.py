"""NAT instance: an Auto Scaling group of one, and the network interface to which the private subnets' route leads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pulumi
import pulumi_aws as aws

from infra.definitions import nat, policies
from infra.definitions.addresses import private_block
from infra.launch_template import launch_template
from infra.roles import AUTO_SCALING_ROLE, attach_policies, grant_disk_key, make_role
from infra.types import Location, ResourceRef, SecurityOptions


@dataclass(frozen=True, kw_only=True)
class NatInstanceArgs:
    """Inputs of NatInstance: `zone` is that of both subnets, and `internet` the route of the public one.

    The instance is in the public subnet, and the interface that the private subnets' route leads to in the private one.
    """

    vpc_id: pulumi.Input[str]
    cidr: str
    location: Location
    zone: pulumi.Input[str]
    public_subnet_id: pulumi.Input[str]
    private_subnet_id: pulumi.Input[str]
    internet: pulumi.Resource
    sleeps: bool
    security: SecurityOptions


class NatInstance(pulumi.ComponentResource):
    """Instance that attaches the interface when it boots, so that no role may change a route and no route changes.

    While there is none, as in a cluster that sleeps, the route is a black hole. Instances that start at the same time
    reach ECS when it is there, since the ECS agent tries again; a task is placed on none before.
    """

    interface_id: pulumi.Output[str]
    group: ResourceRef

    def __init__(self, name: str, args: NatInstanceArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("ray-on-ecs:infra:NatInstance", name, None, opts)
        self._child = pulumi.ResourceOptions(parent=self)
        group, rules = self._security_group(name, args)
        interface = aws.ec2.NetworkInterface(
            f"{name}-interface",
            subnet_id=args.private_subnet_id,
            security_groups=[group.id],
            description="Default route of the private subnets",
            # Forwarded packets are neither from its address nor to it.
            source_dest_check=False,
            # The instance attaches it, which `pulumi refresh` may see.
            opts=pulumi.ResourceOptions(parent=self, ignore_changes=["attachments"]),
        )
        self.interface_id = interface.id
        profile, needed = self._profile(name, args, interface)
        user_data = pulumi.Output.all(
            interface_id=interface.id,
            mac=interface.mac_address,
            address=interface.private_ip,
            subnet=pulumi.Output.from_input(args.zone).apply(lambda zone: private_block(args.cidr, zone)),
        ).apply(lambda values: nat.user_data(nat.PrivateInterface(**values, vpc=args.cidr)))
        template = launch_template(
            f"{name}-template",
            profile,
            image_id=nat.MACHINE_IMAGE,
            instance_type=nat.INSTANCE_TYPE,
            group_id=group.id,
            user_data=user_data,
            disk_gib=nat.DISK_GIB,
            kms_key_arn=args.security.kms_key_arn,
            is_public=True,
            # An account's default may be `standard`, with which a new t4g has no credits, and boots for minutes.
            # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/burstable-performance-instances-standard-mode-concepts.html
            credit_specification={"cpu_credits": "unlimited"},
            opts=self._child,
        )
        scaling = self._auto_scaling_group(name, args, template, [*rules, *needed, args.internet])
        self.group = ResourceRef(name=scaling.name, arn=scaling.arn)
        self.register_outputs({"interface_id": self.interface_id, "group_name": self.group.name})

    def _security_group(self, name: str, args: NatInstanceArgs) -> tuple[aws.ec2.SecurityGroup, list[pulumi.Resource]]:
        """Security group of both interfaces: what it forwards comes from the VPC, and nothing from the internet."""
        group = aws.ec2.SecurityGroup(
            f"{name}-traffic-group",
            description="NAT instance: all traffic from the VPC to the internet",
            vpc_id=args.vpc_id,
            opts=self._child,
        )
        common: dict[str, Any] = {"security_group_id": group.id, "ip_protocol": "-1", "opts": self._child}
        ingress = aws.vpc.SecurityGroupIngressRule(f"{name}-ingress", cidr_ipv4=args.cidr, **common)
        egress = aws.vpc.SecurityGroupEgressRule(f"{name}-egress", cidr_ipv4="0.0.0.0/0", **common)
        return group, [ingress, egress]

    def _profile(
        self, name: str, args: NatInstanceArgs, interface: aws.ec2.NetworkInterface
    ) -> tuple[aws.iam.InstanceProfile, list[pulumi.Resource]]:
        """Instance profile with one permission, and what a launch needs besides.

        Session Manager is not among it: there is nothing to do on the instance, whose console has the unit's log.
        """
        security = args.security
        role_name = f"{name}-role"
        role = make_role(role_name, policies.assumed_by("ec2.amazonaws.com"), security, self)
        profile = aws.iam.InstanceProfile(f"{name}-profile", role=role.name, path=security.role_path, opts=self._child)
        arns = pulumi.Output.all(interface_arn=interface.arn, profile_arn=profile.arn)
        attach = aws.iam.RolePolicy(
            f"{name}-attach",
            role=role.name,
            policy=arns.apply(lambda values: json.dumps(policies.nat_instance(**values))),
            opts=self._child,
        )
        needed = [attach, *attach_policies(role_name, role, security.instance_policy_arns, self)]
        if security.kms_key_arn:
            grant = grant_disk_key(f"{name}-disk-key", security.kms_key_arn, AUTO_SCALING_ROLE, args.location, self)
            needed.append(grant)
        return profile, needed

    def _auto_scaling_group(
        self, name: str, args: NatInstanceArgs, template: aws.ec2.LaunchTemplate, needed: list[pulumi.Resource]
    ) -> aws.autoscaling.Group:
        """Group that replaces an instance that fails EC2's checks. Another template counts for the next instance.

        `pulumi up` waits for the first one.
        """
        sleeps = args.sleeps
        return aws.autoscaling.Group(
            f"{name}-group",
            min_size=0 if sleeps else 1,
            max_size=1,
            desired_capacity=1,
            vpc_zone_identifiers=[args.public_subnet_id],
            launch_template={"id": template.id, "version": "$Latest"},
            force_delete=True,
            opts=pulumi.ResourceOptions(
                parent=self,
                depends_on=needed,
                # Alarms set it, while the cluster is asleep to 0.
                ignore_changes=["desiredCapacity"] if sleeps else None,
            ),
        )
