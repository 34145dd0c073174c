"""Node group: launch template, Auto Scaling group and ECS capacity provider of one kind of Ray node."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pulumi
import pulumi_aws as aws

from infra.definitions import policies
from infra.definitions.user_data import encoded, user_data
from infra.launch_template import launch_template
from infra.roles import AUTO_SCALING_ROLE, attach_policies, grant_disk_key, make_role
from infra.types import Location, NetworkRef, NodeSpec, Reservation, ResourceRef, SecurityOptions, in_zone, known
from ray_on_ecs.contract import CAPACITY_BLOCK

# Time that an instance takes to join the cluster, without the image pull.
WARMUP_SECONDS = 60
# ECS adds this tag to the group of a capacity provider, and scales in only instances that have it.
# https://docs.aws.amazon.com/AmazonECS/latest/developerguide/asg-capacity-providers.html
MANAGED_TAG = aws.autoscaling.GroupTagArgs(key="AmazonECSManaged", value="true", propagate_at_launch=True)


@dataclass(frozen=True, kw_only=True)
class NodeGroupArgs:
    """Inputs of NodeGroup.

    With managed scaling, ECS starts the instances that tasks need, up to `node.max_count`; otherwise there are always
    `node.max_count`. The head has one, and with managed scaling none while it sleeps. Nodes with GPUs use cluster
    placement groups. `mounts` are commands of its user data, which read the folders of S3 in `mounted`, and use `efs`.
    """

    location: Location
    cluster: ResourceRef
    network: NetworkRef
    node: NodeSpec
    security: SecurityOptions
    managed_scaling: bool = False
    mounts: pulumi.Input[str] = ""
    mounted: Sequence[str] = ()
    efs: str = ""

    @property
    def is_head(self) -> bool:
        """True for the nodes that are in no pool."""
        return not self.node.pool


class NodeGroup(pulumi.ComponentResource):
    """EC2 instances, in a fixed number that only `pulumi up` changes or with managed scaling."""

    provider_name: pulumi.Output[str]
    group: ResourceRef

    def __init__(self, name: str, args: NodeGroupArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("ray-on-ecs:infra:NodeGroup", name, None, opts)
        self._name = name
        self._cluster_arn = args.cluster.arn
        self._role, role_policies = self._instance_role(name, args)
        template = self._launch_template(name, args)
        placement_groups = self._placement_groups(name, args)
        # EC2 refuses to delete a placement group in use, so the group depends on it, also where its zone is an Output.
        # In another zone the old one is deleted after the update, and with workers in it `pulumi up` ends in an error.
        needed = [*role_policies, *self._key_grants(name, args), *placement_groups.values()]
        self._group = self._auto_scaling_group(name, args, template, placement_groups, needed)
        self.group = ResourceRef(name=self._group.name, arn=self._group.arn)
        self.provider_name = self._capacity_provider(name, args).name
        self.register_outputs({"provider_name": self.provider_name, "group_name": self.group.name})

    def join_cluster(self, association: pulumi.Resource) -> pulumi.Resource:
        """Allow the instances to register with ECS, once their capacity provider is associated with the cluster.

        An instance that registers earlier may never belong to its provider, and its task would wait forever. Until the
        role has this policy, the ECS agent retries. The policy is deleted with the role, after the instances: ECS
        deregisters a terminated instance only while its agent is connected.
        https://docs.aws.amazon.com/AmazonECS/latest/developerguide/asg-capacity-providers.html
        """
        return aws.iam.RolePolicy(
            f"{self._name}-instance-ecs",
            role=self._role.name,
            policy=pulumi.Output.json_dumps(self._cluster_arn.apply(policies.ecs_agent)),
            # `destroy` would delete the policy first, since it was created last; IAM deletes it with the role instead.
            opts=pulumi.ResourceOptions(parent=self, depends_on=[association], retain_on_delete=True),
        )

    def instance_id(self, service: pulumi.Resource) -> pulumi.Output[str]:
        """ID of the group's instance, empty if EC2 has not started it yet.

        The look-up waits for `service`, the last resource of an instance, to give EC2 time. The next `pulumi up` finds
        an instance that starts or is replaced later.
        """
        tag = "tag:aws:autoscaling:groupName"
        filters = self._group.name.apply(lambda name: [aws.ec2.GetInstancesFilterArgs(name=tag, values=[name])])
        instances = aws.ec2.get_instances_output(
            filters=filters,
            instance_state_names=["pending", "running"],
            opts=pulumi.InvokeOutputOptions(parent=self, depends_on=[self._group, service]),
        )
        return instances.ids.apply(_first)

    def _instance_role(self, name: str, args: NodeGroupArgs) -> tuple[aws.iam.Role, list[pulumi.Resource]]:
        trust = policies.assumed_by("ec2.amazonaws.com")
        role_name = f"{name}-instance-role"
        role = make_role(role_name, trust, args.security, self)
        own: dict[str, pulumi.Input[str]] = {
            "ssm": json.dumps(policies.session_manager(args.location.arn("ec2", "instance/*")))
        }
        if args.mounted or args.efs:
            key, partition = pulumi.Output.from_input(args.security.kms_key_arn), args.location.partition
            efs = args.location.arn("elasticfilesystem", f"file-system/{args.efs}") if args.efs else ""
            own["mounts"] = key.apply(lambda key: json.dumps(policies.mounted(partition, args.mounted, key, efs)))
        inline = [
            aws.iam.RolePolicy(
                f"{name}-instance-{label}", role=role.name, policy=policy, opts=pulumi.ResourceOptions(parent=self)
            )
            for label, policy in own.items()
        ]
        return role, [*inline, *attach_policies(role_name, role, args.security.instance_policy_arns, self)]

    def _key_grants(self, name: str, args: NodeGroupArgs) -> list[pulumi.Resource]:
        """KMS grants by which the roles that launch instances encrypt disks; required for a customer managed key.

        https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/service-linked-roles-spot-instance-requests.html
        """
        key = args.security.kms_key_arn
        if not key:
            return []
        roles = {"disk-key": AUTO_SCALING_ROLE}
        if args.node.spot_count:
            roles["spot-disk-key"] = "spot.amazonaws.com/AWSServiceRoleForEC2Spot"
        return [grant_disk_key(f"{name}-{grant}", key, role, args.location, self) for grant, role in roles.items()]

    def _launch_template(self, name: str, args: NodeGroupArgs) -> aws.ec2.LaunchTemplate:
        profile = aws.iam.InstanceProfile(
            f"{name}-instance-profile",
            role=self._role.name,
            path=args.security.role_path,
            opts=pulumi.ResourceOptions(parent=self),
        )
        node = args.node
        boot = partial(user_data, efa_devices=len(node.efa_cards), local_disks=node.local_disk_gb > 0)
        encoded(boot("x" * 255, known(args.mounts)))  # the longest name, as a preview does not know the cluster's yet
        return launch_template(
            f"{name}-template",
            profile,
            image_id=args.node.ami_id,
            instance_type=args.node.instance_types[0],
            group_id=args.network.instances_group_id,
            user_data=pulumi.Output.all(args.cluster.name, args.mounts).apply(lambda texts: boot(*texts)),
            disk_gib=args.node.disk_gib,
            disk_throughput=args.node.disk_throughput,
            kms_key_arn=args.security.kms_key_arn,
            efa_cards=args.node.efa_cards,
            efa_group_id=args.network.efa_group_id,
            **_reserved(args.node.reservation),
            # Another AMI becomes a new version of the template, for instances that start later. A new type or disk
            # replaces the template, and with it the head's instance.
            opts=pulumi.ResourceOptions(parent=self, replace_on_changes=["instanceType", "blockDeviceMappings"]),
        )

    def _auto_scaling_group(
        self,
        name: str,
        args: NodeGroupArgs,
        template: aws.ec2.LaunchTemplate,
        placement_groups: Mapping[str, aws.ec2.PlacementGroup],
        needed: list[pulumi.Resource],
    ) -> aws.autoscaling.Group:
        node, network = args.node, args.network
        placement = None
        if node.reservation:
            placement = node.reservation.placement_group or None
        elif placement_groups and node.max_count > 1 and not node.spread:
            names = {zone: group.name for zone, group in placement_groups.items()}
            placement = in_zone(names, network.zones(node.zones)[0])
        return aws.autoscaling.Group(
            f"{name}-group",
            min_size=0 if args.managed_scaling else node.max_count,
            max_size=node.max_count,
            # ECS sets the desired capacity of workers; a value here would reset it at every `pulumi up`. That of a head
            # that sleeps is for the first one, which starts it.
            desired_capacity=node.max_count if args.is_head else None,
            # Instances register only after the capacity provider is associated, which depends on this group: waiting
            # for them here would time out.
            wait_for_capacity_timeout="0",
            protect_from_scale_in=_protects(args),
            vpc_zone_identifiers=network.subnets_in(node.zones),
            placement_group=placement,
            **_launched_from(template, node),
            # Groups of workers have none: an added type, or spot, would terminate all workers and every run. A change
            # applies to their instances when ECS starts new ones.
            instance_refresh={
                "strategy": "Rolling",
                # A new launch template always triggers a refresh; a new zone only if it is listed here.
                "triggers": ["vpc_zone_identifier"],
                # The group's maximum size leaves no room for old and new instance at the same time.
                "preferences": {"min_healthy_percentage": 0, "scale_in_protected_instances": "Refresh"},
            }
            if args.is_head
            else None,
            # Free of charge; the idle alarm counts running and requested instances.
            enabled_metrics=[
                aws.autoscaling.Metric.GROUP_IN_SERVICE_INSTANCES,
                aws.autoscaling.Metric.GROUP_DESIRED_CAPACITY,
            ],
            force_delete=True,
            tags=[MANAGED_TAG],
            opts=pulumi.ResourceOptions(
                parent=self,
                # Without the NAT gateway's route and the security group rules, instances neither join the cluster nor
                # report their tasks stopped, and `destroy` hangs in DRAINING.
                depends_on=[network.network, *needed],
                ignore_changes=["desiredCapacity"] if args.is_head and args.managed_scaling else None,
                # A group is deleted once its instances have ended, for which the AWS provider waits 10 minutes. Large
                # ones with GPUs may take longer.
                custom_timeouts=pulumi.CustomTimeouts(delete="30m"),
            ),
        )

    def _placement_groups(self, name: str, args: NodeGroupArgs) -> dict[str, aws.ec2.PlacementGroup]:
        """Cluster placement groups by zone, for the bandwidth and latency of NCCL's all-reduce.

        A placement group is bound to the zone of its instances and can't be deleted while it has any: so its name has
        the zone, and in another zone there is another group. A zone that the state keeps is not known while Pulumi
        plans, and a resource's name has to be. So there is a group for each zone then, free of charge.
        https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/placement-strategies.html

        A reservation has instances only in the group in which it was made, if any; a Capacity Block's are close anyway.
        https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/cr-cpg.html
        """
        if not args.node.task.gpus or args.node.reservation:
            return {}
        return {
            zone: aws.ec2.PlacementGroup(
                f"{name}-placement-{zone}",
                strategy="cluster",
                opts=pulumi.ResourceOptions(parent=self),
            )
            for zone in args.node.zones or args.network.subnets
        }

    def _capacity_provider(self, name: str, args: NodeGroupArgs) -> aws.ecs.CapacityProvider:
        return aws.ecs.CapacityProvider(
            f"{name}-capacity-provider",
            auto_scaling_group_provider={
                "auto_scaling_group_arn": self._group.arn,
                "managed_scaling": {
                    "status": "ENABLED",
                    # One instance per task, without spare instances.
                    "target_capacity": 100,
                    "minimum_scaling_step_size": 1,
                    # ECS waits this long after a scale-out before it starts the remaining instances of a larger job.
                    "instance_warmup_period": WARMUP_SECONDS,
                    "maximum_scaling_step_size": max(1, args.node.max_count),
                }
                if args.managed_scaling
                else {"status": "DISABLED"},
                "managed_termination_protection": "ENABLED" if _protects(args) else "DISABLED",
                # Before an instance is terminated, its task gets SIGTERM and its stopTimeout. ECS stops the task
                # without waiting for a replacement, since the service's minimum healthy percent is below 100.
                # https://docs.aws.amazon.com/AmazonECS/latest/developerguide/container-instance-draining.html
                "managed_draining": "ENABLED",
            },
            opts=pulumi.ResourceOptions(parent=self),
        )


def _protects(args: NodeGroupArgs) -> bool:
    """True if the scale-in terminates only instances without tasks, which an Auto Scaling group can't tell apart.

    ECS ends the head's one instance only without a task. It would refuse protection if sleep is switched on for a head
    that is up, as each instance in the group has to be protected before.
    https://docs.aws.amazon.com/AmazonECS/latest/APIReference/API_AutoScalingGroupProviderUpdate.html
    """
    return args.managed_scaling and not args.is_head


def _reserved(reservation: Reservation | None) -> dict[str, Any]:
    """Inputs of a launch template whose instances are all in one reservation; without room in it the launch fails.

    A template takes a target or a preference, by EC2's API, so there is no `capacity-reservations-only`: a target by
    its ID means the same.
    https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_LaunchTemplateCapacityReservationSpecificationRequest.html
    https://docs.aws.amazon.com/autoscaling/ec2/userguide/launch-template-capacity-blocks.html
    """
    if reservation is None:
        return {}
    target = {"capacity_reservation_target": {"capacity_reservation_id": reservation.id}}
    market = {"instance_market_options": {"market_type": CAPACITY_BLOCK}} if reservation.is_block else {}
    return {"capacity_reservation_specification": target, **market}


def _launched_from(template: aws.ec2.LaunchTemplate, node: NodeSpec) -> dict[str, Any]:
    """Launch template, or mixed instances policy for several instance types or Spot Instances.

    A change of template or types does not replace running instances.
    https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_LaunchTemplate.html

    On demand, `prioritized` launches the first type with capacity in the zone. On spot the order is ignored:
    `price-capacity-optimized` picks cheap pools among those least likely to be interrupted.
    https://docs.aws.amazon.com/autoscaling/ec2/userguide/allocation-strategies.html
    """
    if len(node.instances) == 1 and not node.spot_count:
        return {"launch_template": {"id": template.id, "version": "$Latest"}}
    policy = {
        "instances_distribution": {
            "on_demand_allocation_strategy": "prioritized",
            # Of the groups of a pool, the first zone's alone: each starts its own base, also while the others have
            # theirs.
            "on_demand_base_capacity": node.on_demand_count if node.spot_count and not node.shares else 0,
            "on_demand_percentage_above_base_capacity": 0 if node.spot_count else 100,
            "spot_allocation_strategy": "price-capacity-optimized",
        },
        "launch_template": {
            "launch_template_specification": {"launch_template_id": template.id, "version": "$Latest"},
            "overrides": [{"instance_type": name} for name in node.instance_types],
        },
    }
    # Capacity Rebalancing would end an instance that EC2 may never reclaim, before its replacement can take the task.
    # At EC2's recommendation a run saves a checkpoint instead (`ray_on_ecs.node.notice`).
    # https://docs.aws.amazon.com/autoscaling/ec2/userguide/ec2-auto-scaling-capacity-rebalancing.html
    return {"mixed_instances_policy": policy, "capacity_rebalance": False}


def _first(instance_ids: Sequence[str]) -> str:
    if not instance_ids:
        pulumi.log.warn(
            "head_instance_id: EC2 has not started the head's instance yet; run `pulumi up` again in a few minutes for "
            "the commands that contain its ID (`ray-on-ecs` looks it up itself)"
        )
        return ""
    return instance_ids[0]
