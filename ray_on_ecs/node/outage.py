"""Lines for a failure that lasts, and for its end."""

from __future__ import annotations

import math

# Shorter failures are not reported, for example while Ray starts, or a single lost answer.
REPORT_SECONDS = 60.0


class Outage:
    """Failures of one repeated action, whose name begins the lines."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._since = math.inf
        self._is_reported = False

    def note(self, cause: str | None, now: float) -> str:
        """Note the failure of an attempt, or its success; return a line to print, or nothing.

        Args:
            cause: The reason of the failure, or None.
            now: The time in seconds.
        """
        if cause is None:
            line = f"{self._what} works again" if self._is_reported else ""
            self._since, self._is_reported = math.inf, False
            return line
        self._since = min(self._since, now)
        if self._is_reported or now - self._since < REPORT_SECONDS:
            return ""
        self._is_reported = True
        return f"{self._what} has failed for {REPORT_SECONDS:.0f} s ({cause}); trying again"
