"""Instance hours of a run: how long it has held instances of the cluster."""

from __future__ import annotations

import threading
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
        self._lock = threading.Lock()
        self._read_at: float | None = None
        # Numbers of instances, and until when (monotonic time) there were as many.
        self._numbers: list[tuple[Mapping[InstanceKind, int], float]] = []
        self.by_kind: dict[InstanceKind, float] = defaultdict(float)

    @contextmanager
    def running(self) -> Generator[None]:
        """Count until the block ends."""
        self.read()
        with run_every(POLL_SECONDS, self.read, "instance hours"):
            yield
        self.read()

    def read(self, now: float | None = None) -> None:
        """Add the time since the last reading, by the number of instances that there are now (monotonic time).

        It does nothing while another thread reads, which may wait for Ray.
        """
        if self._lock.acquire(blocking=False):
            try:
                self._add(time.monotonic() if now is None else now)
            finally:
                self._lock.release()

    def _add(self, now: float) -> None:
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
