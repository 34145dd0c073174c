"""NAT instance: its group, its interface, its role, and the alarms that stop and start it with the head."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from infra.definitions import nat, policies
from infra.definitions.nat import PrivateInterface, user_data
from infra.nat_sleep import NatSleep, NatSleepArgs
from infra.network import Network, NetworkArgs
from infra.types import Location, ResourceRef, SecurityOptions
from tests.infra.fake_aws import ACCOUNT, CLUSTER, REGION, Cloud, later
from tests.infra.stacks import deployed
from tests.infra.test_network import ZONES
from tests.metric_math import evaluate

NAT = "network-vpc-nat"
KEY = f"arn:aws:kms:{REGION}:{ACCOUNT}:key/1a2b"


def network(cloud: Cloud, *, sleeps: bool = False, **security: Any) -> Network:
    """A network with a NAT instance, of a head in another zone."""
    location = Location(partition="aws", account=ACCOUNT, region=REGION, worker_zones=("us-west-2b",), zones=ZONES)
    args = NetworkArgs(
        vpc_cidr="10.0.0.0/16",
        location=location,
        zone="us-west-2b",
        nat_zone=later("us-west-2c"),
        nat_instance=True,
        sleeps=sleeps,
        security=SecurityOptions(**security),
    )
    return cloud.run(lambda: Network("network", args))


def test_private_subnets_lead_to_the_nat_instances_interface(cloud: Cloud) -> None:
    network(cloud)
    out = cloud.resources["network-vpc-private-route"].inputs
    assert out == {
        "routeTableId": "network-vpc-private-routes-id",
        "destinationCidrBlock": "0.0.0.0/0",
        "networkInterfaceId": f"{NAT}-interface-id",
    }
    interface = cloud.resources[f"{NAT}-interface"]
    assert interface.inputs["subnetId"] == "network-vpc-private-us-west-2c-subnet-id"
    assert interface.inputs["sourceDestCheck"] is False
    assert interface.ignore_changes == ("attachments",)
    assert cloud.resources["network-vpc-s3"].inputs["routeTableIds"] == ["network-vpc-private-routes-id"]
    types = {resource.type.rpartition(":")[2] for resource in cloud.resources.values()}
    assert types.isdisjoint({"NatGateway", "Eip"})


def test_the_group_keeps_one_nat_instance_in_the_public_subnet(cloud: Cloud) -> None:
    network(cloud)
    group = cloud.resources[f"{NAT}-group"]
    assert {key: group.inputs[key] for key in ("minSize", "maxSize", "desiredCapacity", "vpcZoneIdentifiers")} == {
        "minSize": 1,
        "maxSize": 1,
        "desiredCapacity": 1,
        "vpcZoneIdentifiers": ["network-vpc-public-subnet-id"],
    }
    assert group.ignore_changes == ()
    # It boots with its way out, its rights and its rules, and ends before they do.
    before = {"network-vpc-public-route", "network-vpc-internet", f"{NAT}-attach", f"{NAT}-ingress", f"{NAT}-egress"}
    assert before <= cloud.needs(f"{NAT}-group")
    assert f"{NAT}-group" in cloud.needs("network-vpc-private-route")


def test_alarms_alone_set_the_number_of_a_nat_instance_that_sleeps(cloud: Cloud) -> None:
    network(cloud, sleeps=True)
    group = cloud.resources[f"{NAT}-group"]
    assert (group.inputs["minSize"], group.inputs["maxSize"], group.inputs["desiredCapacity"]) == (0, 1, 1)
    assert group.ignore_changes == ("desiredCapacity",)


def test_nat_instance_has_a_public_address_and_no_key(cloud: Cloud) -> None:
    network(cloud)
    template = cloud.resources[f"{NAT}-template"].inputs
    assert (template["instanceType"], template["imageId"]) == (
        "t4g.nano",
        "resolve:ssm:/aws/service/ecs/optimized-ami/amazon-linux-2023/arm64/recommended/image_id",
    )
    [first] = template["networkInterfaces"]
    assert first == {
        "deviceIndex": 0,
        "associatePublicIpAddress": "true",
        "securityGroups": [f"{NAT}-traffic-group-id"],
        "deleteOnTermination": "true",
    }
    assert "keyName" not in template
    assert template["metadataOptions"] == {
        "httpEndpoint": "enabled",
        "httpTokens": "required",
        "httpPutResponseHopLimit": 1,
    }
    [disk] = template["blockDeviceMappings"]
    assert disk["ebs"] == {
        "volumeSize": 30,
        "volumeType": "gp3",
        "encrypted": "true",
        "deleteOnTermination": "true",
    }
    assert template["creditSpecification"] == {"cpuCredits": "unlimited"}


def test_nat_instance_forwards_for_the_vpc_alone(cloud: Cloud) -> None:
    network(cloud)
    rules = {name: cloud.resources[f"{NAT}-{name}"].inputs for name in ("ingress", "egress")}
    assert {name: (rule["cidrIpv4"], rule["ipProtocol"]) for name, rule in rules.items()} == {
        "ingress": ("10.0.0.0/16", "-1"),
        "egress": ("0.0.0.0/0", "-1"),
    }
    assert {rule["securityGroupId"] for rule in rules.values()} == {f"{NAT}-traffic-group-id"}
    assert cloud.resources[f"{NAT}-interface"].inputs["securityGroups"] == [f"{NAT}-traffic-group-id"]


def test_user_data_names_the_interface(cloud: Cloud) -> None:
    network(cloud)
    private = PrivateInterface(
        interface_id=f"{NAT}-interface-id",
        mac="02:00:00:00:00:02",
        address="10.0.64.10",
        subnet="10.0.64.0/19",
        vpc="10.0.0.0/16",
    )
    made = base64.b64decode(cloud.resources[f"{NAT}-template"].inputs["userData"]).decode()
    assert made == user_data(private)
    assert len(made) < 16384


def test_nat_instances_role_has_one_permission(cloud: Cloud) -> None:
    network(cloud)
    [policy] = cloud.of_type("aws:iam/rolePolicy:RolePolicy")
    arn = f"arn:aws:service:{REGION}:{ACCOUNT}:{NAT}"
    expected = policies.nat_instance(interface_arn=f"{arn}-interface", profile_arn=f"{arn}-profile")
    assert json.loads(policy.inputs["policy"]) == expected
    assert not cloud.of_type("aws:iam/rolePolicyAttachment:RolePolicyAttachment")


def test_nat_instance_follows_the_companys_rules() -> None:
    cloud = deployed("NAT instance")
    role = cloud.resources[f"{NAT}-role"].inputs
    assert (role["path"], role["permissionsBoundary"]) == ("/teams/ml/", f"arn:aws:iam::{ACCOUNT}:policy/boundary")
    assert cloud.resources[f"{NAT}-profile"].inputs["path"] == "/teams/ml/"
    [disk] = cloud.resources[f"{NAT}-template"].inputs["blockDeviceMappings"]
    assert disk["ebs"]["kmsKeyId"] == KEY
    needed = cloud.needs(f"{NAT}-group")
    assert f"{NAT}-disk-key" in needed
    assert any(name.startswith(f"{NAT}-role-session-key") for name in needed)


def test_nat_instance_outlives_the_instances_that_need_it() -> None:
    cloud = deployed("NAT instance")
    for name in ("head-group", "workers-group", "ray-head-service", "ray-workers-service"):
        assert {f"{NAT}-group", f"{NAT}-attach", "network-vpc-private-route"} <= cloud.needs(name)
    for kind in ("start", "stop"):
        assert "head-group" in cloud.needs(f"nat-sleep-{kind}-alarm")


@pytest.mark.parametrize(("stack", "starts_nat"), [("NAT instance", True), ("sleeping", False)])
def test_wake_of_the_head_starts_its_nat_instance(stack: str, starts_nat: bool) -> None:
    actions = deployed(stack).resources["head-sleep-wake-alarm"].inputs["alarmActions"]
    started = [arn.rpartition(f":{CLUSTER}-")[2] for arn in actions]
    assert started == [
        "head-sleep-wake-policy",
        "head-sleep-instance-policy",
        *(["nat-sleep-start-policy"] if starts_nat else []),
    ]


@pytest.fixture
def asleep(cloud: Cloud) -> Cloud:
    """The alarms of a NAT instance, by their logical names."""

    def program() -> None:
        head, own = (ResourceRef(name=later(name), arn=later(f"arn:{name}")) for name in ("head-group", "nat-group"))
        NatSleep("sleep", NatSleepArgs(cluster=later("ray"), head_group=head, nat_group=own))

    cloud.run(program)
    return cloud


def capacity(cloud: Cloud, **minute: float) -> int | None:
    """The capacity that an alarm's policy sets while each minute has these values."""
    value = evaluate(nat.NEEDED, {"requested": None, "instances": None, "wanted": None, **minute})
    assert value is None or value >= 0
    for kind in ("start", "stop"):
        alarm, policy = (cloud.resources[f"sleep-{kind}-{part}"].inputs for part in ("alarm", "policy"))
        assert next(query for query in alarm["metricQueries"] if query.get("returnData"))["expression"] == nat.NEEDED
        assert (alarm["treatMissingData"], alarm["alarmActions"]) == (
            "notBreaching",
            [f"arn:aws:service:{REGION}:{ACCOUNT}:sleep-{kind}-policy"],
        )
        is_below = alarm["comparisonOperator"] == "LessThanThreshold"
        if value is None or (value < alarm["threshold"]) != is_below:
            continue
        # Bounds are relative to the threshold, the lower is included, and the upper is not.
        [step] = policy["stepAdjustments"]
        lower, upper = (float(step.get(f"metricInterval{end}Bound", limit)) for end, limit in ENDS)
        assert lower <= value - alarm["threshold"] < upper
        assert (policy["adjustmentType"], policy["autoscalingGroupName"]) == ("ExactCapacity", "nat-group")
        return int(step["scalingAdjustment"])
    return None


ENDS = (("Lower", "-inf"), ("Upper", "inf"))


@pytest.mark.parametrize(
    ("minute", "number"),
    [
        ({"instances": 1, "wanted": 1}, 1),
        ({"instances": 0, "wanted": 1}, 1),  # it starts
        ({"instances": 1, "wanted": 0}, 1),  # it ends
        ({"requested": 1, "instances": 0, "wanted": 0}, 1),
        ({"requested": 1}, 1),
        ({"requested": 0, "instances": 0, "wanted": 0}, 0),
        ({"instances": 0, "wanted": 0}, 0),
        ({"wanted": 0}, 0),
        ({"wanted": 1}, 1),
        ({}, None),
    ],
)
def test_nat_instance_runs_while_the_head_needs_it(asleep: Cloud, minute: dict[str, float], number: int | None) -> None:
    assert capacity(asleep, **minute) == number


def test_nat_instance_starts_at_once_and_stops_late(asleep: Cloud) -> None:
    start, stop = (asleep.resources[f"sleep-{kind}-alarm"].inputs for kind in ("start", "stop"))
    assert (start["name"], start["evaluationPeriods"]) == ("ray-nat-start", 1)
    # ECS takes some 15 minutes to end an instance without a task.
    assert (stop["name"], stop["evaluationPeriods"] > 15) == ("ray-nat-stop", True)
    for alarm in (start, stop):
        metrics = [query["metric"] for query in alarm["metricQueries"] if "metric" in query]
        assert {metric["period"] for metric in metrics} == {60}
        assert [(metric["namespace"], metric["metricName"], metric["dimensions"]) for metric in metrics] == [
            ("ray-on-ecs/ray", "HeadRequested", {}),
            ("AWS/AutoScaling", "GroupInServiceInstances", {"AutoScalingGroupName": "head-group"}),
            ("AWS/AutoScaling", "GroupDesiredCapacity", {"AutoScalingGroupName": "head-group"}),
        ]


def test_a_nat_instance_without_sleep_has_no_alarm(cloud: Cloud) -> None:
    network(cloud)
    assert not cloud.of_type("aws:cloudwatch/metricAlarm:MetricAlarm")
