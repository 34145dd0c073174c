"""Instance hours of a run: how long it has held instances of the cluster."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

from ray_on_ecs.periodic import run_every
from ray_on_ecs.tracking.cost import InstanceKind

POLL_SECONDS = 2.0  # AWS bills by the second


class InstanceHours:
    """Adds up the hours of the instances on which this driver's workers have a place, whether they run or start.

    Attributes:
        by_kind: The sum so far, by kind.
    """

    def __init__(self, count: Callable[[], Mapping[InstanceKind, int]]) -> None:
        self._count = count
        self._read_at: float | None = None
        self.by_kind: dict[InstanceKind, float] = defaultdict(float)

    @contextmanager
    def running(self) -> Generator[None]:
        """Count until the block ends."""
        self.read(time.monotonic())
        with run_every(POLL_SECONDS, lambda: self.read(time.monotonic()), "instance hours"):
            yield
        self.read(time.monotonic())

    def read(self, now: float) -> None:
        """Add the time since the last reading, by the number of instances that there are now."""
        if self._read_at is not None:
            for kind, number in self._count().items():
                self.by_kind[kind] += number * (now - self._read_at) / 3600
        self._read_at = now
