"""VPC, endpoints and security groups."""

from __future__ import annotations

import ipaddress
import json
import re

import pulumi
import pytest

from infra.config.location import INTERFACE_ENDPOINTS
from infra.definitions import policies
from infra.definitions.addresses import ZONE_LETTERS, private_addresses, private_block, public_block
from infra.network import WITHOUT_POLICY, Network, NetworkArgs
from infra.types import ExistingNetwork, Location
from tests.infra.fake_aws import ACCOUNT, REGION, Cloud, Registered

EXISTING = ExistingNetwork(vpc_id="vpc-0a1b", subnets={"us-west-2b": "subnet-0c2d"})
ZONES = ("us-west-2a", "us-west-2b", "us-west-2c")
NAMES = {service: f"com.amazonaws.us-west-2.{service}" for service in INTERFACE_ENDPOINTS}


def network(
    cloud: Cloud,
    existing: ExistingNetwork | None = None,
    worker_zones: tuple[str, ...] = ("us-west-2b",),
    nat_gateway: bool = True,
    zone: pulumi.Input[str] = "us-west-2b",
) -> Network:
    """A network with valid defaults."""
    location = Location(
        partition="aws",
        account=ACCOUNT,
        region=REGION,
        worker_zones=worker_zones,
        zones=ZONES,
        existing=existing,
        endpoints={} if nat_gateway else NAMES,
    )
    args = NetworkArgs(
        vpc_cidr="10.0.0.0/16", location=location, zone=zone, nat_zone="us-west-2c", nat_gateway=nat_gateway
    )
    return cloud.run(lambda: Network("network", args))


def test_each_zone_has_a_private_subnet(cloud: Cloud) -> None:
    network(cloud)
    for letter, block in zip("abc", ("10.0.0.0/19", "10.0.32.0/19", "10.0.64.0/19"), strict=True):
        subnet = cloud.resources[f"network-vpc-private-us-west-2{letter}-subnet"].inputs
        assert (subnet["availabilityZone"], subnet["cidrBlock"]) == (f"us-west-2{letter}", block)
        assert "mapPublicIpOnLaunch" not in subnet
    routes = [item.inputs for item in cloud.of_type("aws:ec2/routeTableAssociation:RouteTableAssociation")]
    assert [item["routeTableId"] for item in routes].count("network-vpc-private-routes-id") == 3
    vpc = cloud.resources["network-vpc-main"].inputs
    assert (vpc["cidrBlock"], vpc["enableDnsHostnames"], vpc["enableDnsSupport"]) == ("10.0.0.0/16", True, True)


def test_private_subnets_lead_to_the_internet_by_one_nat_gateway(cloud: Cloud) -> None:
    network(cloud)
    out = cloud.resources["network-vpc-private-route"].inputs
    assert out["routeTableId"] == "network-vpc-private-routes-id"
    assert (out["destinationCidrBlock"], out["natGatewayId"]) == ("0.0.0.0/0", "network-vpc-nat-id")
    nat = cloud.resources["network-vpc-nat"].inputs
    assert nat["subnetId"] == "network-vpc-public-subnet-id"
    public = cloud.resources["network-vpc-public-subnet"].inputs
    assert (public["availabilityZone"], public["cidrBlock"]) == ("us-west-2c", "10.0.255.240/28")
    assert cloud.resources["network-vpc-public-route"].inputs["gatewayId"] == "network-vpc-internet-id"
    # EC2 detaches an internet gateway only after the addresses are released.
    assert {"network-vpc-internet", "network-vpc-public-route"} <= cloud.needs("network-vpc-address")


def test_without_a_nat_gateway_nothing_leads_to_the_internet(cloud: Cloud) -> None:
    network(cloud, nat_gateway=False)
    types = {resource.type.rpartition(":")[2] for resource in cloud.resources.values()}
    assert types.isdisjoint({"NatGateway", "InternetGateway", "Eip", "Route"})
    assert not [name for name in cloud.resources if "public" in name]


def test_s3_gateway_endpoint_serves_the_private_subnets(cloud: Cloud) -> None:
    network(cloud)
    assert cloud.resources["network-vpc-s3"].inputs == {
        "vpcId": "network-vpc-main-id",
        "serviceName": "com.amazonaws.us-west-2.s3",
        "vpcEndpointType": "Gateway",
        "routeTableIds": ["network-vpc-private-routes-id"],
        "policy": json.dumps(policies.open_endpoint()),
    }


@pytest.mark.parametrize("vpc_cidr", ["10.0.0.0/16", "192.168.4.0/24", "172.16.0.0/20"])
def test_subnets_share_the_vpc_without_overlap(vpc_cidr: str) -> None:
    blocks = [ipaddress.IPv4Network(private_block(vpc_cidr, f"us-east-1{letter}")) for letter in ZONE_LETTERS]
    public = ipaddress.IPv4Network(public_block(vpc_cidr))
    assert public.prefixlen == 28
    for block in (*blocks, public):
        assert block.subnet_of(ipaddress.IPv4Network(vpc_cidr))
        assert sum(block.overlaps(other) for other in (*blocks, public)) == 1
    assert {block.num_addresses - 5 for block in blocks} == {private_addresses(vpc_cidr)}


def test_the_zone_may_be_an_output(cloud: Cloud) -> None:
    component = network(cloud, worker_zones=(), zone=pulumi.Output.from_input("us-west-2a"))
    assert [cloud.value(subnet) for subnet in component.ref.subnets_in(())] == [
        "network-vpc-private-us-west-2a-subnet-id"
    ]
    assert component.ref.zones(("us-west-2c",)) == ("us-west-2c",)


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


def test_ec2_takes_the_descriptions(cloud: Cloud) -> None:
    """https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_CreateSecurityGroup.html."""
    network(cloud, nat_gateway=False)
    groups = [
        resource
        for resource in cloud.resources.values()
        if "securityGroup" in resource.type and "description" in resource.inputs
    ]
    assert groups
    for resource in groups:
        assert re.fullmatch(r"[a-zA-Z0-9. _\-:/()#,@\[\]+=&;{}!$*]{1,255}", resource.inputs["description"]), (
            resource.name
        )


def test_the_default_group_of_the_vpc_is_closed(cloud: Cloud) -> None:
    network(cloud)
    default = cloud.resources["network-vpc-default-group"].inputs
    assert default["vpcId"] == "network-vpc-main-id"
    assert default.keys().isdisjoint({"ingress", "egress"})


def test_everything_may_be_reached_from_inside(cloud: Cloud) -> None:
    network(cloud)
    for kind in ("tasks", "instances"):
        egress = cloud.resources[f"network-{kind}-egress"].inputs
        assert egress["securityGroupId"] == f"network-{kind}-group-id"
        assert egress["cidrIpv4"] == "0.0.0.0/0"
        assert egress["ipProtocol"] == "-1"


def test_network_exposes_private_subnets(cloud: Cloud) -> None:
    component = network(cloud)
    assert cloud.value(component.ref.subnets["us-west-2b"]) == "network-vpc-private-us-west-2b-subnet-id"
    assert cloud.value(component.vpc_id) == "network-vpc-main-id"
    assert cloud.value(component.ref.tasks_group_id) == TASKS
    assert cloud.value(component.ref.instances_group_id) == INSTANCES


def test_existing_network_is_not_changed(cloud: Cloud) -> None:
    component = network(cloud, existing=EXISTING)
    assert cloud.value(component.vpc_id) == "vpc-0a1b"
    assert component.ref.subnets == {"us-west-2b": "subnet-0c2d"}
    types = {resource.type.rpartition(":")[2] for resource in cloud.resources.values()}
    assert types == {"Network", "SecurityGroup", "SecurityGroupIngressRule", "SecurityGroupEgressRule"}
    groups = cloud.of_type("aws:ec2/securityGroup:SecurityGroup")
    assert [resource.inputs["vpcId"] for resource in groups] == ["vpc-0a1b"] * 2


def test_interface_endpoints_cover_the_worker_zones(cloud: Cloud) -> None:
    network(cloud, worker_zones=("us-west-2b", "us-west-2a"), nat_gateway=False)
    made = [item for item in endpoints(cloud) if item.inputs["vpcEndpointType"] == "Interface"]
    assert {item.inputs["serviceName"] for item in made} == {*NAMES.values()}
    for item in made:
        assert item.inputs["privateDnsEnabled"] is True
        assert item.inputs["securityGroupIds"] == [ENDPOINTS]
        assert item.inputs["subnetIds"] == [f"network-vpc-private-us-west-2{letter}-subnet-id" for letter in "ba"]
    with_gateway = Cloud()
    network(with_gateway)
    assert len(endpoints(with_gateway)) == 1


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
