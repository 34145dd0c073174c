"""VPC, endpoints and security groups."""

from __future__ import annotations

import ipaddress
import json
import re

import pytest

from infra.definitions import commands, policies
from infra.network import INTERFACE_ENDPOINTS, WITHOUT_POLICY, Network, NetworkArgs
from infra.types import ExistingNetwork, Location
from tests.infra.fake_aws import ACCOUNT, REGION, Cloud, Registered

SHARED_TAGS = {"ray-on-ecs:project": "ray-on-ecs", "ray-on-ecs:stack": "dev"}


EXISTING = ExistingNetwork(vpc_id="vpc-0a1b", subnets={"us-west-2b": "subnet-0c2d"})
ZONES = ("us-west-2a", "us-west-2b", "us-west-2c")


def network(
    cloud: Cloud,
    vpc_cidr: str = "10.0.0.0/16",
    existing: ExistingNetwork | None = None,
    zones: tuple[str, ...] = ZONES,
    worker_zones: tuple[str, ...] = ("us-west-2b",),
    nat_gateway: bool = True,
    reads_secrets: bool = False,
) -> Network:
    """A network with valid defaults."""
    location = Location(
        partition="aws", account=ACCOUNT, region=REGION, worker_zones=worker_zones, zones=zones, existing=existing
    )
    args = NetworkArgs(
        vpc_cidr=vpc_cidr,
        location=location,
        cluster_name="ray-c0ffee",
        nat_gateway=nat_gateway,
        reads_secrets=reads_secrets,
    )
    return cloud.run(lambda: Network("network", args))


def test_vpc_has_zonal_subnets_and_one_nat_gateway(cloud: Cloud) -> None:
    network(cloud)
    vpc = cloud.resources["network-vpc"].inputs
    assert vpc == {
        "cidrBlock": "10.0.0.0/16",
        "availabilityZoneNames": list(ZONES),
        "subnetStrategy": "Auto",
        "subnetSpecs": [
            {"type": "Private", "name": "private", "cidrMask": 19.0},
            {"type": "Public", "name": "public", "cidrMask": 28.0},
        ],
        "natGateways": {"strategy": "Single"},
        "enableDnsHostnames": True,
        "enableDnsSupport": True,
        "tags": SHARED_TAGS,
    }


def test_s3_gateway_endpoint_serves_every_route_table(cloud: Cloud) -> None:
    network(cloud)
    assert cloud.resources["network-s3"].inputs == {
        "vpcId": "vpc-1",
        "serviceName": "com.amazonaws.us-west-2.s3",
        "vpcEndpointType": "Gateway",
        "routeTableIds": [f"rtb-{zone}" for zone in ZONES],
        "policy": json.dumps(policies.open_endpoint()),
        "tags": {"Name": "dev-network-s3", **SHARED_TAGS},
    }


@pytest.mark.parametrize("vpc_cidr", ["10.0.0.0/16", "192.168.4.0/24"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 6])
def test_subnets_fit_the_smallest_and_largest_vpc(cloud: Cloud, vpc_cidr: str, count: int) -> None:
    network(cloud, vpc_cidr, zones=("us-west-2b", *(f"us-west-2{letter}" for letter in "acdef"[: count - 1])))
    private, public = (int(spec["cidrMask"]) for spec in cloud.resources["network-vpc"].inputs["subnetSpecs"])
    # awsx divides the VPC into equal blocks, one per zone; it rounds their number up to a power of 2.
    block = ipaddress.ip_network(vpc_cidr).prefixlen + (count - 1).bit_length()
    assert private > block
    assert block < public == 28


TASKS, INSTANCES, ENDPOINTS = (f"network-{kind}-group-id" for kind in ("tasks", "instances", "endpoints"))


def admitted(cloud: Cloud) -> dict[tuple[str, str], set[int | None]]:
    """The ports by which the members of one group reach another; None is all of them."""
    ports: dict[tuple[str, str], set[int | None]] = {}
    for resource in cloud.of_type("aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule"):
        rule = resource.inputs
        assert rule.keys().isdisjoint({"cidrIpv4", "cidrIpv6", "prefixListId"})
        assert rule["ipProtocol"] == ("tcp" if "fromPort" in rule else "-1")
        assert rule.get("fromPort") == rule.get("toPort")
        pair = rule["referencedSecurityGroupId"], rule["securityGroupId"]
        ports.setdefault(pair, set()).add(rule.get("fromPort"))
    return ports


def test_tasks_reach_tasks_and_instances_two_ports_of_tasks(cloud: Cloud) -> None:
    network(cloud)
    assert admitted(cloud) == {(TASKS, TASKS): {None}, (INSTANCES, TASKS): {8265, 8888}}


def test_instances_forward_what_the_session_document_allows(cloud: Cloud) -> None:
    network(cloud)
    allowed = commands.forwarding()["parameters"]["portNumber"]["allowedPattern"]
    assert all(re.fullmatch(allowed, f"{port:.0f}") for port in admitted(cloud)[INSTANCES, TASKS])


def test_ec2_takes_the_descriptions(cloud: Cloud) -> None:
    """https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_CreateSecurityGroup.html."""
    network(cloud, nat_gateway=False)
    made = [
        resource
        for resource in cloud.resources.values()
        if "securityGroup" in resource.type and "description" in resource.inputs
    ]
    assert made
    for resource in made:
        assert re.fullmatch(r"[a-zA-Z0-9. _\-:/()#,@\[\]+=&;{}!$*]{1,255}", resource.inputs["description"]), (
            resource.name
        )


def test_the_default_group_of_the_vpc_is_closed(cloud: Cloud) -> None:
    network(cloud)
    default = cloud.resources["network-default-group"].inputs
    assert default["vpcId"] == "vpc-1"
    assert default.keys().isdisjoint({"ingress", "egress"})


def test_everything_may_be_reached_from_inside(cloud: Cloud) -> None:
    network(cloud)
    for kind in ("tasks", "instances"):
        egress = cloud.resources[f"network-{kind}-egress"].inputs
        assert egress["securityGroupId"] == f"network-{kind}-group-id"
        assert egress["cidrIpv4"] == "0.0.0.0/0"
        assert egress["ipProtocol"] == "-1"


def test_network_exposes_private_subnets(cloud: Cloud) -> None:
    made = network(cloud)
    assert cloud.value(made.ref.subnets["us-west-2b"]) == "subnet-private-us-west-2b"
    assert cloud.value(made.vpc_id) == "vpc-1"
    assert cloud.value(made.ref.tasks_group_id) == TASKS
    assert cloud.value(made.ref.instances_group_id) == INSTANCES


def test_existing_network_is_not_changed(cloud: Cloud) -> None:
    made = network(cloud, existing=EXISTING)
    assert cloud.value(made.vpc_id) == "vpc-0a1b"
    assert made.ref.subnets == {"us-west-2b": "subnet-0c2d"}
    types = {resource.type.rpartition(":")[2] for resource in cloud.resources.values()}
    assert types == {"Network", "SecurityGroup", "SecurityGroupIngressRule", "SecurityGroupEgressRule"}
    groups = cloud.of_type("aws:ec2/securityGroup:SecurityGroup")
    assert [resource.inputs["vpcId"] for resource in groups] == ["vpc-0a1b"] * 2


def test_task_security_group_tags_hold_cluster_and_zones(cloud: Cloud) -> None:
    network(cloud)
    assert cloud.resources["network-tasks-group"].inputs["tags"] == {
        "Name": "dev-network-tasks-group",
        "ray-on-ecs:cluster": "ray-c0ffee",
        "ray-on-ecs:zone": "us-west-2b",
        "ray-on-ecs:zones": "us-west-2a us-west-2b us-west-2c",
        **SHARED_TAGS,
    }


def test_of_an_existing_network_it_remembers_no_zones(cloud: Cloud) -> None:
    network(cloud, existing=EXISTING)
    tags = cloud.resources["network-tasks-group"].inputs["tags"]
    assert tags["ray-on-ecs:zone"] == "us-west-2b"
    assert "ray-on-ecs:zones" not in tags


def test_interface_endpoints_cover_the_worker_zones(cloud: Cloud) -> None:
    network(cloud, worker_zones=("us-west-2b", "us-west-2a"), nat_gateway=False)
    with_gateway = Cloud()
    network(with_gateway)
    vpc, other = (item.resources["network-vpc"].inputs for item in (cloud, with_gateway))
    assert vpc["natGateways"] == {"strategy": "None"}
    assert vpc["subnetSpecs"] == other["subnetSpecs"]
    made = cloud.of_type("aws:ec2/vpcEndpoint:VpcEndpoint")
    endpoints = [resource for resource in made if resource.inputs["vpcEndpointType"] == "Interface"]
    assert len(endpoints) == len(made) - 1
    assert {resource.inputs["serviceName"] for resource in endpoints} == {
        f"com.amazonaws.us-west-2.{service}" for service in INTERFACE_ENDPOINTS
    }
    for resource in endpoints:
        assert resource.inputs["privateDnsEnabled"] is True
        assert resource.inputs["securityGroupIds"] == [ENDPOINTS]
        assert resource.inputs["subnetIds"] == ["subnet-private-us-west-2b", "subnet-private-us-west-2a"]
    assert len(with_gateway.of_type("aws:ec2/vpcEndpoint:VpcEndpoint")) == 1


def test_job_secrets_add_a_secrets_manager_endpoint(cloud: Cloud) -> None:
    network(cloud, nat_gateway=False, reads_secrets=True)
    made = {resource.inputs["serviceName"] for resource in endpoints(cloud)}
    assert {f"com.amazonaws.us-west-2.{service}" for service in ("ssm", "secretsmanager")} <= made


def test_endpoint_policies_restrict_to_the_account(cloud: Cloud) -> None:
    network(cloud, nat_gateway=False)
    made = {
        resource.inputs["serviceName"].removeprefix("com.amazonaws.us-west-2."): resource.inputs
        for resource in endpoints(cloud)
    }
    limited = {service for service, inputs in made.items() if "policy" in inputs}
    assert made.keys() - limited == WITHOUT_POLICY
    assert {"s3", "logs", "ssm"} < limited
    for service in limited:
        first, *_ = json.loads(made[service]["policy"])["Statement"]
        assert first["Condition"] == {"StringEquals": {"aws:PrincipalAccount": ACCOUNT}}


def endpoints(cloud: Cloud) -> list[Registered]:
    """The VPC endpoints."""
    return cloud.of_type("aws:ec2/vpcEndpoint:VpcEndpoint")


def test_endpoints_admit_https_from_tasks_and_instances(cloud: Cloud) -> None:
    network(cloud, nat_gateway=False)
    ports = admitted(cloud)
    assert ports[TASKS, ENDPOINTS] == ports[INSTANCES, ENDPOINTS] == {443}
    assert ENDPOINTS not in {source for source, _ in ports}


def test_other_partitions_look_up_endpoint_services(cloud: Cloud) -> None:
    location = Location(partition="aws-cn", account=ACCOUNT, region=REGION, worker_zones=ZONES[:1], zones=ZONES)
    args = NetworkArgs(vpc_cidr="10.0.0.0/16", location=location, cluster_name="ray", nat_gateway=False)
    cloud.run(lambda: Network("network", args))
    made = [resource.inputs["serviceName"] for resource in cloud.of_type("aws:ec2/vpcEndpoint:VpcEndpoint")]
    assert {*made} == {
        f"com.amazonaws.{REGION}.s3",
        *(f"cn.com.amazonaws.{REGION}.{service}" for service in INTERFACE_ENDPOINTS),
    }
