"""Node groups: launch, scaling, replacement and permissions of instances."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import pulumi
import pytest

from infra.definitions import policies
from infra.definitions.user_data import user_data
from infra.node_group import NodeGroup, NodeGroupArgs
from infra.types import Location, NetworkRef, ResourceRef, SecurityOptions
from tests.infra.fake_aws import ACCOUNT, ECS_CLUSTER, REGION, Cloud, instance_type, later, node_spec

LOCATION = Location(
    partition="aws",
    account=ACCOUNT,
    region=REGION,
    worker_zones=("us-west-2b",),
    zones=("us-west-2a", "us-west-2b"),
)
DEFAULTS: dict[str, Any] = {
    "location": LOCATION,
    "node": node_spec("m5.xlarge", 1),
    "security": SecurityOptions(),
}
OF_POOL: dict[str, Any] = {"gpus": 1, "pool": "default"}
GPU: dict[str, Any] = {**DEFAULTS, "node": node_spec("g5.xlarge", 2, **OF_POOL), "managed_scaling": True}
SLEEPING: dict[str, Any] = {**DEFAULTS, "managed_scaling": True}


def build(args: dict[str, Any] = DEFAULTS) -> NodeGroup:
    """Node group with valid defaults, in a network with a rule."""
    network = pulumi.ComponentResource("test:index:Network", "network")
    pulumi.CustomResource("test:index:Rule", "rule", {}, pulumi.ResourceOptions(parent=network))
    subnets = {f"us-west-2{letter}": later(f"subnet-{letter}") for letter in "ab"}
    tasks, instances = (later(f"sg-{kind}") for kind in ("tasks", "instances"))
    ref = NetworkRef(
        zone="us-west-2b", subnets=subnets, tasks_group_id=tasks, instances_group_id=instances, network=network
    )
    cluster = ResourceRef(name=later("ray-cluster"), arn=later(ECS_CLUSTER))
    return NodeGroup("head", NodeGroupArgs(cluster=cluster, network=ref, **args))


def node_group(cloud: Cloud, args: dict[str, Any] = DEFAULTS) -> NodeGroup:
    """Registered node group."""
    return cloud.run(lambda: build(args))


def test_the_heads_group_has_one_instance(cloud: Cloud) -> None:
    node_group(cloud)
    group = cloud.resources["head-group"].inputs
    assert {group["minSize"], group["maxSize"], group["desiredCapacity"]} == {1.0}
    assert group["vpcZoneIdentifiers"] == ["subnet-b"]
    assert group["forceDelete"] is True


def test_metadata_is_for_the_instance_alone(cloud: Cloud) -> None:
    node_group(cloud)
    assert cloud.resources["head-template"].inputs["metadataOptions"] == {
        "httpEndpoint": "enabled",
        "httpTokens": "required",
        "httpPutResponseHopLimit": 1.0,
    }


def test_root_volume_is_encrypted_and_deleted_on_termination(cloud: Cloud) -> None:
    large = replace(instance_type("m5.xlarge"), disk_mb=437.5)
    node_group(cloud, {**DEFAULTS, "node": replace(DEFAULTS["node"], instances=(large,), disk_gib=200)})
    (disk,) = cloud.resources["head-template"].inputs["blockDeviceMappings"]
    assert disk == {
        "deviceName": "/dev/xvda",
        "ebs": {
            "volumeSize": 200.0,
            "throughput": 417.0,
            "volumeType": "gp3",
            "encrypted": "true",
            "deleteOnTermination": "true",
        },
    }


def test_instances_are_in_a_group_of_their_own(cloud: Cloud) -> None:
    node_group(cloud)
    template = cloud.resources["head-template"].inputs
    (interface,) = template["networkInterfaces"]
    assert interface["securityGroups"] == ["sg-instances"]
    assert "vpcSecurityGroupIds" not in template
    assert "keyName" not in template


def test_instances_have_no_public_address(cloud: Cloud) -> None:
    node_group(cloud)
    (interface,) = cloud.resources["head-template"].inputs["networkInterfaces"]
    assert interface["associatePublicIpAddress"] == "false"
    assert interface["deviceIndex"] == 0
    assert interface["deleteOnTermination"] == "true"


def test_user_data_reaches_the_instance_encoded(cloud: Cloud) -> None:
    node_group(cloud)
    encoded = cloud.resources["head-template"].inputs["userData"]
    assert base64.b64decode(encoded).decode() == user_data("ray-cluster")


@pytest.mark.parametrize("args", [DEFAULTS, SLEEPING], ids=["always on", "sleeping"])
def test_new_type_disk_or_zone_replaces_the_head(cloud: Cloud, args: dict[str, Any]) -> None:
    node_group(cloud, args)
    template, group = cloud.resources["head-template"], cloud.resources["head-group"]
    assert template.replace_on_changes == ("instanceType", "blockDeviceMappings")
    assert group.inputs["launchTemplate"] == {"id": "head-template-id", "version": "$Latest"}
    assert group.inputs["instanceRefresh"] == {
        "strategy": "Rolling",
        "triggers": ["vpc_zone_identifier"],
        "preferences": {"minHealthyPercentage": 0.0, "scaleInProtectedInstances": "Refresh"},
    }


@pytest.mark.parametrize(
    "change",
    [
        {"node": replace(GPU["node"], instances=(instance_type("g5.xlarge"), instance_type("g6.xlarge")))},
        {"node": replace(GPU["node"], spot_count=2)},
        {"node": replace(GPU["node"], disk_gib=200)},
    ],
    ids=["another type", "spot", "disk"],
)
def test_updates_replace_no_running_worker(cloud: Cloud, change: dict[str, Any]) -> None:
    node_group(cloud, {**GPU, **change})
    assert "instanceRefresh" not in cloud.resources["head-group"].inputs


def placement_groups(cloud: Cloud) -> dict[str, str]:
    """Strategies of the placement groups by name."""
    groups = cloud.of_type("aws:ec2/placementGroup:PlacementGroup")
    return {group.name: group.inputs["strategy"] for group in groups}


def test_zone_of_the_state_has_a_placement_group_among_those_of_all(cloud: Cloud) -> None:
    node_group(cloud, {**GPU, "node": node_spec("g5.xlarge", 2, zones=(), **OF_POOL)})
    assert placement_groups(cloud) == {f"head-placement-us-west-2{letter}": "cluster" for letter in "ab"}
    assert cloud.resources["head-group"].inputs["placementGroup"] == "head-placement-us-west-2b"


def test_single_gpu_instance_is_in_no_placement_group(cloud: Cloud) -> None:
    node_group(cloud, {**GPU, "node": node_spec("g5.xlarge", 1, **OF_POOL)})
    assert "placementGroup" not in cloud.resources["head-group"].inputs
    assert len(placement_groups(cloud)) == 1


def test_managed_scaling_controls_the_desired_capacity(cloud: Cloud) -> None:
    node_group(cloud, GPU)
    group = cloud.resources["head-group"].inputs
    assert (group["minSize"], group["maxSize"]) == (0, 2)
    assert "desiredCapacity" not in group
    assert group["protectFromScaleIn"] is True
    provider = cloud.resources["head-capacity-provider"].inputs["autoScalingGroupProvider"]
    assert provider["managedScaling"] == {
        "status": "ENABLED",
        "targetCapacity": 100.0,
        "minimumScalingStepSize": 1.0,
        "instanceWarmupPeriod": 60.0,
        "maximumScalingStepSize": 2.0,
    }
    assert provider["managedTerminationProtection"] == "ENABLED"


def test_head_that_sleeps_starts_with_the_stack(cloud: Cloud) -> None:
    node_group(cloud, SLEEPING)
    group = cloud.resources["head-group"]
    assert (group.inputs["minSize"], group.inputs["desiredCapacity"], group.inputs["maxSize"]) == (0, 1, 1)
    assert group.ignore_changes == ("desiredCapacity",), "an update would wake it"


def test_head_that_sleeps_is_scaled_by_ecs_without_protection(cloud: Cloud) -> None:
    """ECS refuses managed termination protection while an instance is up that was not protected before."""
    node_group(cloud, SLEEPING)
    provider = cloud.resources["head-capacity-provider"].inputs["autoScalingGroupProvider"]
    assert (provider["managedScaling"]["status"], provider["managedScaling"]["maximumScalingStepSize"]) == (
        "ENABLED",
        1,
    )
    assert provider["managedTerminationProtection"] == "DISABLED"
    assert provider["managedDraining"] == "ENABLED"
    assert cloud.resources["head-group"].inputs["protectFromScaleIn"] is False


def test_group_has_the_ecs_managed_tag(cloud: Cloud) -> None:
    node_group(cloud, DEFAULTS)
    tag = {"key": "AmazonECSManaged", "value": "true", "propagateAtLaunch": True}
    assert cloud.resources["head-group"].inputs["tags"] == [tag]


def test_what_is_paid_for_is_counted(cloud: Cloud) -> None:
    node_group(cloud)
    assert cloud.resources["head-group"].inputs["enabledMetrics"] == [
        "GroupInServiceInstances",
        "GroupDesiredCapacity",
    ]


def test_fixed_size_disables_managed_scaling_but_drains(cloud: Cloud) -> None:
    group = node_group(cloud)
    assert cloud.resources["head-capacity-provider"].inputs["autoScalingGroupProvider"] == {
        "autoScalingGroupArn": cloud.value(group._group.arn),
        "managedScaling": {"status": "DISABLED"},
        "managedTerminationProtection": "DISABLED",
        "managedDraining": "ENABLED",
    }


def test_session_manager_policy_excludes_ssm_parameters(cloud: Cloud) -> None:
    node_group(cloud)
    assert not cloud.of_type("aws:iam/rolePolicyAttachment:RolePolicyAttachment")
    own, channels = json.loads(cloud.resources["head-instance-ssm"].inputs["policy"])["Statement"]
    assert own["Action"] == ["ssm:UpdateInstanceInformation"]
    assert own["Resource"] == f"arn:aws:ec2:{REGION}:{ACCOUNT}:instance/*"
    assert channels == {"Effect": "Allow", "Action": list(policies.SESSION_MANAGER), "Resource": "*"}
    for action in own["Action"] + channels["Action"]:
        assert "Parameter" not in action


def test_instances_start_after_what_they_need(cloud: Cloud) -> None:
    node_group(cloud)
    needs = cloud.needs("head-group")
    assert {"rule", "head-instance-ssm", "head-instance-profile"} <= needs


@pytest.mark.parametrize("args", [DEFAULTS, GPU], ids=["head", "workers"])
def test_instances_register_after_their_provider_is_associated(cloud: Cloud, args: dict[str, Any]) -> None:
    def program() -> None:
        group = build(args)
        association = pulumi.CustomResource("test:index:Association", "association", {"provider": group.provider_name})
        group.join_cluster(association)

    cloud.run(program)
    attached = cloud.resources["head-instance-ecs"]
    assert json.loads(attached.inputs["policy"]) == policies.ecs_agent(ECS_CLUSTER)
    assert attached.retain_on_delete
    assert cloud.resources["head-instance-role"].inputs["forceDetachPolicies"] is True
    assert {"association", "head-capacity-provider", "head-group"} <= cloud.needs("head-instance-ecs")
    assert cloud.resources["head-group"].inputs["waitForCapacityTimeout"] == "0"


@pytest.mark.parametrize(("zones", "number"), [(("us-west-2b",), 1), ((), 2)], ids=["a zone", "the state's"])
def test_placement_groups_are_deleted_after_their_instances(cloud: Cloud, zones: tuple[str, ...], number: int) -> None:
    node_group(cloud, {**GPU, "node": replace(GPU["node"], zones=zones)})
    groups = placement_groups(cloud).keys()
    assert len(groups) == number
    assert groups <= cloud.needs("head-group")


def instance_id(cloud: Cloud) -> pulumi.Output[str]:
    """The head's instance, looked up after its service."""
    return cloud.run(lambda: build().instance_id(pulumi.CustomResource("test:index:Service", "service", {})))


def test_the_instance_is_looked_up_by_its_group(cloud: Cloud) -> None:
    instance = instance_id(cloud)
    assert cloud.value(instance) == "i-0123456789abcdef0"
    (question,) = [args for token, args in cloud.calls if token.endswith(":getInstances")]
    assert question == {
        "filters": [{"name": "tag:aws:autoscaling:groupName", "values": ["head-group"]}],
        "instanceStateNames": ["pending", "running"],
    }


def test_a_missing_instance_is_a_warning(cloud: Cloud, warnings: list[str]) -> None:
    cloud.running = ()
    assert cloud.value(instance_id(cloud)) == ""
    assert warnings[0].startswith(
        "head_instance_id: EC2 has not started the head's instance yet; run `pulumi up` again"
    )


def test_configured_ami_is_used(cloud: Cloud) -> None:
    node = replace(GPU["node"], ami_id="ami-0123456789abcdef0")
    node_group(cloud, {**GPU, "node": node})
    assert cloud.resources["head-template"].inputs["imageId"] == "ami-0123456789abcdef0"


SEVERAL = (instance_type("g5.xlarge"), instance_type("g6.xlarge"))


def test_on_demand_types_are_prioritized(cloud: Cloud) -> None:
    node_group(cloud, {**GPU, "node": replace(GPU["node"], instances=SEVERAL)})
    group = cloud.resources["head-group"].inputs
    assert "launchTemplate" not in group
    policy = group["mixedInstancesPolicy"]
    assert [item["instanceType"] for item in policy["launchTemplate"]["overrides"]] == ["g5.xlarge", "g6.xlarge"]
    distribution = policy["instancesDistribution"]
    assert distribution["onDemandAllocationStrategy"] == "prioritized"
    assert distribution["onDemandPercentageAboveBaseCapacity"] == 100
    assert group["capacityRebalance"] is False


@pytest.mark.parametrize(("spot_count", "shares", "on_demand"), [(2, False, 0), (1, False, 1), (1, True, 0)])
def test_spot_instances_are_cheap_ones_that_last(cloud: Cloud, spot_count: int, shares: bool, on_demand: int) -> None:
    node_group(cloud, {**GPU, "node": replace(GPU["node"], spot_count=spot_count, shares=shares)})
    group = cloud.resources["head-group"].inputs
    distribution = group["mixedInstancesPolicy"]["instancesDistribution"]
    assert distribution["spotAllocationStrategy"] == "price-capacity-optimized"
    assert (distribution["onDemandBaseCapacity"], distribution["onDemandPercentageAboveBaseCapacity"]) == (on_demand, 0)
    assert group["capacityRebalance"] is False, "it would end instances that EC2 may never reclaim"


def test_workers_are_spread_over_zones_if_told_to(cloud: Cloud) -> None:
    spread = replace(GPU["node"], zones=("us-west-2b", "us-west-2a"), spread=True)
    node_group(cloud, {**GPU, "node": spread})
    group = cloud.resources["head-group"]
    assert group.inputs["vpcZoneIdentifiers"] == ["subnet-b", "subnet-a"]
    assert "placementGroup" not in group.inputs


def test_spot_instances_encrypt_disks_with_the_key(cloud: Cloud) -> None:
    security = SecurityOptions(kms_key_arn=f"arn:aws:kms:{REGION}:{ACCOUNT}:key/1")
    node_group(cloud, {**GPU, "node": replace(GPU["node"], spot_count=2), "security": security})
    grants = {item.name: item.inputs["granteePrincipal"] for item in cloud.of_type("aws:kms/grant:Grant")}
    roles = f"arn:aws:iam::{ACCOUNT}:role/aws-service-role"
    assert sorted(grants.values()) == [
        f"{roles}/autoscaling.amazonaws.com/AWSServiceRoleForAutoScaling",
        f"{roles}/spot.amazonaws.com/AWSServiceRoleForEC2Spot",
    ]
    assert {"head-disk-key", "head-spot-disk-key"} <= cloud.needs("head-group")
    operations = set(cloud.resources["head-disk-key"].inputs["operations"])
    assert {"CreateGrant", "GenerateDataKeyWithoutPlaintext", "Decrypt"} <= operations
    other = Cloud()
    node_group(other)
    assert not other.of_type("aws:kms/grant:Grant")
