"""Capacity reservations of pools: EC2's answers are judged, and instances are launched into the reservation alone."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import botocore.session
import pytest

from infra.config import RayClusterArgs, reservations
from infra.config import plan as plan_module
from infra.config.plan import Plan, make_plan
from infra.definitions.cluster_info import document
from infra.errors import SettingError
from infra.types import Reservation
from ray_on_ecs.contract import key_of
from tests.infra.fake_aws import ACCOUNT, REGION, Cloud
from tests.infra.reserved import BLOCK, ID, NOW, ON_DEMAND, POOL, ZONE
from tests.infra.stacks import deploy

OTHER = "210987654321"
GROUP = f"arn:aws:ec2:{REGION}:{{}}:placement-group/close"
UNFIT = {
    "instance_types is p5.48xlarge; set worker_pools.h100.instance_types to p4d.": {"InstanceType": "p4d.24xlarge"},
    "has 1 of 2 instances; lower worker_pools.h100.max and worker_pools.h100.initial": {"TotalInstanceCount": 1},
    "is on dedicated hardware": {"Tenancy": "dedicated"},
    "is for Red Hat Enterprise Linux": {"InstancePlatform": "Red Hat Enterprise Linux"},
    "is on the Outpost arn:aws:outposts": {"OutpostArn": "arn:aws:outposts:us-west-2:1:outpost/op-1"},
    "is interruptible": {"Interruptible": True},
    "is of the unknown type future": {"ReservationType": "future"},
    "is in the placement group": {"PlacementGroupArn": GROUP.format(OTHER)},
    "must be us-west-2a, the zone of capacity reservation": {"AvailabilityZone": "us-west-2a"},
}
ENDED = {
    "is expired": {"State": "expired"},
    "is cancelled": {"State": "cancelled"},
    "is cancelling": {"State": "cancelling"},
    "is failed": {"State": "failed"},
    "is payment-failed": {"State": "payment-failed"},
    "is unsupported": {"State": "unsupported"},
    "gets no more instances": {"EndDate": NOW + timedelta(minutes=39), "ReservationType": "capacity-block"},
    "ends at 2020-01-02 03:04 UTC": {"EndDate": datetime(2020, 1, 2, 3, 4, tzinfo=UTC)},
    "is expired; use another": {"State": "expired", "TotalInstanceCount": 0, "EndDate": NOW - timedelta(days=1)},
}
DOUBTFUL = {
    "is scheduled, and starts at 2099-01-02 03:04 UTC": {
        "State": "scheduled",
        "StartDate": datetime(2099, 1, 2, 3, 4, tzinfo=UTC),
    },
    "is payment-pending": {"State": "payment-pending"},
    "is pending": {"State": "pending"},
    "is delayed": {"State": "delayed"},
    "is assessing; until then": {"State": "assessing", "StartDate": None},
    f"belongs to account {OTHER}": {"OwnerId": OTHER},
    "is open": {"InstanceMatchCriteria": "open"},
}
# Fields that can't make a reservation unfit: names, numbers that change by the minute, and terms of the purchase.
HARMLESS = (
    "AdjustmentDetails AdjustmentStatus AvailabilityZoneId AvailableInstanceCount CapacityAllocations CapacityBlockId "
    "CapacityReservationArn CapacityReservationFleetId CommitmentInfo CreateDate DeliveryPreference EbsOptimized "
    "EndDateType EphemeralStorage InterruptibleCapacityAllocation InterruptionInfo LaunchStatus OriginalStartDate Tags "
    "ZeroSizePreference"
)


PRICES = {"m5.large": 0.096, "g5.xlarge": 1.006, "p5.48xlarge": 55.04}


def planned(*found: dict[str, Any], settings: dict[str, Any] | None = None, **of_cloud: Any) -> tuple[Plan, list[str]]:
    """The plan with a pool of two p5.48xlarge in a reservation, and the lines of its preview."""
    chosen: dict[str, Any] = {"worker_pools": {"h100": POOL}, **(settings or {})}
    args = RayClusterArgs(**chosen)
    cloud = Cloud(prices=PRICES, reservations=found, preview=True, **of_cloud)
    return cloud.run(lambda: make_plan(args, "ray-on-ecs")), cloud.messages


@cache
def stack(*, is_block: bool) -> Cloud:
    """The stack with this pool."""
    pool = {key_of(field): value for field, value in POOL.items()}
    config = {"workerPools": json.dumps({"h100": pool}), "natGateway": "false"}
    return deploy(config=config, prices=PRICES, reservations=(BLOCK if is_block else ON_DEMAND,))


@pytest.mark.parametrize(("problem", "changed"), UNFIT.items(), ids=range(len(UNFIT)))
def test_unfit_reservation_is_refused(problem: str, changed: dict[str, Any]) -> None:
    with pytest.raises(SettingError) as refused:
        planned({**ON_DEMAND, **changed})
    assert problem in str(refused.value)
    assert refused.value.subject in ("worker_pools.h100.capacity_reservation_id", "worker_pools.h100.zones")


@pytest.mark.parametrize(("problem", "changed"), ENDED.items(), ids=range(len(ENDED)))
def test_ended_reservation_is_told_and_costs_nothing(problem: str, changed: dict[str, Any]) -> None:
    plan, lines = planned({**ON_DEMAND, **changed})
    [error] = plan.ended
    assert problem in str(error)
    assert error.subject == "worker_pools.h100.capacity_reservation_id"
    assert str(error).endswith(
        f"use another reservation in {REGION}, set worker_pools.h100.max and worker_pools.h100.initial to 0, or remove "
        "the pool (without the key its instances are On-Demand)"
    )
    assert plan.nodes["h100-workers-c"].reservation
    assert not [line for line in lines if line.startswith(("capacity reservation", "Capacity Block"))]


@pytest.mark.parametrize("is_up", [False, True])
def test_only_a_new_cluster_refuses_an_ended_block(is_up: bool, warnings: list[str]) -> None:
    pool = {key_of(field): value for field, value in POOL.items()}
    ended = {**BLOCK, "State": "expired", "EndDate": NOW - timedelta(hours=1)}
    made = partial(
        deploy,
        preview=True,
        is_up=is_up,
        config={"workerPools": json.dumps({"h100": pool})},
        prices=PRICES,
        reservations=(ended,),
    )
    if not is_up:
        with pytest.raises(SettingError, match=r"^workerPools\.h100\.capacityReservationId: .* is expired; "):
            made()
        return
    template = made().resources["h100-workers-c-template"].inputs
    assert template["capacityReservationSpecification"]["capacityReservationTarget"]["capacityReservationId"] == ID
    assert [
        text for text in warnings if text.startswith(f"workerPools.h100.capacityReservationId: '{ID}' is expired; ")
    ]


@pytest.mark.parametrize(("problem", "changed"), DOUBTFUL.items(), ids=range(len(DOUBTFUL)))
def test_doubtful_reservation_is_a_warning(problem: str, changed: dict[str, Any], warnings: list[str]) -> None:
    planned({**ON_DEMAND, **changed})
    assert [text for text in warnings if problem in text]


def test_each_field_of_an_answer_is_judged_or_harmless() -> None:
    model = botocore.session.get_session().get_service_model("ec2").shape_for("CapacityReservation")
    assert isinstance(model.members, dict)
    assert model.members.keys() - {*reservations.FIELDS} == {*HARMLESS.split()}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"spot": True}, "cannot be combined with worker_pools.h100.spot"),
        ({"instance_types": ["p5.48xlarge", "p5e.48xlarge"]}, "has one instance type"),
        ({"zones": ["us-west-2a", "us-west-2c"]}, "is in one zone"),
        *(
            ({"capacity_reservation_id": text}, "is not the ID of a capacity reservation")
            for text in ("cr-", "cr-XYZ", "cr-0123456789abcdef01", "i-0123456789abcdef0", "h100", f" {ID}", f"{ID}/")
        ),
    ],
)
def test_contradiction_is_refused_without_a_look_up(settings: dict[str, Any], problem: str) -> None:
    pool: dict[str, Any] = {"instance_types": ["p5.48xlarge"], "max": 2, "capacity_reservation_id": ID, **settings}
    with pytest.raises(SettingError, match=problem):
        RayClusterArgs(worker_pools={"h100": pool})


def test_zone_without_a_subnet_asks_for_one() -> None:
    plan, _ = planned(ON_DEMAND)
    with pytest.raises(SettingError, match=f"; add a subnet in {ZONE} to subnet_ids, and set it to {ZONE}$"):
        reservations.check_zones({"h100": replace(plan.nodes["h100-workers-c"], zones=("us-west-2a",))}, ["us-west-2a"])


def test_two_pools_share_the_instances_of_a_reservation() -> None:
    pools = {"a": {**POOL, "max": 1}, "b": {**POOL, "max": 2}}
    with pytest.raises(SettingError, match="has 2 of 3 instances for ") as refused:
        planned(ON_DEMAND, settings={"worker_pools": pools})
    assert "worker_pools.a.max (1) + worker_pools.b.max (2); lower worker_pools.a.max and " in str(refused.value)


@pytest.mark.parametrize("error", ["UnauthorizedOperation", "InvalidCapacityReservationId.NotFound"])
def test_reservation_that_cannot_be_read_is_refused(error: str) -> None:
    with pytest.raises(SettingError, match=f"h100.capacity_reservation_id: '{ID}' could not be .*{error}"):
        planned(silent=("describe_capacity_reservations",), silence=error)


def test_unknown_reservation_is_refused() -> None:
    with pytest.raises(SettingError, match="could not be found"):
        planned({**ON_DEMAND, "CapacityReservationId": "cr-0000000000000000f"})


def test_pool_without_instances_asks_nothing() -> None:
    plan, _ = planned(settings={"worker_pools": {"h100": {**POOL, "max": 0}}})
    assert plan.nodes["h100-workers-c"].reservation is None


@pytest.mark.parametrize(("is_block", "market"), [(False, None), (True, {"marketType": "capacity-block"})])
def test_instances_are_launched_into_the_reservation_alone(is_block: bool, market: Any) -> None:
    resources = stack(is_block=is_block).resources
    template, group = resources["h100-workers-c-template"].inputs, resources["h100-workers-c-group"].inputs
    target = {"capacityReservationTarget": {"capacityReservationId": ID}}
    assert template["capacityReservationSpecification"] == target
    assert template.get("instanceMarketOptions") == market
    assert group["launchTemplate"]["version"] == "$Latest"
    assert group.keys().isdisjoint({"mixedInstancesPolicy", "placementGroup"})
    assert not [name for name in resources if name.startswith("h100-workers-c-placement")]


def test_own_placement_group_of_a_reservation_is_used() -> None:
    plan, _ = planned({**ON_DEMAND, "PlacementGroupArn": GROUP.format(ACCOUNT)})
    reservation = plan.nodes["h100-workers-c"].reservation
    assert reservation
    assert reservation.placement_group == "close"


DEFAULT = {"worker_instance_types": ["p5.48xlarge"], "worker_capacity_reservation_id": ID, "worker_pools": {}}


def test_default_pool_can_have_a_reservation() -> None:
    plan, _ = planned(BLOCK, settings={**DEFAULT, "availability_zones": [ZONE]})
    assert plan.nodes["workers"].is_in_block
    assert not plan.nodes["head"].reservation
    for zones in (["us-west-2a"], []):
        with pytest.raises(SettingError, match=f"availability_zones: '{''.join(zones)}' must be {ZONE}"):
            planned(BLOCK, settings={**DEFAULT, "availability_zones": zones})


def test_only_a_block_asks_for_the_type_in_blocks() -> None:
    args, cloud = RayClusterArgs(worker_pools={"h100": POOL}), Cloud(reservations=(BLOCK,))
    for found, usage in ((BLOCK, "capacity-block"), (ON_DEMAND, "on-demand")):
        reservation = Reservation(id=ID, is_block=found is BLOCK, zone=ZONE, count=2)
        [question] = plan_module._types(args, "h100", cloud.region, reservation)
        [usages, _] = question.rules
        assert not usages.problem_of(SimpleNamespace(supported_usages_classes=[usage]))


@pytest.mark.parametrize(("is_block", "variable"), [(False, None), (True, ID)])
def test_worker_in_a_block_may_read_its_end(is_block: bool, variable: str | None) -> None:
    resources = stack(is_block=is_block).resources
    [container] = json.loads(resources["h100-worker-c-task-definition"].inputs["containerDefinitions"])
    assert {each["name"]: each["value"] for each in container["environment"]}.get("CAPACITY_BLOCK") == variable
    policies = [resources[f"{kind}-task-role-policy"].inputs["policy"] for kind in ("head", "worker", "h100-worker-c")]
    allowed = ["ec2:DescribeCapacityReservations" in policy for policy in policies]
    assert allowed == [True, False, is_block]


def test_block_without_a_nat_gateway_has_the_endpoint_of_ec2() -> None:
    endpoints = stack(is_block=True).of_type("aws:ec2/vpcEndpoint:VpcEndpoint")
    assert f"com.amazonaws.{REGION}.ec2" in [endpoint.inputs["serviceName"] for endpoint in endpoints]


def test_reservation_has_passed_the_quota() -> None:
    planned(ON_DEMAND, quotas={"L-417A185B": 0.0})


def test_block_costs_nothing_more_by_the_hour(warnings: list[str]) -> None:
    plan, lines = planned(BLOCK, settings={"worker_pools": {"h100": POOL}, "max_hourly_usd": 3})
    assert plan.hourly_usd
    assert plan.hourly_usd < 3
    [line] = [line for line in lines if line.startswith("pool h100")]
    assert line.startswith("pool h100: 2 x p5.48xlarge with ")
    assert f", in Capacity Block {ID}, at most 0.0" in line
    assert line.endswith(" USD per hour, as it is paid up front")
    assert [line for line in lines if f"Capacity Block {ID} is paid up front" in line]
    assert not [text for text in warnings if "cost estimate" in text]


def test_preview_names_the_cost_of_unused_instances() -> None:
    _, lines = planned({**ON_DEMAND, "TotalInstanceCount": 4})
    assert [line for line in lines if f", in capacity reservation {ID}, at most 110.1" in line]
    unused = f"capacity reservation {ID} (4 x p5.48xlarge) is billed also without instances and after `pulumi destroy`"
    assert [line for line in lines if line.startswith(f"{unused}: 220.16 USD an hour (160,717 a month), of which")]


@pytest.mark.parametrize("owner", [{"OwnerId": OTHER}, {"OwnerId": "3" * 12, "UnusedReservationBillingOwnerId": OTHER}])
def test_unused_instances_of_a_shared_reservation_have_their_payer(owner: dict[str, str]) -> None:
    _, lines = planned({**ON_DEMAND, **owner})
    assert [line for line in lines if f"is billed, to account {OTHER}, also without instances" in line]


def test_price_on_demand_stays_beside_a_block_of_the_same_type() -> None:
    pools = {"a": {**POOL, "capacity_reservation_id": "", "max": 1}, "z": POOL}
    plan, _ = planned(BLOCK, settings={"worker_pools": pools, "check_quotas": False})
    names = dict.fromkeys(plan.nodes, "x")
    text = document(plan.nodes, plan.scales, cluster="ray", zone=ZONE, group_names=names, provider_names=names)
    info = json.loads(text)
    assert info["prices"]["p5.48xlarge"] > 55
    assert info["groups"]["z-workers-c"]["reservation"] == {"id": ID, "is_block": True}
    assert "reservation" not in info["groups"]["a-workers-c"]
