"""Start, end and use of a capacity reservation, from EC2's answers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from ray_on_ecs.reservations import TERMINATED, WARNED, Reservation, parse

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
END = NOW + timedelta(days=2)
FOUND: dict[str, Any] = {
    "CapacityReservationId": "cr-0123456789abcdef0",
    "State": "active",
    "StartDate": NOW - timedelta(days=1),
    "TotalInstanceCount": 2,
    "AvailableInstanceCount": 1,
    "ReservationType": "default",
}
BLOCK = {**FOUND, "ReservationType": "capacity-block", "EndDate": END}


def parsed(found: dict[str, Any]) -> Reservation:
    made = parse({"CapacityReservations": [found]})
    assert made
    return made


@pytest.mark.parametrize(
    "answer",
    [
        *({}, [], None, "<html>", {"CapacityReservations": []}, {"CapacityReservations": [None]}),
        *({"CapacityReservations": [{key: FOUND[key] for key in FOUND if key != left}]} for left in [*FOUND][:2]),
        {"CapacityReservations": [{**FOUND, "TotalInstanceCount": None}]},
        {"CapacityReservations": [{**FOUND, "TotalInstanceCount": "many"}]},
    ],
)
def test_foreign_answer_is_no_reservation(answer: Any) -> None:
    assert parse(answer) is None


@pytest.mark.parametrize("end", ["soon", 1, None, datetime(2026, 1, 1)])
def test_foreign_end_is_none(end: Any) -> None:
    assert parsed({**BLOCK, "EndDate": end}).terminates_at is None


def test_only_a_block_ends_its_instances() -> None:
    assert parsed(BLOCK).terminates_at == END - TERMINATED
    assert parsed({**FOUND, "EndDate": END}).terminates_at is None
    assert parsed(FOUND).terminates_at is None


def test_block_is_closed_from_the_warning_on() -> None:
    block, last = parsed(BLOCK), END - TERMINATED - WARNED
    assert not block.closed(last - timedelta(seconds=1))
    assert block.closed(last) == (
        "Capacity Block cr-0123456789abcdef0 ends at 2026-01-03 12:00 UTC, and EC2 terminates its instances from "
        "2026-01-03 11:30 UTC"
    )


@pytest.mark.parametrize("state", ["scheduled", "pending", "payment-pending", "assessing", "delayed"])
@pytest.mark.parametrize("found", [FOUND, BLOCK])
def test_reservation_that_has_not_begun_names_its_start(found: dict[str, Any], state: str) -> None:
    later = {**found, "State": state, "StartDate": NOW + timedelta(hours=5)}
    assert parsed(later).closed(NOW).endswith(f" is {state}, and starts at 2026-01-01 17:00 UTC")
    assert parsed({**later, "StartDate": None}).closed(NOW).endswith(f" is {state}")


@pytest.mark.parametrize(
    "state", ["expired", "cancelled", "cancelling", "failed", "payment-failed", "unsupported", "x"]
)
def test_ended_reservation_is_closed(state: str) -> None:
    assert parsed({**FOUND, "State": state}).closed(NOW) == f"capacity reservation cr-0123456789abcdef0 is {state}"


OWN, OTHER = "123456789012", "210987654321"


@pytest.mark.parametrize(
    ("owners", "account", "payer"),
    [
        *(({}, OWN, ""), ({"OwnerId": OWN}, OWN, ""), ({"OwnerId": None}, OWN, ""), ({"OwnerId": OTHER}, "", "")),
        ({"OwnerId": OTHER}, OWN, OTHER),
        ({"OwnerId": OTHER, "UnusedReservationBillingOwnerId": OWN}, OWN, ""),
        ({"OwnerId": OWN, "UnusedReservationBillingOwnerId": OTHER}, OWN, OTHER),
        ({"OwnerId": OTHER, "UnusedReservationBillingOwnerId": None}, OWN, OTHER),
    ],
)
def test_payer_is_another_account(owners: dict[str, str], account: str, payer: str) -> None:
    made = parse({"CapacityReservations": [{**FOUND, **owners}]}, account)
    assert made
    assert made.payer == payer
    assert made.words(NOW).endswith(f"billed{f' to account {payer}' if payer else ''} also without instances")


def test_words_name_kind_end_and_use() -> None:
    assert parsed(FOUND).words(NOW) == (
        "capacity reservation cr-0123456789abcdef0, 1 of 2 in use, billed also without instances"
    )
    assert parsed(BLOCK).words(NOW) == (
        "Capacity Block cr-0123456789abcdef0 until 2026-01-03 12:00 UTC, 1 of 2 in use, paid up front"
    )
    later = {**BLOCK, "State": "scheduled", "StartDate": NOW + timedelta(hours=5)}
    assert parsed(later).words(NOW) == (
        "Capacity Block cr-0123456789abcdef0 until 2026-01-03 12:00 UTC, scheduled, and starts at 2026-01-01 17:00 "
        "UTC, paid up front"
    )
