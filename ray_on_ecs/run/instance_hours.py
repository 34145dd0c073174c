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
        # Numbers of instances, and until when (monotonic time) there were as many.
        self._numbers: list[tuple[Mapping[InstanceKind, int], float]] = []
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
            numbers = self._count()
            for kind, number in numbers.items():
                self.by_kind[kind] += number * (now - self._read_at) / 3600
            if self._numbers and self._numbers[-1][0] == numbers:
                self._numbers.pop()
            self._numbers.append((numbers, now))
        self._read_at = now

    def most(self, seconds: float) -> dict[InstanceKind, int]:
        """Return the highest number of instances of each kind in the last seconds: the idle stop leaves as many."""
        most: dict[InstanceKind, int] = {}
        for numbers, until in self._numbers:
            if self._read_at is not None and until >= self._read_at - seconds:
                most |= {kind: max(number, most.get(kind, 0)) for kind, number in numbers.items() if number}
        return most
