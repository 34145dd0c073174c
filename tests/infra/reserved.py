"""A capacity reservation and a Capacity Block as EC2 describes them, and a pool in one."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from tests.infra.fake_aws import ACCOUNT

ID, ZONE = "cr-0123456789abcdef0", "us-west-2c"
NOW = datetime.now(UTC)
# As EC2 describes an On-Demand Capacity Reservation, and a Capacity Block.
ON_DEMAND: dict[str, Any] = {
    "CapacityReservationId": ID,
    "OwnerId": ACCOUNT,
    "InstanceType": "p5.48xlarge",
    "InstancePlatform": "Linux/UNIX",
    "AvailabilityZone": ZONE,
    "Tenancy": "default",
    "TotalInstanceCount": 2,
    "AvailableInstanceCount": 2,
    "State": "active",
    "StartDate": NOW - timedelta(days=1),
    "EndDateType": "unlimited",
    "InstanceMatchCriteria": "targeted",
    "ReservationType": "default",
    "Interruptible": False,
}
BLOCK = {**ON_DEMAND, "ReservationType": "capacity-block", "EndDateType": "limited", "EndDate": NOW + timedelta(days=2)}
POOL: dict[str, Any] = {"instance_types": ["p5.48xlarge"], "zones": [ZONE], "max": 2, "capacity_reservation_id": ID}
