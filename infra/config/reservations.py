"""Capacity reservations that pools name: EC2's answers, and the rules for them.

The AWS provider has no data source for On-Demand Capacity Reservations: hence boto3.
https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_CapacityReservation.html
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pulumi

from infra.config.args import RayClusterArgs
from infra.config.clients import client
from infra.config.lookup_rules import Rule, warning
from infra.config.lookups import REFUSE, Question, ask_all, judge
from infra.config.worker_pool import counts_of
from infra.errors import SettingError
from infra.types import Caller, NodeSpec, Reservation
from ray_on_ecs.contract import BLOCK_TERMINATES_MINUTES, BLOCK_WARNS_MINUTES, CAPACITY_BLOCK, field_of

# Fields of EC2's answer that can make a reservation unfit.
FIELDS = (
    *("CapacityReservationId", "State", "OwnerId", "InstanceType", "AvailabilityZone", "TotalInstanceCount"),
    *("Tenancy", "InstancePlatform", "StartDate", "EndDate", "InstanceMatchCriteria", "ReservationType"),
    *("OutpostArn", "PlacementGroupArn", "Interruptible", "UnusedReservationBillingOwnerId"),
)
# States in which a reservation gets no instances any more; in all others but `active` it gets none yet.
OVER = ("expired", "cancelled", "cancelling", "failed", "payment-failed", "unsupported")
# From then on, runs save and leave.
LAST_MINUTES = BLOCK_TERMINATES_MINUTES + BLOCK_WARNS_MINUTES


def look_up(
    args: RayClusterArgs, caller: Caller, opts: pulumi.InvokeOptions | None = None
) -> tuple[dict[str, Reservation], list[SettingError]]:
    """Reservations by pool, and the errors of those that have ended; SettingError if one is unfit, or is not found."""
    named = {name: pool for name, pool in args.pools.items() if pool.capacity_reservation_id and pool.most}
    if not named:
        return {}, []
    ec2, most = client("ec2", caller.region), _most(args)
    questions = []
    for name, pool in named.items():
        reservation_id = pool.capacity_reservation_id
        call = partial(_describe, ec2, reservation_id)
        hint = f"use another reservation in {caller.region}, set {counts_of(name)} to 0, or remove the pool"
        hint += " (without the key its instances are On-Demand)"
        field = field_of(name, "capacity_reservation_id")
        questions.append(
            Question(field, reservation_id, "ec2:DescribeCapacityReservations", call, [], hint, denied=REFUSE)
        )
    reserved, ended = {}, []
    for (name, pool), question, found in zip(named.items(), questions, ask_all(questions, opts), strict=True):
        if problem := _end(found):
            ended.append(SettingError(question.field, question.value, problem, question.hint))
        else:
            conditions = rules(name, pool.instance_types[0], most[question.value], caller, found.InstanceType)
            judge(question, conditions, found)
        reserved[name] = _reservation(found, caller, has_ended=bool(problem))
    return reserved, ended


def check_zones(nodes: Mapping[str, NodeSpec], zones: Collection[str]) -> None:
    """Refuse a pool in another zone than its reservation, also one whose zone the state keeps.

    `zones` are those of the existing subnets, or of the region.
    """
    for node in nodes.values():
        reservation = node.reservation
        if reservation and node.zones != (reservation.zone,):
            field = field_of(node.pool, "zones")
            problem = f"must be {reservation.zone}, the zone of {reservation}"
            subnet = "" if reservation.zone in zones else f"add a subnet in {reservation.zone} to subnet_ids, and "
            raise SettingError(field, ",".join(node.zones), problem, f"{subnet}set it to {reservation.zone}")


def rules(pool: str, instance_type: str, most: Mapping[str, int], caller: Caller, reserved_type: str) -> list[Rule]:
    """Rules for the reservation of a pool; `most` has the number of instances of each pool that names it."""
    types, account, number = field_of(pool, "instance_types"), caller.account, sum(most.values())
    maxima = " + ".join(f"{field_of(name, 'max')} ({count})" for name, count in most.items())
    of_pools = f" for {maxima}" if len(most) > 1 else ""
    to_lower = " or ".join(map(counts_of, most))

    def is_own_group(arn: str) -> bool:
        return not arn or arn.split(":")[4] == account

    return [
        Rule(
            "InstanceType",
            (instance_type,),
            f"is of {{}}, and {types} is {instance_type}",
            f"set {types} to {reserved_type}",
        ),
        Rule(
            "TotalInstanceCount",
            lambda count: count >= number,
            f"has {{}} of {number} instances{of_pools}",
            f"lower {to_lower}",
        ),
        Rule("Tenancy", ("default",), "is on {} hardware, and the instances are on shared hardware"),
        Rule("InstancePlatform", ("Linux/UNIX",), "is for {}, and the instances run Amazon Linux (Linux/UNIX)"),
        Rule("OutpostArn", lambda arn: not arn, "is on the Outpost {}"),
        Rule("Interruptible", (False,), "is interruptible, which needs another market type"),
        Rule("ReservationType", ("default", CAPACITY_BLOCK), "is of the unknown type {}"),
        Rule("PlacementGroupArn", is_own_group, "is in the placement group {}, which Auto Scaling can't use"),
        warning("waits", ("",), "is {}", "until then runs in this pool wait, or go to their next pool"),
        warning("OwnerId", (account,), "belongs to account {}, which can end the sharing", "ask its owner until when"),
        warning(
            "InstanceMatchCriteria",
            ("targeted",),
            "is {}, so that other instances of its type take it, too",
            "without this key, instances also use it",
        ),
    ]


def _end(found: Any) -> str:
    """Reason why a reservation gets no more instances; empty if it does."""
    now = datetime.now(UTC)

    def lasts(end: datetime, kind: str) -> bool:
        return end > now + timedelta(minutes=LAST_MINUTES if kind == CAPACITY_BLOCK else 0)

    ends = Rule("EndDate ReservationType", lasts, "ends at {:%Y-%m-%d %H:%M} UTC, and gets no more instances")
    return f"is {found.State}" if found.State in OVER else ends.problem_of(found)


def _most(args: RayClusterArgs) -> dict[str, dict[str, int]]:
    """Maximum number of instances of each pool, by reservation."""
    most: dict[str, dict[str, int]] = {}
    for name, pool in args.pools.items():
        if pool.most:
            most.setdefault(pool.capacity_reservation_id, {})[name] = pool.most
    return most


def _describe(ec2: Any, reservation_id: str, opts: Any) -> Any:
    described = ec2.describe_capacity_reservations(CapacityReservationIds=[reservation_id])
    found: Sequence[Any] = described["CapacityReservations"]
    if not found:
        raise LookupError(f"{reservation_id} not found")
    answer = SimpleNamespace(**{field: found[0].get(field) for field in FIELDS})
    answer.waits = ""
    if answer.State != "active":
        starts = f", and starts at {answer.StartDate:%Y-%m-%d %H:%M} UTC" if answer.StartDate else ""
        answer.waits = f"{answer.State}{starts}"
    return answer


def _reservation(found: Any, caller: Caller, *, has_ended: bool) -> Reservation:
    return Reservation(
        id=found.CapacityReservationId,
        is_block=found.ReservationType == CAPACITY_BLOCK,
        zone=found.AvailabilityZone,
        count=0 if has_ended else found.TotalInstanceCount,
        payer="" if found.OwnerId == caller.account else found.UnusedReservationBillingOwnerId or found.OwnerId,
        placement_group=(found.PlacementGroupArn or "").rpartition("/")[2],
    )
