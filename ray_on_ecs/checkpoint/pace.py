"""The number of steps between two moments at which the ranks agree on what to do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from ray_on_ecs import sdk
from ray_on_ecs.checkpoint.collectives import Collectives

POLL_SECONDS = 1.0

T = TypeVar("T")


class Pace:
    """Counts steps until the next poll, about a second after the last one; the count is the same on all ranks.

    Attributes:
        steps: Steps until the next poll.
    """

    def __init__(self) -> None:
        self.steps = 1
        self._since = 0
        self._polled_at = time.monotonic()

    def is_due(self) -> bool:
        """Count a step, and return whether the ranks poll after it."""
        self.steps -= 1
        self._since += 1
        return self.steps <= 0

    def poll(self, ranks: Collectives, decide: Callable[[float], T]) -> T:
        """Return rank 0's decision, the same on all ranks, which must call it after the same step.

        Args:
            ranks: All ranks.
            decide: Called on rank 0 with the seconds until the first of the nodes is reclaimed, infinite without a
                notice.
        """
        left = ranks.gather(sdk.seconds_left())
        answer: Any = (self.next_interval(), decide(min(left))) if left else None
        self.steps, decision = ranks.broadcast(answer)
        return decision

    def next_interval(self) -> int:
        """Return the steps to the next poll, on rank 0, from the time that those since the last one took."""
        now = time.monotonic()
        wanted = self._since * POLL_SECONDS / max(now - self._polled_at, 1e-6)
        interval = max(1, min(2 * self._since, round(wanted)))
        self._polled_at, self._since = now, 0
        return interval
