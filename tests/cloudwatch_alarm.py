"""CloudWatch alarm on data points that may be missing, by the two readings of AWS's documents.

https://docs.aws.amazon.com/AmazonCloudWatch/latest/monitoring/alarms-and-missing-data.html
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """Alarm whose state at a time follows from its data points.

    Attributes:
        period: Seconds of a data point, and between two evaluations.
        points: Data points that it evaluates.
        needed: Those of them that must breach.
        spare: Periods by which the evaluation range is longer: the newest real data points in the range count.
        at_once: The other reading: a missing data point counts as missing at once.
        missing_breaches: Missing data points are treated as breaching.
        phase: Time of the first evaluation.
        delay: Seconds by which an evaluation is late, and sees older periods.
    """

    period: int
    points: int = 1
    needed: int = 1
    spare: int = 0
    at_once: bool = False
    missing_breaches: bool = False
    phase: float = 0.0
    delay: float = 0.0

    def sees(self, slot: int, visible_at: float = 0.0) -> float:
        """Return the time of the first evaluation with a period's data point."""
        ready = max(visible_at, (slot + 1) * self.period + self.delay)
        return self.phase + math.ceil((ready - self.phase) / self.period) * self.period

    def rings(self, now: float, breaches: Callable[[int], bool | None]) -> bool:
        """Return True if it is active; `breaches` is None for a period without a data point."""
        newest = math.floor((now - self.delay) / self.period) - 1
        breaching = evaluated = 0
        for slot in range(newest, newest - self.points - self.spare, -1):
            point = breaches(slot)
            if point is None and not self.at_once:
                continue
            breaching += self.missing_breaches if point is None else point
            evaluated += 1
            if breaching == self.needed:
                return True
            if evaluated == self.points:
                break
        return breaching + self.missing_breaches * (self.points - evaluated) >= self.needed
