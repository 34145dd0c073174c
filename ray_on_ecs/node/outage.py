"""Lines for a failure that lasts, and for its end."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from ray_on_ecs.errors import failure_of

logger = logging.getLogger(__name__)

# Shorter failures are not reported, for example while Ray starts, or a single lost answer.
REPORT_SECONDS = 60.0


class Outage:
    """Failures of one repeated action, whose name begins the lines, once they have lasted for so long."""

    def __init__(self, what: str, seconds: float = REPORT_SECONDS) -> None:
        self._what, self._seconds = what, seconds
        self._since = math.inf
        self._is_reported = False

    def attempt(self, action: Callable[[], object], now: float) -> bool:
        """Do it at this time in seconds, and note how it ends; return False if it fails."""
        cause = failure_of(action)
        self.note(cause, now)
        return cause is None

    def note(self, cause: str | None, now: float) -> None:
        """Note the reason of a failed attempt, or None for a success."""
        if cause is None:
            if self._is_reported:
                logger.warning(f"{self._what} works again")  # the level, and so the stream, of its begin
            self._since, self._is_reported = math.inf, False
            return
        self._since = min(self._since, now)
        if not self._is_reported and now - self._since >= self._seconds:
            self._is_reported = True
            lasts = f" for {self._seconds:.0f} s" if self._seconds else ""
            logger.warning(f"{self._what} has failed{lasts} ({cause}); trying again")
