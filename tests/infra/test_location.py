"""Availability zones and endpoint services of a cluster."""

from __future__ import annotations

from typing import Any

import pulumi
import pytest

from infra.config import RayClusterArgs
from infra.config.location import INTERFACE_ENDPOINTS, ask_caller, check_zone, locate, network_of_program
from infra.errors import SettingError
from infra.types import ExistingNetwork, Location
from tests.infra.fake_aws import ACCOUNT, REGION, Cloud, later

ZONES = ("us-west-2a", "us-west-2b", "us-west-2c")
CPU: dict[str, Any] = {"cpu_worker_instance_types": ["c6i.2xlarge"]}
EXISTING = ExistingNetwork(vpc_id="vpc-0a1b", subnets={"us-west-2b": "subnet-0c2d"})


def location_of(cloud: Cloud, existing: ExistingNetwork | None = None, **fields: Any) -> Location:
    """The location that follows from otherwise default arguments."""
    return cloud.run(lambda: locate(RayClusterArgs(**fields), ask_caller(), existing))


def test_all_zones_of_the_region_have_subnets(cloud: Cloud) -> None:
    location = location_of(cloud)
    assert (location.zones, location.suitable, location.candidates) == (ZONES, ZONES, ZONES)
    assert location.worker_zones == ()
    [asked] = [args for token, args in cloud.calls if token.endswith("getAvailabilityZones")]
    assert asked == {"filters": [{"name": "zone-type", "values": ["availability-zone"]}]}  # in every state


def test_candidates_offer_all_types(cloud: Cloud) -> None:
    cloud.not_offered = {"g5.xlarge": ("us-west-2a",), "m5.large": ("us-west-2b",)}
    location = location_of(cloud)
    assert (location.zones, location.suitable, location.candidates) == (ZONES, ZONES[2:], ZONES[2:])


def test_candidates_offer_most_worker_types(cloud: Cloud) -> None:
    cloud.not_offered = {"p4d.24xlarge": ("us-west-2a", "us-west-2c"), "g5.xlarge": ("us-west-2c",)}
    location = location_of(cloud, worker_instance_types=["p4d.24xlarge", "g5.xlarge"])
    assert (location.suitable, location.candidates) == (("us-west-2a", "us-west-2b"), ("us-west-2b",))


def test_cpu_workers_limit_the_candidates(cloud: Cloud) -> None:
    cloud.not_offered = {"c6i.2xlarge": ("us-west-2a", "us-west-2b")}
    assert location_of(cloud, **CPU, max_cpu_workers=1).candidates == ("us-west-2c",)
    assert location_of(cloud, **CPU).candidates == ZONES


def test_pools_without_maximum_decide_nothing(cloud: Cloud) -> None:
    cloud.not_offered = {"g5.xlarge": ZONES[:2], "p5.48xlarge": ZONES}
    none: dict[str, Any] = {"worker_count": 0, **h100(max=0)}
    assert location_of(cloud, **none).candidates == ZONES
    assert location_of(cloud, **none, availability_zones=["us-west-2a", "us-west-2b"]).worker_zones == ZONES[:2]
    assert location_of(cloud, **{**none, **h100(max=0, zones=["us-west-2a"])})


def test_configured_zones_keep_their_order(cloud: Cloud) -> None:
    location = location_of(cloud, availability_zones=["us-west-2c", "us-west-2a"])
    assert (location.worker_zones, location.candidates) == (("us-west-2c", "us-west-2a"), ("us-west-2c",))


@pytest.mark.parametrize(
    ("zone", "not_offered"),
    [("us-west-2b", {"g5.xlarge": ("us-west-2b",)}), ("us-west-2a", {"m5.large": ("us-west-2a", "us-west-2b")})],
)
def test_an_unsuitable_zone_is_refused(cloud: Cloud, zone: str, not_offered: dict[str, tuple[str, ...]]) -> None:
    cloud.not_offered = not_offered
    with pytest.raises(SettingError) as refused:
        location_of(cloud, availability_zones=[zone])
    assert str(refused.value).startswith(
        f"availability_zones: {zone!r} does not offer g5.xlarge and m5.large; use us-west-2"
    )


@pytest.mark.parametrize(
    "zone",
    [
        "us-west-2d",
        "us-west-2-lax-1a",
        "usw2-az1",
        "us-east-1b",
        "us-west-2",
        "us-west-2A",
        "a",
        "us-west-2a us-west-2b",
    ],
)
@pytest.mark.parametrize("others", [[], ["us-west-2a"]], ids=["alone", "second"])
def test_what_is_no_zone_of_the_region_is_refused(cloud: Cloud, zone: str, others: list[str]) -> None:
    with pytest.raises(SettingError, match=f"^availability_zones: '{zone}' is not an availability zone of us-west-2; "):
        location_of(cloud, availability_zones=[*others, zone])


def test_a_zone_that_is_kept_must_still_suit(cloud: Cloud) -> None:
    location = location_of(cloud)
    assert check_zone(RayClusterArgs(), location, "us-west-2b") == "us-west-2b"
    cloud.not_offered = {"g5.xlarge": ("us-west-2b",)}
    with pytest.raises(SettingError) as refused:
        check_zone(RayClusterArgs(), location_of(cloud), "us-west-2b")
    assert str(refused.value) == (
        "availability_zones: '' is empty, and the cluster's zone us-west-2b does not offer g5.xlarge and m5.large; "
        "use us-west-2a or us-west-2c, and the cluster moves there"
    )
    configured = RayClusterArgs(availability_zones=["us-west-2a"])
    moved = location_of(cloud, availability_zones=["us-west-2a"])
    assert check_zone(configured, moved, "us-west-2b") == "us-west-2b"


def test_a_region_without_a_common_zone_is_refused(cloud: Cloud) -> None:
    cloud.not_offered = {"g5.xlarge": ("us-west-2a", "us-west-2b"), "m5.large": ("us-west-2c",)}
    with pytest.raises(SettingError) as refused:
        location_of(cloud)
    assert str(refused.value) == (
        "worker_instance_types: 'g5.xlarge' is not offered in any zone of us-west-2 together with m5.large; use "
        "another type or another region"
    )


@pytest.mark.parametrize("field", ["head_instance_type", "worker_instance_types", "cpu_worker_instance_types"])
def test_a_type_that_the_region_lacks_is_refused(cloud: Cloud, field: str) -> None:
    with pytest.raises(SettingError, match=rf"^{field}: 'g99\.huge' is not offered in any zone of us-west-2"):
        location_of(
            cloud, None, max_cpu_workers=1, **{**CPU, field: ("g99.huge",) if field.endswith("s") else "g99.huge"}
        )


def test_existing_subnets_decide_the_zones(cloud: Cloud) -> None:
    assert location_of(cloud, EXISTING) == Location(
        partition="aws",
        account=ACCOUNT,
        region=REGION,
        zones=("us-west-2b",),
        worker_zones=("us-west-2b",),
        suitable=("us-west-2b",),
        existing=EXISTING,
    )


@pytest.mark.parametrize(
    ("fields", "not_offered", "line"),
    [
        ({}, {"g5.xlarge": ("us-west-2b",)}, "worker_instance_types: 'g5.xlarge' is not offered in any zone of"),
        (
            {"availability_zones": ["us-west-2a"]},
            {},
            "availability_zones: 'us-west-2a' must be zones of subnet_ids, us-west-2b; use some of these",
        ),
    ],
)
def test_unsuitable_subnets_are_refused(
    cloud: Cloud, fields: dict[str, Any], not_offered: dict[str, tuple[str, ...]], line: str
) -> None:
    cloud.not_offered = not_offered
    with pytest.raises(SettingError) as refused:
        location_of(cloud, EXISTING, **fields)
    assert str(refused.value).startswith(line)


def test_one_unsuitable_subnet_of_two_is_named(cloud: Cloud) -> None:
    cloud.not_offered = {"g5.xlarge": ("us-west-2a",)}
    existing = ExistingNetwork(vpc_id="vpc-0a1b", subnets={"us-west-2b": "subnet-b", "us-west-2a": "subnet-a"})
    with pytest.raises(SettingError) as refused:
        location_of(cloud, existing)
    assert str(refused.value) == (
        "subnet_ids: 'subnet-a' is in us-west-2a, which does not offer g5.xlarge; use us-west-2b, or another type, or "
        "name the zones of the others in availability_zones"
    )


@pytest.mark.parametrize("field", ["availability_zones", "subnet_ids"])
def test_only_the_first_zone_needs_the_types_of_the_head(cloud: Cloud, field: str) -> None:
    cloud.not_offered = {"m5.large": ("us-west-2a",)}

    def place(*zones: str) -> tuple[str, ...]:
        if field == "availability_zones":
            return location_of(cloud, availability_zones=zones).worker_zones
        subnets = {zone: f"subnet-{zone[-1]}" for zone in zones}
        return location_of(cloud, ExistingNetwork(vpc_id="vpc-0a1b", subnets=subnets)).worker_zones

    assert place("us-west-2b", "us-west-2a") == ("us-west-2b", "us-west-2a")
    with pytest.raises(SettingError, match=rf"^{field}: '(us-west-2a|subnet-a)' .*does not offer g5.xlarge and m5"):
        place("us-west-2a", "us-west-2b")


@pytest.mark.parametrize(
    ("existing", "fields"), [(None, {"availability_zones": ("us-west-2b",)}), (EXISTING, {})], ids=["zone", "subnets"]
)
def test_denied_offerings_leave_configured_zones(
    cloud: Cloud, warnings: list[str], existing: ExistingNetwork | None, fields: dict[str, Any]
) -> None:
    cloud.silent = ("getInstanceTypeOfferings",)
    assert location_of(cloud, existing, **fields).worker_zones == ("us-west-2b",)
    [line] = warnings
    assert "(ec2:DescribeInstanceTypeOfferings: " in line
    assert line.endswith("continuing in us-west-2b")


@pytest.mark.parametrize(
    ("silent", "line"),
    [
        ("getInstanceTypeOfferings", "availability_zones: instance type offerings of us-west-2 could not be read "),
        ("getAvailabilityZones", "availability_zones: the zones of us-west-2 could not be read (ec2:DescribeAvailab"),
        ("getRegion", "aws:region: AWS could not be called (AccessDenied: not authorized ()"),
    ],
)
def test_denied_calls_are_one_line(cloud: Cloud, silent: str, line: str) -> None:
    cloud.silent = (silent,)
    with pytest.raises(pulumi.RunError) as refused:
        location_of(cloud)
    assert str(refused.value).startswith(line)
    assert "AccessDenied" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_endpoints_are_looked_up_only_where_they_are_created(cloud: Cloud) -> None:
    assert location_of(cloud).endpoints == {}
    assert not [token for token, _ in cloud.calls if token.endswith("getVpcEndpointService")]
    location = location_of(cloud, nat_gateway=False)
    assert location.endpoints == {service: f"com.amazonaws.us-west-2.{service}" for service in INTERFACE_ENDPOINTS}


POOL: dict[str, Any] = {"instance_types": ["g5.xlarge"], "max": 2}
RESERVED = {**POOL, "capacity_reservation_id": "cr-0123456789abcdef0"}


@pytest.mark.parametrize(
    ("fields", "service"),
    [
        ({"spot": True}, "ec2"),
        ({"worker_pools": {"a": {**POOL, "spot": True}}}, "ec2"),
        ({"worker_pools": {"a": RESERVED}}, "ec2"),
        ({"worker_pools": {"a": {**RESERVED, "max": 0}, "b": RESERVED}}, "ec2"),
        ({"job_secrets": ["arn:aws:secretsmanager:us-west-2:123456789012:secret:hf"]}, "secretsmanager"),
        ({"instance_policy_arns": [f"arn:aws:iam::{ACCOUNT}:policy/key"]}, "kms"),
    ],
)
def test_fields_add_endpoints(cloud: Cloud, fields: dict[str, Any], service: str) -> None:
    location = location_of(cloud, nat_gateway=False, **fields)
    assert location.endpoints.keys() - INTERFACE_ENDPOINTS == {service}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"worker_count": 0, "spot": True},
        {"worker_count": 0, "worker_capacity_reservation_id": "cr-0123456789abcdef0"},
        {"worker_pools": {"a": {**POOL, "max": 0, "spot": True}}},
        {"worker_pools": {"a": {**RESERVED, "max": 0}}},
        {"worker_pools": {"a": {**RESERVED, "max": 0}, "b": POOL}},
    ],
)
def test_pools_without_instances_add_no_endpoint(cloud: Cloud, fields: dict[str, Any]) -> None:
    assert location_of(cloud, nat_gateway=False, **fields).endpoints.keys() == {*INTERFACE_ENDPOINTS}


def test_endpoint_services_of_china_have_their_names(cloud: Cloud) -> None:
    cloud.partition = "aws-cn"
    location = location_of(cloud, nat_gateway=False)
    assert location.endpoints["ecs"] == "cn.com.amazonaws.us-west-2.ecs"


def test_zones_without_an_endpoint_are_not_candidates(cloud: Cloud) -> None:
    cloud.without_endpoint = {"ecs-telemetry": ("us-west-2a",), "ssm": ("us-west-2c",)}
    assert location_of(cloud, nat_gateway=False).candidates == ("us-west-2b",)
    with pytest.raises(SettingError, match=r"^availability_zones: 'us-west-2a' does not offer .* and VPC endpoints; "):
        location_of(cloud, nat_gateway=False, availability_zones=["us-west-2a"])
    cloud.without_endpoint = {"ssm": ZONES}
    with pytest.raises(SettingError, match=r"^nat_gateway: 'a VPC endpoint of ssm' is not offered in any zone"):
        location_of(cloud, nat_gateway=False)


def test_a_nat_instance_is_in_a_zone_that_offers_it(cloud: Cloud) -> None:
    cloud.not_offered = {"t4g.nano": ("us-west-2a", "us-west-2c")}
    location = location_of(cloud, nat_instance=True)
    assert (location.candidates, location.nat_zones) == (("us-west-2b",), ("us-west-2b",))
    assert location_of(cloud).candidates == ZONES
    with pytest.raises(SettingError) as refused:
        location_of(cloud, nat_instance=True, availability_zones=["us-west-2a"])
    assert str(refused.value) == (
        "availability_zones: 'us-west-2a' does not offer g5.xlarge and m5.large and t4g.nano for nat_instance; use "
        "us-west-2b, or another type"
    )


def test_a_nat_instance_stays_in_the_first_zone(cloud: Cloud) -> None:
    fields: dict[str, Any] = {"nat_instance": True, "availability_zones": ["us-west-2b"]}
    cloud.not_offered = {"t4g.nano": ("us-west-2a",)}
    location, args = location_of(cloud, **fields), RayClusterArgs(**fields)
    assert check_zone(args, location, "us-west-2c") == "us-west-2c"
    with pytest.raises(SettingError) as refused:
        check_zone(args, location, "us-west-2a")
    assert str(refused.value) == (
        "nat_instance: True needs a t4g.nano in us-west-2a, the zone of the first `pulumi up`, which does not offer "
        "it; keep it at false, for a NAT gateway"
    )
    cloud.silent = ("getInstanceTypeOfferings",)
    assert check_zone(args, location_of(cloud, **fields), "us-west-2a") == "us-west-2a"


@pytest.mark.parametrize(("offered_in", "together"), [((), ""), (("us-west-2a",), " together with m5.large and g5")])
def test_a_region_without_nat_instances_has_a_gateway(cloud: Cloud, offered_in: tuple[str, ...], together: str) -> None:
    cloud.not_offered = {
        "t4g.nano": tuple(zone for zone in ZONES if zone not in offered_in),
        "g5.xlarge": offered_in,
    }
    with pytest.raises(SettingError) as refused:
        location_of(cloud, nat_instance=True)
    assert str(refused.value).startswith(f"nat_instance: 't4g.nano' is not offered in any zone of us-west-2{together}")
    assert str(refused.value).endswith("; keep it at false, for a NAT gateway")


def test_an_absent_endpoint_service_is_refused(cloud: Cloud) -> None:
    cloud.absent = ("getVpcEndpointService",)
    with pytest.raises(SettingError) as refused:
        location_of(cloud, nat_gateway=False)
    assert str(refused.value).startswith("nat_gateway: 'com.amazonaws.us-west-2.ecs' could not be found (")
    assert str(refused.value).endswith("; keep nat_gateway at true")


def test_denied_endpoint_services_have_their_usual_names(cloud: Cloud, warnings: list[str]) -> None:
    cloud.silent = ("getVpcEndpointService",)
    assert location_of(cloud, nat_gateway=False) == location_of(Cloud(), nat_gateway=False)
    [line] = warnings
    assert line.startswith("nat_gateway: 'com.amazonaws.us-west-2.ecs' could not be looked up (ec2:DescribeVpcEndpoint")
    cloud.partition = "aws-cn"  # where names differ
    with pytest.raises(SettingError, match=r"; grant the caller ec2:DescribeVpcEndpointServices, or try again$"):
        location_of(cloud, nat_gateway=False)


def h100(**keys: Any) -> dict[str, Any]:
    """A pool, beside the default one."""
    return {"worker_pools": {"h100": {"instance_types": ["p5.48xlarge"], "max": 1, **keys}}}


def test_pools_without_zones_narrow_the_choice(cloud: Cloud) -> None:
    cloud.not_offered = {"p5.48xlarge": ("us-west-2a", "us-west-2b")}
    assert location_of(cloud, **h100()).candidates == ("us-west-2c",)
    both = location_of(cloud, **h100(instance_types=["p5.48xlarge", "p4d.24xlarge"]))
    assert (both.suitable, both.candidates) == (ZONES, ("us-west-2c",))
    assert location_of(cloud, **h100(zones=["us-west-2c"])).candidates == ZONES


def test_a_pool_that_the_clusters_zone_lacks_needs_zones(cloud: Cloud) -> None:
    cloud.not_offered = {"p5.48xlarge": ("us-west-2a", "us-west-2b")}
    fields: dict[str, Any] = {"availability_zones": ["us-west-2b", "us-west-2c"]}
    with pytest.raises(
        SettingError, match=r"^availability_zones: 'us-west-2b' does not .* p5\.48xlarge; .*, or set the pool's zones$"
    ):
        location_of(cloud, **fields, **h100())
    location = location_of(cloud, **h100())
    with pytest.raises(
        SettingError, match=r"^availability_zones: '' is empty, .* moves there, or set the pool's zones$"
    ):
        check_zone(RayClusterArgs(**h100()), location, "us-west-2b")
    assert check_zone(RayClusterArgs(**h100()), location, "us-west-2c") == "us-west-2c"
    assert location_of(cloud, **fields, **h100(zones=["us-west-2c"])).worker_zones == ("us-west-2b", "us-west-2c")


def test_pools_without_a_common_zone_need_zones(cloud: Cloud) -> None:
    cloud.not_offered = {"p5.48xlarge": ("us-west-2a", "us-west-2b"), "g5.xlarge": ("us-west-2c",)}
    with pytest.raises(SettingError, match=r"^worker_pools\.h100\.instance_types: .*, or set the pool's zones$"):
        location_of(cloud, **h100())
    assert location_of(cloud, **h100(zones=["us-west-2c"])).candidates == ZONES[:2]


@pytest.mark.parametrize(
    ("keys", "field", "part"),
    [
        (
            {"zones": ["us-west-2c", "us-west-2b"]},
            "zones",
            "'us-west-2b' does not offer p5.48xlarge; use us-west-2c or",
        ),
        (
            {"zones": ["us-east-1c"]},
            "zones",
            "'us-east-1c' is not an availability zone of us-west-2; use us-west-2c",
        ),
        ({"zones": [""]}, "zones", "'' is not an availability zone of us-west-2"),
        ({"zones": ["us-west-2d"], "max": 0}, "zones", "'us-west-2d' is not an availability zone of us-west-2"),
        (
            {"instance_types": ["g99.huge"]},
            "instance_types",
            "'g99.huge' is not offered in any zone of us-west-2; check",
        ),
        (
            {"instance_types": ["g99.huge"], "zones": ["us-west-2a"]},
            "zones",
            "does not offer g99.huge; use another type",
        ),
    ],
)
def test_unfit_zones_of_a_pool_are_refused(cloud: Cloud, keys: dict[str, Any], field: str, part: str) -> None:
    cloud.not_offered = {"p5.48xlarge": ("us-west-2a", "us-west-2b")}
    with pytest.raises(SettingError) as refused:
        location_of(cloud, **h100(**keys))
    assert str(refused.value).startswith(f"worker_pools.h100.{field}: ")
    assert part in str(refused.value)


def test_zones_of_a_pool_need_a_subnet(cloud: Cloud) -> None:
    subnets = {"us-west-2b": "subnet-b", "us-west-2c": "subnet-c"}
    existing = ExistingNetwork(vpc_id="vpc-0a1b", subnets=subnets)
    assert location_of(cloud, existing, **h100(zones=["us-west-2c"])).worker_zones == ("us-west-2b", "us-west-2c")
    with pytest.raises(
        SettingError,
        match=r"^worker_pools\.h100\.zones: 'us-west-2a' has no subnet in subnet_ids; "
        "add a subnet in us-west-2a to subnet_ids, or use us-west-2b or us",
    ):
        location_of(cloud, existing, **h100(zones=["us-west-2a"]))


def test_some_subnets_may_be_for_pools_alone(cloud: Cloud) -> None:
    cloud.not_offered = {"g5.xlarge": ("us-west-2c",), "p5.48xlarge": ("us-west-2b",)}
    existing = ExistingNetwork(vpc_id="vpc-0a1b", subnets={"us-west-2b": "subnet-b", "us-west-2c": "subnet-c"})
    with pytest.raises(SettingError, match=r"^subnet_ids: 'subnet-c' is in us-west-2c, which does not offer g5"):
        location_of(cloud, existing, **h100(zones=["us-west-2c"]))
    location = location_of(cloud, existing, availability_zones=["us-west-2b"], **h100(zones=["us-west-2c"]))
    assert (location.zones, location.worker_zones) == (("us-west-2b", "us-west-2c"), ("us-west-2b",))
    with pytest.raises(SettingError, match=r"^availability_zones: 'us-west-2c' does not offer g5"):
        location_of(cloud, existing, availability_zones=["us-west-2c"])


def test_pools_use_the_endpoints_of_other_zones(cloud: Cloud) -> None:
    cloud.without_endpoint = {"ssm": ("us-west-2c",)}
    location = location_of(cloud, nat_gateway=False, **h100(zones=["us-west-2c"], spot=True))
    assert "ec2" in location.endpoints


def test_denied_offerings_leave_the_zones_of_pools(cloud: Cloud, warnings: list[str]) -> None:
    cloud.silent = ("getInstanceTypeOfferings",)
    fields: dict[str, Any] = {"availability_zones": ["us-west-2b"], **h100(zones=["us-west-2c"])}
    assert location_of(cloud, **fields).worker_zones == ("us-west-2b",)
    [line] = warnings
    assert line.endswith("continuing in us-west-2b, us-west-2c")


def test_only_outputs_are_a_network_of_the_program() -> None:
    assert network_of_program(RayClusterArgs()) is None
    assert network_of_program(RayClusterArgs(vpc_id="vpc-1", subnet_ids=["subnet-1"])) is None
    subnet = later("subnet-1")
    args = RayClusterArgs(vpc_id="vpc-1", subnet_ids=[subnet], availability_zones=["us-west-2b"])
    assert network_of_program(args) == ExistingNetwork(vpc_id="vpc-1", subnets={"us-west-2b": subnet})


@pytest.mark.parametrize("zones", [[], ["us-west-2a", "us-west-2b"]])
def test_each_subnet_of_the_program_needs_its_zone(zones: list[str]) -> None:
    args = RayClusterArgs(vpc_id=later("vpc-1"), subnet_ids=[later("subnet-1")], availability_zones=zones)
    with pytest.raises(SettingError, match=f"^availability_zones: '{','.join(zones)}' has {len(zones)} zones for 1 "):
        network_of_program(args)
