"""EC2 instances for one kind of Ray node, and the ECS capacity provider that places tasks on them."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pulumi
import pulumi_aws as aws

from infra.definitions import policies
from infra.definitions.user_data import ROOT_DEVICE, user_data
from infra.references import AccountRules, Location, NetworkRef, NodeSpec, ResourceRef
from infra.roles import attach_policies, make_role
from infra.tags import REGION_TAG, tags

# What an instance takes to join the cluster, without its tasks' image.
WARMUP_SECONDS = 60
# https://docs.aws.amazon.com/autoscaling/ec2/userguide/key-policy-requirements-EBS-encryption.html
DISK_KEY_OPERATIONS = [
    "Encrypt",
    "Decrypt",
    "ReEncryptFrom",
    "ReEncryptTo",
    "GenerateDataKey",
    "GenerateDataKeyWithoutPlaintext",
    "DescribeKey",
    "CreateGrant",
]
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
    rules: AccountRules
    managed_scaling: bool = False
    root_volume_gib: int


class Capacity(pulumi.ComponentResource):
    """A number of instances: a fixed one, which changes with `pulumi up` alone, or one that follows the tasks."""

    provider_name: pulumi.Output[str]
    group: ResourceRef
    placement_groups: Mapping[str, pulumi.Output[str]]

    def __init__(self, name: str, args: CapacityArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("ray-on-ecs:infra:Capacity", name, None, opts)
        self._name = name
        self._cluster_arn = args.cluster.arn
        self._role, role_policies = self._instance_role(name, args)
        template = self._launch_template(name, args)
        placement_groups = self._placement_groups(name, args)
        self.placement_groups = {zone: group.name for zone, group in placement_groups.items()}
        # A job may have moved the group's instances into the placement group of any zone: EC2 refuses to delete one
        # that is in use, so all of them go after the group.
        needed = [*role_policies, *self._key_grant(name, args), *placement_groups.values()]
        self._group = self._auto_scaling_group(name, args, template, needed)
        self.group = ResourceRef(name=self._group.name, arn=self._group.arn)
        self.provider_name = self._capacity_provider(name, args).name
        self.register_outputs({"provider_name": self.provider_name, "group_name": self.group.name})

    def join_cluster(self, association: pulumi.Resource) -> pulumi.Resource:
        """Let the instances register with ECS, once their capacity provider is associated with the cluster.

        An instance that registers before that might never belong to its provider, and a task would wait for it for
        ever. Until its role has this policy, its agent tries again and again. The policy goes with the role, which
        outlives the instances: ECS deregisters an instance that ends only while its agent is connected.
        https://docs.aws.amazon.com/AmazonECS/latest/developerguide/asg-capacity-providers.html
        """
        return aws.iam.RolePolicy(
            f"{self._name}-instance-ecs",
            role=self._role.name,
            policy=pulumi.Output.json_dumps(self._cluster_arn.apply(policies.ecs_agent)),
            # Without retain_on_delete, `destroy` would delete the policy first, as it was made last.
            opts=pulumi.ResourceOptions(parent=self, depends_on=[association], retain_on_delete=True),
        )

    def instance_id(self, service: pulumi.Resource) -> pulumi.Output[str]:
        """ID of the group's instance, empty where there is none yet.

        Asked after `service` is made, the last thing that an instance has to do with: by then EC2 has had time to start
        it. The next `pulumi up` finds an instance that comes or is replaced later.
        """
        found = aws.ec2.get_instances_output(
            filters=self._group.name.apply(_launched_by),
            instance_state_names=["pending", "running"],
            opts=pulumi.InvokeOutputOptions(parent=self, depends_on=[self._group, service]),
        )
        return found.ids.apply(_first)

    def _instance_role(self, name: str, args: CapacityArgs) -> tuple[aws.iam.Role, list[pulumi.Resource]]:
        location = args.location
        trust = policies.assumed_by("ec2.amazonaws.com")
        # Roles are the same in every region: by this tag `pulumi up` in another one finds that the stack is up here.
        role_name = f"{name}-instance-role"
        role = make_role(role_name, trust, args.rules, self, {REGION_TAG: location.region})
        sessions = aws.iam.RolePolicy(
            f"{name}-instance-ssm",
            role=role.name,
            policy=json.dumps(
                policies.session_manager(partition=location.partition, region=location.region, account=location.account)
            ),
            opts=pulumi.ResourceOptions(parent=self),
        )
        return role, [sessions, *attach_policies(role_name, role, args.rules.instance_policy_arns, self)]

    def _key_grant(self, name: str, args: CapacityArgs) -> list[pulumi.Resource]:
        """What lets Amazon EC2 Auto Scaling encrypt disks with a key of one's own; AWS's key needs no such thing."""
        if not args.rules.kms_key_arn:
            return []
        service_role = "role/aws-service-role/autoscaling.amazonaws.com/AWSServiceRoleForAutoScaling"
        grant = aws.kms.Grant(
            f"{name}-disk-key",
            key_id=args.rules.kms_key_arn,
            grantee_principal=f"arn:{args.location.partition}:iam::{args.location.account}:{service_role}",
            operations=DISK_KEY_OPERATIONS,
            opts=pulumi.ResourceOptions(parent=self),
        )
        return [grant]

    def _launch_template(self, name: str, args: CapacityArgs) -> aws.ec2.LaunchTemplate:
        profile = aws.iam.InstanceProfile(
            f"{name}-instance-profile",
            role=self._role.name,
            path=args.rules.role_path,
            tags=tags(f"{name}-instance-profile"),
            opts=pulumi.ResourceOptions(parent=self),
        )
        return aws.ec2.LaunchTemplate(
            f"{name}-template",
            image_id=args.node.ami_id,
            instance_type=args.node.instance_types[0],
            iam_instance_profile=aws.ec2.LaunchTemplateIamInstanceProfileArgs(arn=profile.arn),
            network_interfaces=[
                aws.ec2.LaunchTemplateNetworkInterfaceArgs(
                    device_index=0,
                    # Said here, because a subnet may give its instances public addresses by itself.
                    associate_public_ip_address="false",
                    security_groups=[args.network.instances_group_id],
                    delete_on_termination="true",
                )
            ],
            user_data=args.cluster.name.apply(_encoded_user_data),
            metadata_options=aws.ec2.LaunchTemplateMetadataOptionsArgs(
                http_endpoint="enabled", http_tokens="required", http_put_response_hop_limit=1
            ),
            block_device_mappings=[_root_volume(args.root_volume_gib, args.rules.kms_key_arn)],
            # What is launched and paid for carries the tags; the template itself is a part of its group.
            tag_specifications=[
                aws.ec2.LaunchTemplateTagSpecificationArgs(resource_type=kind, tags=tags(f"{name}-{kind}"))
                for kind in ("instance", "volume", "network-interface")
            ],
            # A new machine image from AWS becomes a new version, for instances that start later; running ones stay. A
            # new type or disk becomes a new template, and for that the head's group replaces its instance.
            opts=pulumi.ResourceOptions(parent=self, replace_on_changes=["instanceType", "blockDeviceMappings"]),
        )

    def _auto_scaling_group(
        self,
        name: str,
        args: CapacityArgs,
        template: aws.ec2.LaunchTemplate,
        needed: list[pulumi.Resource],
    ) -> aws.autoscaling.Group:
        node, subnets = args.node, args.network.subnets
        zones = node.zones if node.spread else node.zones[:1]
        placement = None if node.spread or node.max_count < 2 else self.placement_groups.get(zones[0])
        return aws.autoscaling.Group(
            f"{name}-group",
            min_size=0 if args.managed_scaling else node.max_count,
            max_size=node.max_count,
            # ECS moves a managed group's number; a number here would be put back at every `pulumi up`.
            desired_capacity=None if args.managed_scaling else node.max_count,
            # The capacity provider and its association have to be there before the first instance registers.
            wait_for_capacity_timeout="0",
            protect_from_scale_in=args.managed_scaling,
            vpc_zone_identifiers=[subnets[zone] for zone in zones],
            placement_group=placement,
            **_launched_from(template, node),
            instance_refresh=None if args.managed_scaling else _replace_at_once(),
            # Free of charge: what is paid for, whatever runs on the instances, and what EC2 is asked for.
            enabled_metrics=[
                aws.autoscaling.Metric.GROUP_IN_SERVICE_INSTANCES,
                aws.autoscaling.Metric.GROUP_DESIRED_CAPACITY,
            ],
            force_delete=True,
            tags=[
                # The template tags the instances themselves.
                aws.autoscaling.GroupTagArgs(key=key, value=value, propagate_at_launch=False)
                for key, value in tags(f"{name}-group").items()
            ]
            + [MANAGED_TAG],
            # Instances without the NAT gateway's route or the rules neither join the cluster nor report their tasks
            # stopped, and `destroy` would hang in DRAINING.
            opts=pulumi.ResourceOptions(
                parent=self,
                depends_on=[args.network.network, *needed],
                # A job that finds no capacity in one zone moves the group on to the next.
                ignore_changes=["vpcZoneIdentifiers", "placementGroup"] if node.moves else None,
            ),
        )

    def _placement_groups(self, name: str, args: CapacityArgs) -> dict[str, aws.ec2.PlacementGroup]:
        """Instances next to each other, for the bandwidth and latency of NCCL's all-reduce.

        A placement group stays in the zone of its instances, and can't be deleted while it has any. So there is one for
        each zone, always: they cost nothing.
        """
        if not args.node.task.gpus:
            return {}
        return {
            zone: aws.ec2.PlacementGroup(
                f"{name}-placement-{zone}",
                strategy="cluster",
                tags=tags(f"{name}-placement-{zone}"),
                opts=pulumi.ResourceOptions(parent=self),
            )
            for zone in args.location.zones
        }

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
        maximum_scaling_step_size=max(1, args.node.max_count),
    )


def _launched_from(template: aws.ec2.LaunchTemplate, node: NodeSpec) -> dict[str, Any]:
    """The template alone, or with several types in order of preference, and with spot instances.

    Running instances stay when the template or the types change.
    https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_LaunchTemplate.html

    On demand EC2 Auto Scaling takes the first type that EC2 has in the zone. On spot the order does not count: it takes
    the pools that are cheap among those that are least likely to be interrupted.
    https://docs.aws.amazon.com/autoscaling/ec2/userguide/allocation-strategies.html
    """
    latest = {"version": "$Latest"}
    if len(node.instances) == 1 and not node.spot_count:
        return {"launch_template": aws.autoscaling.GroupLaunchTemplateArgs(id=template.id, **latest)}
    distribution = aws.autoscaling.GroupMixedInstancesPolicyInstancesDistributionArgs(
        on_demand_allocation_strategy="prioritized",
        on_demand_base_capacity=node.on_demand_count if node.spot_count else 0,
        on_demand_percentage_above_base_capacity=0 if node.spot_count else 100,
        spot_allocation_strategy="price-capacity-optimized",
    )
    of_template = aws.autoscaling.GroupMixedInstancesPolicyLaunchTemplateArgs(
        launch_template_specification=aws.autoscaling.GroupMixedInstancesPolicyLaunchTemplateLaunchTemplateSpecificationArgs(
            launch_template_id=template.id, **latest
        ),
        overrides=[
            aws.autoscaling.GroupMixedInstancesPolicyLaunchTemplateOverrideArgs(instance_type=each)
            for each in node.instance_types
        ],
    )
    policy = aws.autoscaling.GroupMixedInstancesPolicyArgs(
        instances_distribution=distribution, launch_template=of_template
    )
    # As soon as EC2 says that one is likely to be interrupted, another is started, and takes its place.
    return {"mixed_instances_policy": policy, "capacity_rebalance": node.spot_count > 0}


def _replace_at_once() -> aws.autoscaling.GroupInstanceRefreshArgs:
    """Replacement of the one instance of a fixed group when its template or its zone changes.

    Managed groups have none: a type that is added, or spot, would end all running workers, and with them every run.
    Their instances take a change when they start, as ECS does so for the tasks that need them.
    """
    return aws.autoscaling.GroupInstanceRefreshArgs(
        strategy="Rolling",
        # A new template always does; an instance of another zone has to be replaced, too.
        triggers=["vpc_zone_identifier"],
        # The old and the new instance do not fit at once into a fixed number.
        preferences=aws.autoscaling.GroupInstanceRefreshPreferencesArgs(
            min_healthy_percentage=0, scale_in_protected_instances="Refresh"
        ),
    )


def _first(instance_ids: Sequence[str]) -> str:
    if not instance_ids:
        pulumi.log.warn(
            "head_instance_id: EC2 has not started the head's instance yet; run `pulumi up` again in some minutes for "
            "the commands that name it. `ray-on-ecs` finds it by itself"
        )
        return ""
    return instance_ids[0]


def _launched_by(group: str) -> list[aws.ec2.GetInstancesFilterArgs]:
    return [aws.ec2.GetInstancesFilterArgs(name="tag:aws:autoscaling:groupName", values=[group])]


def _encoded_user_data(cluster_name: str) -> str:
    return base64.b64encode(user_data(cluster_name).encode()).decode()


def _root_volume(size_gib: int, kms_key_arn: pulumi.Input[str]) -> aws.ec2.LaunchTemplateBlockDeviceMappingArgs:
    return aws.ec2.LaunchTemplateBlockDeviceMappingArgs(
        device_name=ROOT_DEVICE,
        ebs=aws.ec2.LaunchTemplateBlockDeviceMappingEbsArgs(
            volume_size=size_gib,
            volume_type="gp3",
            encrypted="true",
            kms_key_id=kms_key_arn or None,
            delete_on_termination="true",
        ),
    )
