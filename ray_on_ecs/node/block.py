"""The Capacity Block of this node's instance, of which EC2 tells nothing in the instance's metadata.

The node asks EC2 again and again, since a Block can be extended until an hour before its end.
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/capacity-blocks-extend.html
"""

from __future__ import annotations

import os
import time

from ray_on_ecs.aws import client, translated
from ray_on_ecs.cluster_info import LIMITS, recent
from ray_on_ecs.contract import BLOCK_VARIABLE
from ray_on_ecs.errors import TrainingError, one_line
from ray_on_ecs.node.outage import Outage
from ray_on_ecs.reservations import Reservation, parse

READ_SECONDS = 300.0

_outage = Outage("the look-up of the Capacity Block's end", seconds=0)


def current() -> Reservation | None:
    """Return the Block as EC2 described it last; None for an instance without one, and before EC2's first answer."""
    name = os.environ.get(BLOCK_VARIABLE)
    return recent((BLOCK_VARIABLE, name), lambda: _read(name), READ_SECONDS) if name else None


def _read(name: str) -> Reservation | None:
    try:
        with translated("ec2"):
            answer = client("ec2", **LIMITS).describe_capacity_reservations(CapacityReservationIds=[name])
    except TrainingError as cause:
        _outage.note(one_line(cause), time.time())
        return None
    found = parse(answer)
    _outage.note(None if found else f"EC2 does not describe {name}", time.time())
    return found
