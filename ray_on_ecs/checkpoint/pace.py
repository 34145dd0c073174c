"""The number of steps between two moments at which the ranks agree on what to do."""

from __future__ import annotations

import time

POLL_SECONDS = 1.0


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

    def next_interval(self) -> int:
        """Return the steps to the next poll, on rank 0, from the time that those since the last one took."""
        now = time.monotonic()
        wanted = self._since * POLL_SECONDS / max(now - self._polled_at, 1e-6)
        interval = max(1, min(2 * self._since, round(wanted)))
        self._polled_at, self._since = now, 0
        return interval
