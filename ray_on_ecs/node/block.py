"""The Capacity Block of this node's instance, of which EC2 tells nothing in the instance's metadata.

The node asks EC2 again and again, since a Block can be extended until an hour before its end.
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/capacity-blocks-extend.html
"""

from __future__ import annotations

import math
import os
import threading
import time
from functools import partial

from ray_on_ecs.aws import client, translated
from ray_on_ecs.cluster_info import LIMITS
from ray_on_ecs.contract import BLOCK_VARIABLE
from ray_on_ecs.errors import ResourceError
from ray_on_ecs.node.outage import Outage
from ray_on_ecs.reservations import Reservation, parse

# Between two questions, and before EC2's first answer.
READ_SECONDS, RETRY_SECONDS = 300.0, 30.0


class Block:
    """The Block as EC2 described it last."""

    def __init__(self) -> None:
        self._outage = Outage("the look-up of the Capacity Block's end", seconds=0)
        self._found: Reservation | None = None
        self._asking: threading.Thread | None = None
        self._asked_at = -math.inf

    def current(self, wait_seconds: float = 0.0) -> Reservation | None:
        """Return the Block; None for an instance without one, and before EC2's first answer, after waiting so long.

        EC2 is asked on another thread, as other notices count while it does not answer.
        """
        name, now = os.environ.get(BLOCK_VARIABLE), time.monotonic()
        is_old = now - self._asked_at >= (READ_SECONDS if self._found else RETRY_SECONDS)
        if name and is_old and not (self._asking and self._asking.is_alive()):
            self._asked_at = now
            ask = partial(self._outage.attempt, partial(self._ask, name), time.time())
            self._asking = threading.Thread(target=ask, name="block", daemon=True)
            self._asking.start()
        if self._asking and not self._found:
            self._asking.join(wait_seconds)
        return self._found

    def _ask(self, name: str) -> None:
        with translated("ec2"):
            answer = client("ec2", **LIMITS).describe_capacity_reservations(CapacityReservationIds=[name])
        found = parse(answer)
        if not found:
            raise ResourceError(f"EC2 does not describe {name}")
        self._found = found
