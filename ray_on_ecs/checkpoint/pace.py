"""Number of steps between two polls of the ranks, adapted to about one poll per second."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from ray_on_ecs import sdk
from ray_on_ecs.checkpoint.collectives import Collectives

POLL_SECONDS = 1.0

T = TypeVar("T")


class Pace:
    """Step counter for polls about one second apart; the count is the same on all ranks.

    Attributes:
        steps: Steps until the next poll.
    """

    def __init__(self) -> None:
        self.steps = 1
        self._since = 0
        self._polled_at = time.monotonic()

    def is_due(self) -> bool:
        """Count a step; returns True if the ranks poll after it."""
        self.steps -= 1
        self._since += 1
        return self.steps <= 0

    def poll(self, ranks: Collectives, decide: Callable[[float], T]) -> T:
        """Return rank 0's decision on all ranks, which must call it after the same step.

        Args:
            ranks: All ranks.
            decide: Called on rank 0 with the seconds until the first node is reclaimed; infinite without a notice.
        """
        seconds_left = ranks.gather(sdk.seconds_left())
        answer: Any = None
        if seconds_left:  # on rank 0
            answer = (self.next_interval(), decide(min(seconds_left)))
        self.steps, decision = ranks.broadcast(answer)
        return decision

    def next_interval(self) -> int:
        """Return the steps to the next poll from the speed of the last ones, on rank 0; at most twice as many."""
        now = time.monotonic()
        steps_per_poll = self._since * POLL_SECONDS / max(now - self._polled_at, 1e-6)
        interval = max(1, min(2 * self._since, round(steps_per_poll)))
        self._polled_at = now
        self._since = 0
        return interval
