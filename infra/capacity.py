"""EC2 instances for one kind of Ray node, and the ECS capacity provider that places tasks on them."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass

import pulumi
import pulumi_aws as aws

from infra.definitions import policies
from infra.definitions.user_data import ROOT_DEVICE, ami_parameter, user_data
from infra.references import Location, NetworkRef, NodeSpec, ResourceRef
from infra.roles import make_role
from infra.tags import tags

# What an instance takes to join the cluster, without its tasks' image.
WARMUP_SECONDS = 60
# ECS puts this tag on a group with a capacity provider, and takes away no instance that lacks it.
MANAGED_TAG = aws.autoscaling.GroupTagArgs(key="AmazonECSManaged", value="true", propagate_at_launch=True)


@dataclass(frozen=True, kw_only=True)
class CapacityArgs:
    """Inputs of Capacity.

    A node with GPUs takes the machine image with the NVIDIA driver, and several stand next to each other. Managed
    scaling lets ECS start as many as its tasks need, up to `node.max_count`; otherwise there are always that many.
    """

    location: Location
    cluster: ResourceRef
    network: NetworkRef
    node: NodeSpec
    managed_scaling: bool = False
    root_volume_gib: int


class Capacity(pulumi.ComponentResource):
    """A number of instances: a fixed one, which changes with `pulumi up` alone, or one that follows the tasks."""

    provider_name: pulumi.Output[str]
    group_name: pulumi.Output[str]

    def __init__(self, name: str, args: CapacityArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("ray-on-ecs:infra:Capacity", name, None, opts)
        role, rights = self._role(name, args.location)
        template = self._launch_template(name, args, role)
        self._group = self._auto_scaling_group(name, args, template, rights)
        self.group_name = self._group.name
        self.provider_name = self._capacity_provider(name, args).name
        self.register_outputs({"provider_name": self.provider_name, "group_name": self.group_name})

    def instance_id(self) -> pulumi.Output[str]:
        """ID of the first instance that runs, empty where none does.

        The group's ID is known only after its instances run; `depends_on` keeps the question from being asked sooner.
        An instance that the group replaces later is found by the next `pulumi up`.
        """
        running = aws.ec2.get_instances_output(
            filters=self._group.name.apply(_launched_by),
            instance_state_names=["running"],
            opts=pulumi.InvokeOutputOptions(parent=self, depends_on=[self._group]),
        )
        return running.ids.apply(lambda ids: ids[0] if ids else "")

    def _role(self, name: str, location: Location) -> tuple[aws.iam.Role, list[pulumi.Resource]]:
        role = make_role(f"{name}-instance-role", policies.assumed_by("ec2.amazonaws.com"), parent=self)
        agent = aws.iam.RolePolicyAttachment(
            f"{name}-instance-ecs",
            role=role.name,
            policy_arn=policies.ecs_agent(location.partition),
            opts=pulumi.ResourceOptions(parent=self),
        )
        sessions = aws.iam.RolePolicy(
            f"{name}-instance-ssm",
            role=role.name,
            policy=json.dumps(
                policies.session_manager(partition=location.partition, region=location.region, account=location.account)
            ),
            opts=pulumi.ResourceOptions(parent=self),
        )
        return role, [agent, sessions]

    def _launch_template(self, name: str, args: CapacityArgs, role: aws.iam.Role) -> aws.ec2.LaunchTemplate:
        profile = aws.iam.InstanceProfile(
            f"{name}-instance-profile",
            role=role.name,
            tags=tags(f"{name}-instance-profile"),
            opts=pulumi.ResourceOptions(parent=self),
        )
        return aws.ec2.LaunchTemplate(
            f"{name}-template",
            image_id=args.node.ami_id or self._newest_ami(args.node),
            instance_type=args.node.instance_type,
            iam_instance_profile=aws.ec2.LaunchTemplateIamInstanceProfileArgs(arn=profile.arn),
            network_interfaces=[
                aws.ec2.LaunchTemplateNetworkInterfaceArgs(
                    device_index=0,
                    # Said here, because a subnet may give its instances public addresses by itself.
                    associate_public_ip_address="false",
                    security_groups=[args.network.security_group_id],
                    delete_on_termination="true",
                )
            ],
            user_data=args.cluster.name.apply(_encoded_user_data),
            metadata_options=aws.ec2.LaunchTemplateMetadataOptionsArgs(
                http_endpoint="enabled", http_tokens="required", http_put_response_hop_limit=1
            ),
            block_device_mappings=[_root_volume(args.root_volume_gib)],
            # What is launched and paid for carries the tags; the template itself is a part of its group.
            tag_specifications=[
                aws.ec2.LaunchTemplateTagSpecificationArgs(resource_type=kind, tags=tags(f"{name}-{kind}"))
                for kind in ("instance", "volume", "network-interface")
            ],
            # A new machine image from AWS becomes a new version, for instances that start later; running ones stay. A
            # new type or disk becomes a new template, and that is what makes the group replace its instances.
            opts=pulumi.ResourceOptions(parent=self, replace_on_changes=["instanceType", "blockDeviceMappings"]),
        )

    def _newest_ami(self, node: NodeSpec) -> pulumi.Output[str]:
        newest = aws.ssm.get_parameter_output(
            name=ami_parameter(gpu=node.task.gpus > 0), opts=pulumi.InvokeOutputOptions(parent=self)
        )
        # Not `value`: that one is a secret, and would hide the whole template in previews.
        return newest.insecure_value

    def _auto_scaling_group(
        self,
        name: str,
        args: CapacityArgs,
        template: aws.ec2.LaunchTemplate,
        rights: list[pulumi.Resource],
    ) -> aws.autoscaling.Group:
        return aws.autoscaling.Group(
            f"{name}-group",
            min_size=0 if args.managed_scaling else args.node.max_count,
            max_size=args.node.max_count,
            # ECS moves a managed group's number; a number here would be put back at every `pulumi up`.
            desired_capacity=None if args.managed_scaling else args.node.max_count,
            protect_from_scale_in=args.managed_scaling,
            vpc_zone_identifiers=[args.network.subnet_id],
            placement_group=self._placement_group(name, args),
            launch_template=aws.autoscaling.GroupLaunchTemplateArgs(id=template.id, version="$Latest"),
            # Old and new instances do not fit at once into a fixed number, and perhaps not into the account's quota.
            instance_refresh=aws.autoscaling.GroupInstanceRefreshArgs(
                strategy="Rolling",
                # A new template always does; instances of another zone have to be replaced, too.
                triggers=["vpc_zone_identifier"],
                preferences=aws.autoscaling.GroupInstanceRefreshPreferencesArgs(
                    min_healthy_percentage=0, scale_in_protected_instances="Refresh"
                ),
            ),
            # Free of charge, and what is paid for, whatever runs on the instances.
            enabled_metrics=[aws.autoscaling.Metric.GROUP_IN_SERVICE_INSTANCES],
            force_delete=True,
            tags=[
                # The template tags the instances themselves.
                aws.autoscaling.GroupTagArgs(key=key, value=value, propagate_at_launch=False)
                for key, value in tags(f"{name}-group").items()
            ]
            + [MANAGED_TAG],
            # Instances without the NAT gateway's route, the rules or the role's policies neither join the cluster nor
            # report their tasks stopped: the first `up` would wait for them, and `destroy` would hang in DRAINING.
            opts=pulumi.ResourceOptions(parent=self, depends_on=[args.network.network, *rights]),
        )

    def _placement_group(self, name: str, args: CapacityArgs) -> pulumi.Output[str] | None:
        """Instances next to each other, for the bandwidth and latency of NCCL's all-reduce; one needs no such choice.

        A placement group stays in the zone of its instances, and can't be deleted while it has any. So there is one for
        each zone, always: they cost nothing.
        """
        if not args.node.task.gpus:
            return None
        groups = {
            zone: aws.ec2.PlacementGroup(
                f"{name}-placement-{zone}",
                strategy="cluster",
                tags=tags(f"{name}-placement-{zone}"),
                opts=pulumi.ResourceOptions(parent=self),
            )
            for zone in args.location.zones
        }
        return groups[args.location.zone].name if args.node.max_count > 1 else None

    def _capacity_provider(self, name: str, args: CapacityArgs) -> aws.ecs.CapacityProvider:
        return aws.ecs.CapacityProvider(
            f"{name}-capacity-provider",
            auto_scaling_group_provider=aws.ecs.CapacityProviderAutoScalingGroupProviderArgs(
                auto_scaling_group_arn=self._group.arn,
                managed_scaling=_managed_scaling(args),
                # Only instances without a task go: the group alone would not know which those are.
                managed_termination_protection="ENABLED" if args.managed_scaling else "DISABLED",
                # The task of an instance that leaves gets SIGTERM first, and its stopTimeout. Nothing waits for its own
                # end: ECS stops tasks of a service whose minimum is below 100 %.
                # https://docs.aws.amazon.com/AmazonECS/latest/developerguide/container-instance-draining.html
                managed_draining="ENABLED",
            ),
            tags=tags(f"{name}-capacity-provider"),
            opts=pulumi.ResourceOptions(parent=self),
        )


def _managed_scaling(args: CapacityArgs) -> aws.ecs.CapacityProviderAutoScalingGroupProviderManagedScalingArgs:
    if not args.managed_scaling:
        return aws.ecs.CapacityProviderAutoScalingGroupProviderManagedScalingArgs(status="DISABLED")
    return aws.ecs.CapacityProviderAutoScalingGroupProviderManagedScalingArgs(
        status="ENABLED",
        # An instance for each task and none to spare.
        target_capacity=100,
        minimum_scaling_step_size=1,
        # How long ECS waits after the first instances before it starts the others of a larger job.
        instance_warmup_period=WARMUP_SECONDS,
        maximum_scaling_step_size=args.node.max_count,
    )


def _launched_by(group: str) -> list[aws.ec2.GetInstancesFilterArgs]:
    return [aws.ec2.GetInstancesFilterArgs(name="tag:aws:autoscaling:groupName", values=[group])]


def _encoded_user_data(cluster_name: str) -> str:
    return base64.b64encode(user_data(cluster_name).encode()).decode()


def _root_volume(size_gib: int) -> aws.ec2.LaunchTemplateBlockDeviceMappingArgs:
    return aws.ec2.LaunchTemplateBlockDeviceMappingArgs(
        device_name=ROOT_DEVICE,
        ebs=aws.ec2.LaunchTemplateBlockDeviceMappingEbsArgs(
            volume_size=size_gib, volume_type="gp3", encrypted="true", delete_on_termination="true"
        ),
    )
