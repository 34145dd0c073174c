"""The network: one way out, no way in, and DNS that answers."""

from __future__ import annotations

import ipaddress

import pytest

from infra.network import INTERFACE_ENDPOINTS, Network, NetworkArgs
from infra.references import ExistingNetwork, Location
from tests.infra.fake_aws import ACCOUNT, REGION, Cloud

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


def test_the_vpc_has_subnets_in_every_zone_and_a_single_nat_gateway(cloud: Cloud) -> None:
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
    }, "a second NAT gateway costs money, and without DNS host names the workers never find the head"


def test_s3_is_reached_by_a_gateway_endpoint_from_every_subnet(cloud: Cloud) -> None:
    network(cloud)
    assert cloud.resources["network-s3"].inputs == {
        "vpcId": "vpc-1",
        "serviceName": "com.amazonaws.us-west-2.s3",
        "vpcEndpointType": "Gateway",
        "routeTableIds": [f"rtb-{zone}" for zone in ZONES],
        "tags": {"Name": "dev-network-s3", **SHARED_TAGS},
    }, "the NAT gateway charges for every gigabyte"


@pytest.mark.parametrize("vpc_cidr", ["10.0.0.0/16", "192.168.4.0/24"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 6])
def test_the_subnets_of_all_zones_fit_into_the_smallest_and_the_largest_vpc(
    cloud: Cloud, vpc_cidr: str, count: int
) -> None:
    network(cloud, vpc_cidr, zones=("us-west-2b", *(f"us-west-2{letter}" for letter in "acdef"[: count - 1])))
    private, public = (int(spec["cidrMask"]) for spec in cloud.resources["network-vpc"].inputs["subnetSpecs"])
    # awsx cuts the VPC into equal blocks, one for each zone, whose number it rounds up to a power of 2.
    block = ipaddress.ip_network(vpc_cidr).prefixlen + (count - 1).bit_length()
    assert private > block, "half of the block at most"
    assert block < public == 28, "AWS's smallest subnet"


def test_only_members_of_the_security_group_reach_each_other(cloud: Cloud) -> None:
    network(cloud)
    (ingress,) = cloud.of_type("aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule")
    assert ingress.inputs["referencedSecurityGroupId"] == ingress.inputs["securityGroupId"], (
        "any other source would open Ray, which runs whatever it is told"
    )
    assert "cidrIpv4" not in ingress.inputs, "no address may enter"
    assert ingress.inputs["ipProtocol"] == "-1", "NCCL and Gloo pick their own ports"


def test_the_default_group_of_the_vpc_is_closed(cloud: Cloud) -> None:
    network(cloud)
    default = cloud.resources["network-default-group"].inputs
    assert default["vpcId"] == "vpc-1"
    assert default.keys().isdisjoint({"ingress", "egress"}), "what is started without a group would be in this one"


def test_everything_may_be_reached_from_inside(cloud: Cloud) -> None:
    network(cloud)
    egress = cloud.resources["network-egress"].inputs
    assert egress["cidrIpv4"] == "0.0.0.0/0", "images, data sets and AWS's own services lie outside"
    assert egress["ipProtocol"] == "-1", "DNS and HTTPS both have to pass"


def test_the_subnet_that_is_handed_out_is_the_private_one(cloud: Cloud) -> None:
    made = network(cloud)
    assert cloud.value(made.ref.subnets["us-west-2b"]) == "subnet-private-us-west-2b", (
        "in the public subnet an instance has no route out"
    )
    assert cloud.value(made.vpc_id) == "vpc-1", "the DNS namespace belongs to this VPC"
    group = cloud.value(made.ref.security_group_id)
    assert group == "network-security-group-id", "instances and tasks share this group"


def test_of_an_existing_network_nothing_is_made_or_changed(cloud: Cloud) -> None:
    made = network(cloud, existing=EXISTING)
    assert cloud.value(made.vpc_id) == "vpc-0a1b"
    assert made.ref.subnets == {"us-west-2b": "subnet-0c2d"}
    assert cloud.resources.keys() == {"network", "network-security-group", "network-ingress", "network-egress"}, (
        "others live there, too: its routes, endpoints and default group are theirs"
    )
    assert cloud.resources["network-security-group"].inputs["vpcId"] == "vpc-0a1b"


def test_the_security_group_remembers_where_the_stack_is(cloud: Cloud) -> None:
    network(cloud)
    assert cloud.resources["network-security-group"].inputs["tags"] == {
        "Name": "dev-network-security-group",
        "ray-on-ecs:cluster": "ray-c0ffee",
        "ray-on-ecs:zone": "us-west-2b",
        "ray-on-ecs:zones": "us-west-2a us-west-2b us-west-2c",
        **SHARED_TAGS,
    }


def test_of_an_existing_network_it_remembers_no_zones(cloud: Cloud) -> None:
    network(cloud, existing=EXISTING)
    tags = cloud.resources["network-security-group"].inputs["tags"]
    assert tags["ray-on-ecs:zone"] == "us-west-2b"
    assert "ray-on-ecs:zones" not in tags, "there are no subnets of the stack's own to move to"


def test_without_a_nat_gateway_every_service_has_an_address_in_the_nodes_zones(cloud: Cloud) -> None:
    network(cloud, worker_zones=("us-west-2b", "us-west-2a"), nat_gateway=False)
    with_gateway = Cloud()
    network(with_gateway)
    vpc, other = (each.resources["network-vpc"].inputs for each in (cloud, with_gateway))
    assert vpc["natGateways"] == {"strategy": "None"}
    assert vpc["subnetSpecs"] == other["subnetSpecs"], "a stack that is up keeps its subnets"
    made = cloud.of_type("aws:ec2/vpcEndpoint:VpcEndpoint")
    endpoints = [each for each in made if each.inputs["vpcEndpointType"] == "Interface"]
    assert len(endpoints) == len(made) - 1, "S3 has a gateway endpoint in any case"
    assert {each.inputs["serviceName"] for each in endpoints} == {
        f"com.amazonaws.us-west-2.{service}" for service in INTERFACE_ENDPOINTS
    }
    for each in endpoints:
        assert each.inputs["privateDnsEnabled"] is True, "agents call the services by their usual names"
        assert each.inputs["securityGroupIds"] == ["network-security-group-id"], "the nodes' own lets them in"
        assert each.inputs["subnetIds"] == ["subnet-private-us-west-2b", "subnet-private-us-west-2a"]
    assert len(with_gateway.of_type("aws:ec2/vpcEndpoint:VpcEndpoint")) == 1, "they cost more than the gateway"


def test_jobs_without_a_nat_gateway_reach_secrets_manager_if_they_may_read_it(cloud: Cloud) -> None:
    network(cloud, nat_gateway=False, reads_secrets=True)
    made = {each.inputs["serviceName"] for each in cloud.of_type("aws:ec2/vpcEndpoint:VpcEndpoint")}
    assert {f"com.amazonaws.us-west-2.{service}" for service in ("ssm", "secretsmanager")} <= made


def test_another_partition_is_asked_for_the_names_of_endpoints(cloud: Cloud) -> None:
    location = Location(partition="aws-cn", account=ACCOUNT, region=REGION, worker_zones=ZONES[:1], zones=ZONES)
    args = NetworkArgs(vpc_cidr="10.0.0.0/16", location=location, cluster_name="ray", nat_gateway=False)
    cloud.run(lambda: Network("network", args))
    made = [each.inputs["serviceName"] for each in cloud.of_type("aws:ec2/vpcEndpoint:VpcEndpoint")]
    assert {*made} == {
        f"com.amazonaws.{REGION}.s3",
        *(f"cn.com.amazonaws.{REGION}.{service}" for service in INTERFACE_ENDPOINTS),
    }
