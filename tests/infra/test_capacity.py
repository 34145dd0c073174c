"""Instances of one kind: how they start, what they may do, when they are replaced."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import pulumi
import pytest

from infra.capacity import Capacity, CapacityArgs
from infra.definitions import policies
from infra.definitions.user_data import user_data
from infra.references import AccountRules, Location, NetworkRef, ResourceRef
from tests.infra.fake_aws import ACCOUNT, ECS_CLUSTER, REGION, Cloud, instance_type, node_spec

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
    "rules": AccountRules(),
    "root_volume_gib": 100,
}
GPU: dict[str, Any] = {**DEFAULTS, "node": node_spec("g5.xlarge", 2, gpus=1), "managed_scaling": True}


def build(args: dict[str, Any] = DEFAULTS) -> Capacity:
    """Instances with valid defaults, in a network with a rule."""
    network = pulumi.ComponentResource("test:index:Network", "network")
    pulumi.CustomResource("test:index:Rule", "rule", {}, pulumi.ResourceOptions(parent=network))
    subnets = {f"us-west-2{letter}": pulumi.Output.from_input(f"subnet-{letter}") for letter in "ab"}
    tasks, instances = (pulumi.Output.from_input(f"sg-{kind}") for kind in ("tasks", "instances"))
    ref = NetworkRef(subnets=subnets, tasks_group_id=tasks, instances_group_id=instances, network=network)
    cluster = ResourceRef(name=pulumi.Output.from_input("ray-cluster"), arn=pulumi.Output.from_input(ECS_CLUSTER))
    return Capacity("head", CapacityArgs(cluster=cluster, network=ref, **args))


def capacity(cloud: Cloud, args: dict[str, Any] = DEFAULTS) -> Capacity:
    """The same, in an account."""
    return cloud.run(lambda: build(args))


def test_the_heads_group_has_one_instance(cloud: Cloud) -> None:
    capacity(cloud)
    group = cloud.resources["head-group"].inputs
    assert {group["minSize"], group["maxSize"], group["desiredCapacity"]} == {1.0}
    assert group["vpcZoneIdentifiers"] == ["subnet-b"], "nothing runs in the public subnet"
    assert group["forceDelete"] is True, "`destroy` would wait for instances that nobody needs any more"


def test_no_instances_are_allowed(cloud: Cloud) -> None:
    capacity(cloud, {**GPU, "node": node_spec("g5.xlarge", 0, gpus=1)})
    group = cloud.resources["head-group"].inputs
    assert {group["minSize"], group["maxSize"]} == {0.0}, "the stack costs no GPUs then"


def test_metadata_is_for_the_instance_alone(cloud: Cloud) -> None:
    capacity(cloud)
    assert cloud.resources["head-template"].inputs["metadataOptions"] == {
        "httpEndpoint": "enabled",
        "httpTokens": "required",
        "httpPutResponseHopLimit": 1.0,
    }, "a second hop would let a container take the instance's role"


def test_the_disk_is_encrypted_and_goes_with_its_instance(cloud: Cloud) -> None:
    capacity(cloud, {**DEFAULTS, "root_volume_gib": 200})
    (disk,) = cloud.resources["head-template"].inputs["blockDeviceMappings"]
    assert disk == {
        "deviceName": "/dev/xvda",
        "ebs": {"volumeSize": 200.0, "volumeType": "gp3", "encrypted": "true", "deleteOnTermination": "true"},
    }, "/dev/xvda is the image's root; under another name it would be a second, empty disk"


def test_instances_are_in_a_group_of_their_own(cloud: Cloud) -> None:
    capacity(cloud)
    template = cloud.resources["head-template"].inputs
    (interface,) = template["networkInterfaces"]
    assert interface["securityGroups"] == ["sg-instances"], "a task could reach what listens there"
    assert "vpcSecurityGroupIds" not in template, "EC2 refuses groups in both places"
    assert "keyName" not in template, "there is no SSH"


def test_no_instance_has_a_public_address_whatever_its_subnet_gives(cloud: Cloud) -> None:
    capacity(cloud)
    (interface,) = cloud.resources["head-template"].inputs["networkInterfaces"]
    assert interface["associatePublicIpAddress"] == "false", "a company's subnet may hand them out by itself"
    assert interface["deviceIndex"] == 0, "it is the instance's first interface"
    assert interface["deleteOnTermination"] == "true", "it would stay in the subnet and hold up its deletion"


def test_what_is_launched_is_tagged(cloud: Cloud) -> None:
    capacity(cloud)
    specifications = cloud.resources["head-template"].inputs["tagSpecifications"]
    tagged = {entry["resourceType"]: entry["tags"] for entry in specifications}
    assert tagged.keys() == {"instance", "volume", "network-interface"}, "cost reports go by tags"
    assert tagged["instance"] == {
        "Name": "dev-head-instance",
        "ray-on-ecs:project": "ray-on-ecs",
        "ray-on-ecs:stack": "dev",
    }


def test_user_data_reaches_the_instance_encoded(cloud: Cloud) -> None:
    capacity(cloud)
    encoded = cloud.resources["head-template"].inputs["userData"]
    assert base64.b64decode(encoded).decode() == user_data("ray-cluster"), "EC2 takes user data in base64"


def test_a_new_type_or_disk_replaces_the_head(cloud: Cloud) -> None:
    capacity(cloud)
    template, group = cloud.resources["head-template"], cloud.resources["head-group"]
    assert template.replace_on_changes == ("instanceType", "blockDeviceMappings"), (
        "tasks sized for the new type would never fit on the old instances"
    )
    assert group.inputs["launchTemplate"] == {"id": "head-template-id", "version": "$Latest"}, (
        "by its number, every image that AWS publishes would stop a running job"
    )
    assert group.inputs["instanceRefresh"] == {
        "strategy": "Rolling",
        "triggers": ["vpc_zone_identifier"],
        "preferences": {"minHealthyPercentage": 0.0, "scaleInProtectedInstances": "Refresh"},
    }, "the number leaves no room for a new instance beside the old one, and a protected one would never go"


@pytest.mark.parametrize(
    "change",
    [
        {"node": replace(GPU["node"], instances=(instance_type("g5.xlarge"), instance_type("g6.xlarge")))},
        {"node": replace(GPU["node"], spot_count=2)},
        {"root_volume_gib": 200},
    ],
    ids=["another type", "spot", "disk"],
)
def test_updates_replace_no_running_worker(cloud: Cloud, change: dict[str, Any]) -> None:
    capacity(cloud, {**GPU, **change})
    assert "instanceRefresh" not in cloud.resources["head-group"].inputs, "a refresh also ends protected instances"


def test_the_role_is_for_instances(cloud: Cloud) -> None:
    capacity(cloud)
    (role,) = cloud.of_type("aws:iam/role:Role")
    (statement,) = json.loads(role.inputs["assumeRolePolicy"])["Statement"]
    assert statement["Principal"] == {"Service": "ec2.amazonaws.com"}, "only instances take it on"


def test_gpu_instances_stand_next_to_each_other_in_whichever_zone(cloud: Cloud) -> None:
    capacity(cloud, GPU)
    groups = cloud.of_type("aws:ec2/placementGroup:PlacementGroup")
    assert {each.name: each.inputs["strategy"] for each in groups} == {
        "head-placement-us-west-2a": "cluster",
        "head-placement-us-west-2b": "cluster",
    }, "one that has instances can't leave its zone"
    assert cloud.resources["head-group"].inputs["placementGroup"] == "head-placement-us-west-2b"


def test_a_single_gpu_instance_stands_alone(cloud: Cloud) -> None:
    capacity(cloud, {**GPU, "node": node_spec("g5.xlarge", 1, gpus=1)})
    assert "placementGroup" not in cloud.resources["head-group"].inputs, "it would only narrow the choice"
    assert len(cloud.of_type("aws:ec2/placementGroup:PlacementGroup")) == 2, (
        "a group whose instances have not all gone yet can't be deleted"
    )


def test_the_head_stands_alone(cloud: Cloud) -> None:
    capacity(cloud)
    assert cloud.of_type("aws:ec2/placementGroup:PlacementGroup") == [], "a group of one only narrows the choice"
    assert "placementGroup" not in cloud.resources["head-group"].inputs


def test_ecs_moves_a_managed_number_and_nobody_else_does(cloud: Cloud) -> None:
    capacity(cloud, GPU)
    group = cloud.resources["head-group"].inputs
    assert (group["minSize"], group["maxSize"]) == (0, 2), "instances are there only while tasks want them"
    assert "desiredCapacity" not in group, "`pulumi up` would put back its own number"
    assert group["protectFromScaleIn"] is True, "ECS refuses managed termination protection without it"
    provider = cloud.resources["head-capacity-provider"].inputs["autoScalingGroupProvider"]
    assert provider["managedScaling"] == {
        "status": "ENABLED",
        "targetCapacity": 100.0,
        "minimumScalingStepSize": 1.0,
        "instanceWarmupPeriod": 60.0,
        "maximumScalingStepSize": 2.0,
    }, "below 100 ECS keeps GPUs that nobody uses"
    assert provider["managedTerminationProtection"] == "ENABLED", "an instance with a running task would go"


def test_the_tag_that_ecs_adds_is_there_from_the_start(cloud: Cloud) -> None:
    capacity(cloud, DEFAULTS)
    tags = {tag["key"]: tag for tag in cloud.resources["head-group"].inputs["tags"]}
    assert tags["AmazonECSManaged"] == {"key": "AmazonECSManaged", "value": "true", "propagateAtLaunch": True}, (
        "every second `pulumi up` would take it away again, and ECS stops no instance without it"
    )
    assert not tags["ray-on-ecs:stack"]["propagateAtLaunch"], "the template says the others"


def test_what_is_paid_for_is_counted(cloud: Cloud) -> None:
    capacity(cloud)
    assert cloud.resources["head-group"].inputs["enabledMetrics"] == [
        "GroupInServiceInstances",
        "GroupDesiredCapacity",
    ], "scaling reads them"


def test_ecs_does_not_scale_a_fixed_number_and_drains_what_leaves(cloud: Cloud) -> None:
    made = capacity(cloud)
    assert cloud.resources["head-capacity-provider"].inputs["autoScalingGroupProvider"] == {
        "autoScalingGroupArn": cloud.value(made._group.arn),
        "managedScaling": {"status": "DISABLED"},
        "managedTerminationProtection": "DISABLED",
        "managedDraining": "ENABLED",
    }, "an instance that leaves would take its task along without a SIGTERM, and with it the last steps"


def test_whoever_opens_a_session_reads_no_parameter_of_the_account(cloud: Cloud) -> None:
    capacity(cloud)
    assert not cloud.of_type("aws:iam/rolePolicyAttachment:RolePolicyAttachment"), "ECS's policy comes later"
    own, channels = json.loads(cloud.resources["head-instance-ssm"].inputs["policy"])["Statement"]
    assert own["Action"] == ["ssm:UpdateInstanceInformation"]
    assert own["Resource"] == f"arn:aws:ec2:{REGION}:{ACCOUNT}:instance/*"
    assert channels == {"Effect": "Allow", "Action": list(policies.SESSION_MANAGER), "Resource": "*"}
    for action in own["Action"] + channels["Action"]:
        assert "Parameter" not in action, "others' secrets are among them"


def test_instances_start_after_what_they_need(cloud: Cloud) -> None:
    capacity(cloud)
    needs = cloud.needs("head-group")
    assert {"rule", "head-instance-ssm", "head-instance-profile"} <= needs, (
        "without them an instance neither joins the cluster nor reports its tasks stopped"
    )


@pytest.mark.parametrize("args", [DEFAULTS, GPU], ids=["head", "workers"])
def test_instances_register_after_their_provider_is_associated(cloud: Cloud, args: dict[str, Any]) -> None:
    def program() -> None:
        made = build(args)
        association = pulumi.CustomResource("test:index:Association", "association", {"provider": made.provider_name})
        made.join_cluster(association)

    cloud.run(program)
    attached = cloud.resources["head-instance-ecs"]
    assert json.loads(attached.inputs["policy"]) == policies.ecs_agent(ECS_CLUSTER), "what the agent registers with"
    assert attached.retain_on_delete, "`destroy` would cut the agents off before their instances end"
    assert cloud.resources["head-instance-role"].inputs["forceDetachPolicies"] is True, "it goes with the role"
    assert {"association", "head-capacity-provider", "head-group"} <= cloud.needs("head-instance-ecs")
    assert cloud.resources["head-group"].inputs["waitForCapacityTimeout"] == "0", "`up` goes on to the provider"


@pytest.mark.parametrize("zones", [("us-west-2b",), ("us-west-2b", "us-west-2a")])
def test_placement_groups_are_deleted_after_their_instances(cloud: Cloud, zones: tuple[str, ...]) -> None:
    capacity(cloud, {**GPU, "node": replace(GPU["node"], zones=zones)})
    groups = {each.name for each in cloud.of_type("aws:ec2/placementGroup:PlacementGroup")}
    assert len(groups) == 2
    assert groups <= cloud.needs("head-group"), "a job may have moved the instances into either"


def instance_id(cloud: Cloud) -> pulumi.Output[str]:
    """The head's instance, looked up after its service."""
    return cloud.run(lambda: build().instance_id(pulumi.CustomResource("test:index:Service", "service", {})))


def test_the_instance_is_looked_up_by_its_group(cloud: Cloud) -> None:
    instance = instance_id(cloud)
    assert cloud.value(instance) == "i-0123456789abcdef0", "the commands need an instance to go to"
    (question,) = [args for token, args in cloud.calls if token.endswith(":getInstances")]
    assert question == {
        "filters": [{"name": "tag:aws:autoscaling:groupName", "values": ["head-group"]}],
        "instanceStateNames": ["pending", "running"],
    }, "without the filter any instance of the account would do"


def test_a_missing_instance_is_a_warning(cloud: Cloud, warnings: list[str]) -> None:
    cloud.running = ()
    assert cloud.value(instance_id(cloud)) == "", "the next `up` finds it"
    assert warnings[0].startswith(
        "head_instance_id: EC2 has not started the head's instance yet; run `pulumi up` again"
    )


def test_a_preview_does_not_ask_for_instances_that_do_not_exist(cloud: Cloud) -> None:
    cloud.preview = True
    instance = instance_id(cloud)
    assert cloud.value(instance) is None, "the output stays unknown until the group is there"
    assert not [token for token, _ in cloud.calls if token.endswith(":getInstances")], "there is nothing to find"


def test_a_machine_image_that_is_given_is_taken(cloud: Cloud) -> None:
    given = replace(GPU["node"], ami_id="ami-0123456789abcdef0")
    capacity(cloud, {**GPU, "node": given})
    assert cloud.resources["head-template"].inputs["imageId"] == "ami-0123456789abcdef0"


SEVERAL = (instance_type("g5.xlarge"), instance_type("g6.xlarge"))


def test_of_several_types_the_first_that_ec2_has_is_taken(cloud: Cloud) -> None:
    capacity(cloud, {**GPU, "node": replace(GPU["node"], instances=SEVERAL)})
    group = cloud.resources["head-group"].inputs
    assert "launchTemplate" not in group, "EC2 Auto Scaling refuses both"
    policy = group["mixedInstancesPolicy"]
    assert [each["instanceType"] for each in policy["launchTemplate"]["overrides"]] == ["g5.xlarge", "g6.xlarge"]
    distribution = policy["instancesDistribution"]
    assert distribution["onDemandAllocationStrategy"] == "prioritized", "the order is the preference"
    assert distribution["onDemandPercentageAboveBaseCapacity"] == 100, "nobody has asked for spot"
    assert group["capacityRebalance"] is False


@pytest.mark.parametrize(("spot_count", "on_demand"), [(2, 0), (1, 1)])
def test_spot_instances_are_cheap_ones_that_last(cloud: Cloud, spot_count: int, on_demand: int) -> None:
    capacity(cloud, {**GPU, "node": replace(GPU["node"], spot_count=spot_count)})
    group = cloud.resources["head-group"].inputs
    distribution = group["mixedInstancesPolicy"]["instancesDistribution"]
    assert distribution["spotAllocationStrategy"] == "price-capacity-optimized"
    assert (distribution["onDemandBaseCapacity"], distribution["onDemandPercentageAboveBaseCapacity"]) == (on_demand, 0)
    assert group["capacityRebalance"] is True, "the next one starts before EC2 takes this one"


def test_workers_of_a_job_are_in_one_zone_and_may_move_on(cloud: Cloud) -> None:
    zones = ("us-west-2b", "us-west-2a")
    capacity(cloud, {**GPU, "node": replace(GPU["node"], zones=zones)})
    group = cloud.resources["head-group"]
    assert group.inputs["vpcZoneIdentifiers"] == ["subnet-b"], "between zones all-reduce is slow, and AWS charges it"
    assert group.inputs["placementGroup"] == "head-placement-us-west-2b"
    assert group.ignore_changes == ("vpcZoneIdentifiers", "placementGroup"), "`up --refresh` would move a job back"


def test_workers_are_spread_over_zones_if_told_to(cloud: Cloud) -> None:
    spread = replace(GPU["node"], zones=("us-west-2b", "us-west-2a"), spread=True)
    capacity(cloud, {**GPU, "node": spread})
    group = cloud.resources["head-group"]
    assert group.inputs["vpcZoneIdentifiers"] == ["subnet-b", "subnet-a"]
    assert "placementGroup" not in group.inputs, "a placement group is in one zone"
    assert group.ignore_changes == (), "nobody moves them"


def test_roles_and_disks_keep_the_accounts_rules(cloud: Cloud) -> None:
    key = f"arn:aws:kms:{REGION}:{ACCOUNT}:key/1"
    boundary = f"arn:aws:iam::{ACCOUNT}:policy/boundary"
    rules = AccountRules(permissions_boundary=boundary, role_path="/teams/ml/", kms_key_arn=key)
    capacity(cloud, {**DEFAULTS, "rules": rules})
    role = cloud.resources["head-instance-role"].inputs
    assert (role["permissionsBoundary"], role["path"]) == (boundary, "/teams/ml/")
    (disk,) = cloud.resources["head-template"].inputs["blockDeviceMappings"]
    assert disk["ebs"]["kmsKeyId"] == key
    grant = cloud.resources["head-disk-key"].inputs
    assert grant["granteePrincipal"].endswith(
        ":role/aws-service-role/autoscaling.amazonaws.com/AWSServiceRoleForAutoScaling"
    )
    assert {"CreateGrant", "GenerateDataKeyWithoutPlaintext", "Decrypt"} <= set(grant["operations"])
    assert "head-disk-key" in cloud.needs("head-group"), "instances would end as soon as they start"
    other = Cloud()
    capacity(other)
    assert not other.of_type("aws:kms/grant:Grant"), "AWS's own key lets the account use it"
