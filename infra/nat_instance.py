"""NAT instance: an Auto Scaling group of one, and the network interface to which the private subnets' route leads."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Any

import pulumi
import pulumi_aws as aws

from infra.definitions import nat, policies
from infra.definitions.addresses import private_block
from infra.definitions.user_data import ROOT_DEVICE
from infra.roles import AUTO_SCALING_ROLE, attach_policies, grant_disk_key, make_role
from infra.tags import tags
from infra.types import Location, NatInstanceOptions, ResourceRef


@dataclass(frozen=True, kw_only=True)
class NatInstanceArgs:
    """Inputs of NatInstance.

    Attributes:
        cidr: CIDR block of the VPC.
        zone: Availability zone of both subnets.
        public_subnet_id: Subnet of the instance, which has a public address while it runs.
        private_subnet_id: Subnet of the interface that the route leads to.
        internet: Route of the public subnet.
    """

    vpc_id: pulumi.Input[str]
    cidr: str
    location: Location
    zone: pulumi.Input[str]
    public_subnet_id: pulumi.Input[str]
    private_subnet_id: pulumi.Input[str]
    internet: pulumi.Resource
    options: NatInstanceOptions


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
        interface = self._interface(name, args, group)
        self.interface_id = interface.id
        profile, needed = self._profile(name, args, interface)
        template = self._launch_template(name, args, group, profile, self._user_data(args, interface))
        scaling = self._auto_scaling_group(name, args, template, [*rules, *needed, args.internet])
        self.group = ResourceRef(name=scaling.name, arn=scaling.arn)
        self.register_outputs({"interface_id": self.interface_id, "group_name": self.group.name})

    def _security_group(self, name: str, args: NatInstanceArgs) -> tuple[aws.ec2.SecurityGroup, list[pulumi.Resource]]:
        """Security group of both interfaces: what it forwards comes from the VPC, and nothing from the internet."""
        group = aws.ec2.SecurityGroup(
            f"{name}-traffic-group",
            description="NAT instance: all traffic from the VPC to the internet",
            vpc_id=args.vpc_id,
            tags=tags(f"{name}-traffic-group"),
            opts=self._child,
        )
        common: dict[str, Any] = {"security_group_id": group.id, "ip_protocol": "-1", "opts": self._child}
        ingress = aws.vpc.SecurityGroupIngressRule(
            f"{name}-ingress", cidr_ipv4=args.cidr, tags=tags(f"{name}-ingress"), **common
        )
        egress = aws.vpc.SecurityGroupEgressRule(
            f"{name}-egress", cidr_ipv4="0.0.0.0/0", tags=tags(f"{name}-egress"), **common
        )
        return group, [ingress, egress]

    def _interface(self, name: str, args: NatInstanceArgs, group: aws.ec2.SecurityGroup) -> aws.ec2.NetworkInterface:
        return aws.ec2.NetworkInterface(
            f"{name}-interface",
            subnet_id=args.private_subnet_id,
            security_groups=[group.id],
            description="Default route of the private subnets",
            # What it forwards is neither from its address nor to it.
            source_dest_check=False,
            tags=tags(f"{name}-interface"),
            # The instance attaches it, which `pulumi refresh` may see.
            opts=pulumi.ResourceOptions(parent=self, ignore_changes=["attachments"]),
        )

    def _profile(
        self, name: str, args: NatInstanceArgs, interface: aws.ec2.NetworkInterface
    ) -> tuple[aws.iam.InstanceProfile, list[pulumi.Resource]]:
        """Instance profile with one permission, and what a launch needs besides.

        Session Manager is not among it: there is nothing to do on the instance, whose console has the unit's log.
        """
        security = args.options.security
        role_name = f"{name}-role"
        role = make_role(role_name, policies.assumed_by("ec2.amazonaws.com"), security, self)
        profile = aws.iam.InstanceProfile(
            f"{name}-profile", role=role.name, path=security.role_path, tags=tags(f"{name}-profile"), opts=self._child
        )
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

    def _user_data(self, args: NatInstanceArgs, interface: aws.ec2.NetworkInterface) -> pulumi.Output[str]:
        def encoded(values: dict[str, str]) -> str:
            private = nat.PrivateInterface(**values, vpc=args.cidr)
            return base64.b64encode(nat.user_data(private).encode()).decode()

        return pulumi.Output.all(
            interface_id=interface.id,
            mac=interface.mac_address,
            address=interface.private_ip,
            subnet=pulumi.Output.from_input(args.zone).apply(lambda zone: private_block(args.cidr, zone)),
        ).apply(encoded)

    def _launch_template(
        self,
        name: str,
        args: NatInstanceArgs,
        group: aws.ec2.SecurityGroup,
        profile: aws.iam.InstanceProfile,
        user_data: pulumi.Output[str],
    ) -> aws.ec2.LaunchTemplate:
        return aws.ec2.LaunchTemplate(
            f"{name}-template",
            image_id=nat.MACHINE_IMAGE,
            instance_type=nat.INSTANCE_TYPE,
            iam_instance_profile=aws.ec2.LaunchTemplateIamInstanceProfileArgs(arn=profile.arn),
            network_interfaces=[
                aws.ec2.LaunchTemplateNetworkInterfaceArgs(
                    device_index=0,
                    associate_public_ip_address="true",
                    security_groups=[group.id],
                    delete_on_termination="true",
                )
            ],
            user_data=user_data,
            metadata_options=aws.ec2.LaunchTemplateMetadataOptionsArgs(
                http_endpoint="enabled", http_tokens="required", http_put_response_hop_limit=1
            ),
            # An account's default may be `standard`, with which a new t4g has no credits, and boots for minutes.
            # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/burstable-performance-instances-standard-mode-concepts.html
            credit_specification=aws.ec2.LaunchTemplateCreditSpecificationArgs(cpu_credits="unlimited"),
            block_device_mappings=[
                aws.ec2.LaunchTemplateBlockDeviceMappingArgs(
                    device_name=ROOT_DEVICE,
                    ebs=aws.ec2.LaunchTemplateBlockDeviceMappingEbsArgs(
                        volume_size=nat.DISK_GIB,
                        volume_type="gp3",
                        encrypted="true",
                        kms_key_id=args.options.security.kms_key_arn or None,
                        delete_on_termination="true",
                    ),
                )
            ],
            tag_specifications=[
                aws.ec2.LaunchTemplateTagSpecificationArgs(resource_type=kind, tags=tags(f"{name}-{kind}"))
                for kind in ("instance", "volume", "network-interface")
            ],
            opts=self._child,
        )

    def _auto_scaling_group(
        self, name: str, args: NatInstanceArgs, template: aws.ec2.LaunchTemplate, needed: list[pulumi.Resource]
    ) -> aws.autoscaling.Group:
        """Group that replaces an instance that fails EC2's checks. Another template counts for the next instance.

        `pulumi up` waits for the first one.
        """
        sleeps = args.options.sleeps
        return aws.autoscaling.Group(
            f"{name}-group",
            min_size=0 if sleeps else 1,
            max_size=1,
            desired_capacity=1,
            vpc_zone_identifiers=[args.public_subnet_id],
            launch_template=aws.autoscaling.GroupLaunchTemplateArgs(id=template.id, version="$Latest"),
            force_delete=True,
            tags=[
                # The launch template tags the instances.
                aws.autoscaling.GroupTagArgs(key=key, value=value, propagate_at_launch=False)
                for key, value in tags(f"{name}-group").items()
            ],
            opts=pulumi.ResourceOptions(
                parent=self,
                depends_on=needed,
                # Alarms set it, while the cluster is asleep to 0.
                ignore_changes=["desiredCapacity"] if sleeps else None,
            ),
        )
