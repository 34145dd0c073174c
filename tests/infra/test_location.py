"""Choice of availability zones, and checks of existing networks."""

from __future__ import annotations

from typing import Any

import pulumi
import pytest

from infra.config.location import ask_caller, common_zones, locate, remember
from infra.config.settings import Settings
from infra.errors import SettingError
from infra.types import ExistingNetwork, Location
from tests.infra.fake_aws import ACCOUNT, CLUSTER, REGION, Cloud, security_group

EXISTING: dict[str, Any] = {"vpc_id": "vpc-0a1b", "subnet_ids": ("subnet-0c2d",)}


def location(cloud: Cloud, **settings: Any) -> Location:
    """The location that follows from otherwise default settings."""

    def program() -> Location:
        up, others = remember(CLUSTER)
        return locate(Settings(**settings), ask_caller(), up, None, others)

    return cloud.run(program)


def test_the_zone_offers_both_types(cloud: Cloud) -> None:
    cloud.not_offered = {"g5.xlarge": ("us-west-2a",), "m5.xlarge": ("us-west-2b",)}
    assert location(cloud).zone == "us-west-2c"


def test_the_account_decides_a_new_stacks_zone(cloud: Cloud) -> None:
    cloud.not_offered = {"g5.xlarge": ("us-west-2a",)}
    made = location(cloud)
    assert sorted(made.zones) == ["us-west-2b", "us-west-2c"]
    assert made.zone == made.zones[0]
    cloud.stack = "prod"
    assert location(cloud) == made
    zones = {location(Cloud(account=f"{number:012}")).zone for number in range(20)}
    assert zones == {"us-west-2a", "us-west-2b", "us-west-2c"}


def test_the_nat_gateway_is_in_the_chosen_zone(cloud: Cloud) -> None:
    made = location(cloud, availability_zones=("us-west-2c", "us-west-2a"))
    assert made.zones == ("us-west-2c", "us-west-2a", "us-west-2b")


def up(zone: str = "us-west-2b", zones: str = "us-west-2a us-west-2b", vpc_id: str = "vpc-0a1b") -> dict[str, Any]:
    """The security group of a stack that is up."""
    return security_group(zone=zone, zones=zones, vpc_id=vpc_id)


def test_a_stack_that_is_up_stays_where_it_is(cloud: Cloud) -> None:
    cloud.security_groups = [up()]
    made = location(cloud)
    assert (made.zone, made.zones) == ("us-west-2b", ("us-west-2a", "us-west-2b"))
    [asked] = [args for token, args in cloud.calls if token.endswith("getSecurityGroups")]
    assert asked == {
        "filters": [
            {"name": "tag-key", "values": ["ray-on-ecs:cluster"]},
            {"name": "tag:Name", "values": ["*-ray-on-ecs-network-tasks-group"]},
        ]
    }


@pytest.mark.parametrize("change", [{"stack": "prod"}, {"project": "vision"}])
def test_a_renamed_stack_stays_where_it_is(change: dict[str, Any]) -> None:
    cloud = Cloud(**change)
    cloud.security_groups = [up(zones="us-west-2b us-west-2a")]
    made = location(cloud)
    assert (made.zone, made.zones) == ("us-west-2b", ("us-west-2b", "us-west-2a"))


def test_a_second_stack_goes_where_its_types_are(cloud: Cloud) -> None:
    cloud.stack = "second"
    cloud.security_groups = [up()]
    cloud.not_offered = {"g5.xlarge": ("us-west-2a", "us-west-2b")}
    assert location(cloud).zones == ("us-west-2c",)
    cloud.not_offered = {}
    assert location(cloud, availability_zones=("us-west-2c",)).zone == "us-west-2c"


def test_stacks_in_different_places_decide_nothing(cloud: Cloud) -> None:
    cloud.stack = "third"
    alone = location(cloud)
    cloud.security_groups = [up(), security_group(stack="second", zone="us-west-2a", vpc_id="vpc-0b")]
    assert location(cloud) == alone


def test_stack_moves_only_to_zones_with_subnets(cloud: Cloud) -> None:
    cloud.security_groups = [up()]
    assert location(cloud, availability_zones=("us-west-2a",)).zone == "us-west-2a"
    with pytest.raises(SettingError) as refused:
        location(cloud, availability_zones=("us-west-2c",))
    assert str(refused.value) == (
        "availabilityZones: 'us-west-2c' is not one of the zones of the stack's subnets, us-west-2a, us-west-2b; "
        "use one of us-west-2a, us-west-2b"
    )


def test_type_missing_in_zone_does_not_move_stack(cloud: Cloud) -> None:
    cloud.security_groups = [up()]
    cloud.not_offered = {"g5.xlarge": ("us-west-2b",)}
    with pytest.raises(SettingError) as refused:
        location(cloud)
    assert str(refused.value) == (
        "availabilityZones: '' is empty, and the stack's zone us-west-2b does not offer g5.xlarge and "
        "m5.xlarge; use one of us-west-2a, and the stack moves there"
    )


OWN, OTHERS = "the VPC that it created", "vpc-0a1b"


@pytest.mark.parametrize(
    ("group", "settings", "line"),
    [
        (up(), EXISTING, f"vpcId: 'vpc-0a1b' differs from the stack's network, {OWN}; "),
        (up(zones=""), {}, f"vpcId: '' differs from the stack's network, {OTHERS}; "),
        (up(zones="", vpc_id="vpc-0b"), EXISTING, "vpcId: 'vpc-0a1b' differs from the stack's network, vpc-0b; "),
        (
            up(),
            {"vpc_cidr": "10.1.0.0/16"},
            "vpcCidr: '10.1.0.0/16' differs from the stack's network, 10.0.0.0/16; ",
        ),
    ],
    ids=["to another's", "to its own", "to a third", "addresses"],
)
def test_a_stack_that_is_up_keeps_its_network(
    cloud: Cloud, group: dict[str, Any], settings: dict[str, Any], line: str
) -> None:
    cloud.security_groups = [group]
    with pytest.raises(SettingError) as refused:
        location(cloud, **settings)
    assert str(refused.value).startswith(f"{line}change it back, or `pulumi destroy` first")


def test_type_missing_in_all_stack_zones_is_refused(cloud: Cloud) -> None:
    cloud.security_groups = [up()]
    cloud.not_offered = {"g5.xlarge": ("us-west-2a", "us-west-2b")}
    with pytest.raises(SettingError, match=r"; use another type, or `pulumi destroy` first$"):
        location(cloud)


def test_default_security_group_is_ignored(cloud: Cloud) -> None:
    default = {"vpcId": "vpc-0a1b", "tags": {"Name": "dev-ray-on-ecs-network-default-group", "ray-on-ecs:stack": "dev"}}
    cloud.security_groups = [default, up()]
    assert location(cloud).zone == "us-west-2b"


def test_two_stacks_of_one_name_are_refused(cloud: Cloud) -> None:
    cloud.security_groups = [up(), up(vpc_id="vpc-0b")]
    with pytest.raises(pulumi.RunError, match=r"sg-of-vpc-0a1b in vpc-0a1b and sg-of-vpc-0b in vpc-0b; "):
        location(cloud)


def test_security_group_without_zone_tag_is_refused(cloud: Cloud) -> None:
    cloud.security_groups = [up(zone="", zones="")]
    with pytest.raises(pulumi.RunError, match="sg-of-vpc-0a1b lacks the tag ray-on-ecs:zone, from which"):
        location(cloud)


def test_a_stack_that_is_up_needs_no_offerings(cloud: Cloud, warnings: list[str]) -> None:
    cloud.security_groups = [up()]
    cloud.silent = ("getInstanceTypeOfferings",)
    assert location(cloud).zone == "us-west-2b"
    assert "continuing in us-west-2b" in warnings[0]


def test_missing_vpc_permission_is_reported(cloud: Cloud) -> None:
    cloud.security_groups = [up(vpc_id="vpc-of-somebody")]
    with pytest.raises(pulumi.RunError, match=r"^vpcCidr: the stack's VPC vpc-of-somebody could not be looked up"):
        location(cloud)


def test_an_existing_network_may_change_its_subnet(cloud: Cloud) -> None:
    cloud.security_groups = [up(zone="us-west-2a", zones="")]
    assert location(cloud, **EXISTING).zone == "us-west-2b"


def test_missing_security_group_permission_is_reported(cloud: Cloud) -> None:
    cloud.silent = ("getSecurityGroups",)
    with pytest.raises(pulumi.RunError, match="ec2:DescribeSecurityGroups"):
        location(cloud)


def test_a_zone_that_is_asked_for_is_taken(cloud: Cloud) -> None:
    assert location(cloud, availability_zones=("us-west-2b",)).zone == "us-west-2b"


def test_zone_without_the_types_is_refused(cloud: Cloud) -> None:
    cloud.not_offered = {"g5.xlarge": ("us-west-2b",)}
    with pytest.raises(SettingError) as refused:
        location(cloud, availability_zones=("us-west-2b",))
    assert str(refused.value) == (
        "availabilityZones: 'us-west-2b' does not offer g5.xlarge and m5.xlarge; "
        "use one of us-west-2a, us-west-2c, or leave it empty to have one chosen"
    )


def test_region_without_common_zone_is_refused(cloud: Cloud) -> None:
    cloud.not_offered = {"g5.xlarge": ("us-west-2a", "us-west-2b"), "m5.xlarge": ("us-west-2c",)}
    with pytest.raises(SettingError, match=r"is not offered together with m5\.xlarge in any zone") as refused:
        location(cloud)
    assert str(refused.value).startswith("workerInstanceTypes: 'g5.xlarge' ")


def test_one_type_for_both_kinds_needs_one_zone() -> None:
    settings = Settings(head_instance_type="g5.xlarge")
    zones = common_zones(settings, {"g5.xlarge": {"us-west-2b", "us-west-2a"}}, REGION)
    assert zones == ["us-west-2a", "us-west-2b"]


@pytest.mark.parametrize(
    ("key", "field"), [("headInstanceType", "head_instance_type"), ("workerInstanceTypes", "worker_instance_types")]
)
def test_type_not_offered_in_region_is_refused(cloud: Cloud, key: str, field: str) -> None:
    with pytest.raises(SettingError) as refused:
        location(cloud, **{field: ("g99.huge",) if field.endswith("s") else "g99.huge"})
    assert str(refused.value) == f"{key}: 'g99.huge' is not offered in us-west-2; use another type or another region"


def test_an_existing_subnet_decides_the_zone(cloud: Cloud) -> None:
    assert location(cloud, **EXISTING) == Location(
        partition="aws",
        account=ACCOUNT,
        region=REGION,
        worker_zones=("us-west-2b",),
        zones=("us-west-2a", "us-west-2b", "us-west-2c"),
        existing=ExistingNetwork(vpc_id="vpc-0a1b", subnets={"us-west-2b": "subnet-0c2d"}),
    )


ELSEWHERE = (
    "subnetIds: 'subnet-0c2d' is in us-west-2d, which does not offer g5.xlarge and m5.xlarge; "
    "use a subnet in one of us-west-2a, us-west-2b, us-west-2c"
)
OTHER_ZONE = (
    "availabilityZones: 'us-west-2a' must be the zones of subnetIds, us-west-2b; use their zones in the same order, or "
    "leave it empty"
)


@pytest.mark.parametrize(
    ("subnet", "settings", "line"),
    [
        ({"availabilityZone": "us-west-2d"}, {}, ELSEWHERE),
        ({}, {"availability_zones": ("us-west-2a",)}, OTHER_ZONE),
    ],
    ids=["zone-without-the-types", "another-zone"],
)
def test_unsuitable_zone_is_refused(cloud: Cloud, subnet: dict[str, Any], settings: dict[str, Any], line: str) -> None:
    cloud.subnet = subnet
    with pytest.raises(SettingError) as refused:
        location(cloud, **EXISTING, **settings)
    assert str(refused.value).startswith(line)


@pytest.mark.parametrize("options", [{"availability_zones": ("us-west-2b",)}, EXISTING])
def test_configured_zone_is_used_without_offerings_permission(
    cloud: Cloud, warnings: list[str], options: dict[str, Any]
) -> None:
    cloud.silent = ("getInstanceTypeOfferings",)
    assert location(cloud, **options).zone == "us-west-2b"
    [line] = warnings
    assert "(ec2:DescribeInstanceTypeOfferings: " in line


def test_missing_offerings_permission_requires_a_zone(cloud: Cloud) -> None:
    cloud.silent = ("getInstanceTypeOfferings",)
    with pytest.raises(pulumi.RunError, match="set availabilityZones to a zone that offers"):
        location(cloud)


def test_missing_credentials_or_region_are_one_line(cloud: Cloud) -> None:
    cloud.silent = ("getRegion",)
    with pytest.raises(pulumi.RunError) as refused:
        location(cloud)
    assert str(refused.value).startswith("aws:region: AWS could not be called (")
    assert "AccessDenied" in str(refused.value)
    assert "\n" not in str(refused.value)


SEVERAL: dict[str, Any] = {"worker_instance_types": ("p4d.24xlarge", "g5.xlarge")}


def test_zone_with_most_worker_types_is_preferred(cloud: Cloud) -> None:
    cloud.not_offered = {"p4d.24xlarge": ("us-west-2a", "us-west-2c"), "g5.xlarge": ("us-west-2c",)}
    made = location(cloud, **SEVERAL)
    assert sorted(made.zones) == ["us-west-2a", "us-west-2b"]
    assert made.zone == "us-west-2b"


def test_several_zones_keep_their_order(cloud: Cloud) -> None:
    made = location(cloud, availability_zones=("us-west-2c", "us-west-2a"))
    assert (made.zone, made.worker_zones) == ("us-west-2c", ("us-west-2c", "us-west-2a"))


def test_several_subnets_are_of_several_zones(cloud: Cloud) -> None:
    cloud.subnet_zones = {"subnet-0e": "us-west-2a"}
    made = location(cloud, vpc_id="vpc-0a1b", subnet_ids=("subnet-0e", "subnet-0c2d"))
    assert made.worker_zones == ("us-west-2a", "us-west-2b")


def test_cpu_workers_are_where_the_head_is(cloud: Cloud) -> None:
    cloud.not_offered = {"c6i.2xlarge": ("us-west-2a", "us-west-2b")}
    assert location(cloud, cpu_worker_instance_types=("c6i.2xlarge",)).zones == ("us-west-2c",)
    assert len(location(cloud).zones) == 3


def test_other_clusters_of_the_stack_are_ignored(cloud: Cloud) -> None:
    cloud.security_groups = [security_group("my-ray-on-ecs", zone="us-west-2a"), up()]
    assert location(cloud).zone == "us-west-2b"
