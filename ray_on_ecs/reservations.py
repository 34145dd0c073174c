"""Capacity reservations as EC2 describes them: start, end and use.

EC2 terminates the instances of a Capacity Block half an hour before it ends, without a notice in their metadata.
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/capacity-blocks-monitor.html
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from ray_on_ecs.contract import BLOCK_TERMINATES_MINUTES, BLOCK_WARNS_MINUTES, CAPACITY_BLOCK, reservation_name

# States of a reservation that gets its instances later.
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_CapacityReservation.html
NOT_YET = ("scheduled", "pending", "assessing", "payment-pending", "delayed")
TERMINATED, WARNED = timedelta(minutes=BLOCK_TERMINATES_MINUTES), timedelta(minutes=BLOCK_WARNS_MINUTES)


@dataclass(frozen=True)
class Reservation:
    """A capacity reservation; `start` and `end` are None where EC2 names none.

    `payer` is the account that pays for its unused instances, or empty if that is the stack's own.
    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/assign-billing.html
    """

    id: str
    is_block: bool
    state: str
    start: datetime | None
    end: datetime | None
    count: int
    free: int
    payer: str = ""

    def __str__(self) -> str:
        return reservation_name(self.id, is_block=self.is_block)

    @property
    def terminates_at(self) -> datetime | None:
        """The time from which EC2 terminates the instances; None if it does not. On demand they outlive it."""
        return self.end - TERMINATED if self.is_block and self.end else None

    @property
    def starts_at(self) -> datetime | None:
        """The start of one that gets its instances later; None if it has begun or never begins."""
        return self.start if self.state in NOT_YET else None

    def closed(self, now: datetime) -> str:
        """Return why it gets no instances now, free or not; empty if it does."""
        last = self.terminates_at
        if last and now >= last - WARNED:
            return f"{self} ends at {clock(self.end)}, and EC2 terminates its instances from {clock(last)}"
        if self.state == "active":
            return ""
        starts = f", and starts at {clock(self.start)}" if self.start and self.start > now else ""
        return f"{self} is {self.state}{starts}"

    def words(self, now: datetime) -> str:
        """Return kind, end, use and payer in words."""
        until = f" until {clock(self.end)}" if self.end else ""
        payer = f" to account {self.payer}" if self.payer else ""
        billed = "paid up front" if self.is_block else f"billed{payer} also without instances"
        closed = self.closed(now).removeprefix(f"{self} ").removeprefix("is ")
        return f"{self}{until}, {closed or f'{self.count - self.free} of {self.count} in use'}, {billed}"


def parse(answer: Any, account: str = "") -> Reservation | None:
    """Return the reservation in an answer to DescribeCapacityReservations for one; None without one.

    `account` is the stack's own; without it the payer is not known.
    """
    try:
        found = answer["CapacityReservations"][0]
        payer = str(found.get("UnusedReservationBillingOwnerId") or found.get("OwnerId") or "")
        return Reservation(
            id=str(found["CapacityReservationId"]),
            is_block=found.get("ReservationType") == CAPACITY_BLOCK,
            state=str(found["State"]),
            start=_time(found.get("StartDate")),
            end=_time(found.get("EndDate")),
            count=int(found["TotalInstanceCount"]),
            free=int(found.get("AvailableInstanceCount") or 0),
            payer="" if account in ("", payer) else payer,
        )
    except (AttributeError, LookupError, TypeError, ValueError):
        return None


def clock(time: datetime | None) -> str:
    """Return a time in words: `2026-01-02 03:04 UTC`."""
    return "" if time is None else f"{time.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def _time(value: object) -> datetime | None:
    return value if isinstance(value, datetime) and value.tzinfo else None
