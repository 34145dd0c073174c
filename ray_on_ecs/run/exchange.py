"""A worker's side of the driver's polls."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

from ray_on_ecs.run.group import Directive, WorkerStatus

# The driver counts as lost when it has not polled for so long: it may wait for a slow storage meanwhile.
# Ray ends the workers of a driver that has died.
DRIVER_LOST_SECONDS = 600.0
# A waiting process looks more often than this, unless it is stopped.
PAUSE_SECONDS = 10.0
# Changes of these wait for the next poll; any other change answers the driver at once.
UNHURRIED = ("silent_seconds", "step", "metrics", "guess", "extent", "readings")


class Silence:
    """The time since the last sign of life of another process.

    This process may have been stopped itself, and has not read meanwhile what the other one has sent.
    """

    def __init__(self) -> None:
        self._since = self._looked_at = time.monotonic()

    def end(self) -> None:
        """Take note of a sign of life."""
        self._since = time.monotonic()

    def measure(self) -> float:
        """Return the time so far in seconds; call it more often than every `PAUSE_SECONDS`."""
        now = time.monotonic()
        if now - self._looked_at > PAUSE_SECONDS:
            self._since = now
        self._looked_at = now
        return now - self._since


class Exchange:
    """The last directive for a worker, and the status that its next answer has.

    The worker's threads write the status and wait for directives; the driver polls on another thread.

    Attributes:
        status: The worker's status.
        directive: The driver's last directive; before the first, one of a start that never was.
        poll_number: The number of the driver's last poll.
    """

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._version = 0
        self._polls = 0
        self._silence = Silence()
        self.status = WorkerStatus()
        self.directive = Directive(generation=-1)
        self.poll_number = 0

    def poll(self, number: int, directive: Directive, known: int, seconds: float) -> tuple[int, WorkerStatus]:
        """Take the directive; return the version of the status, and the status.

        Args:
            number: The number of this poll; the driver's polls of all workers are counted together.
            directive: The directive.
            known: The version that the driver knows.
            seconds: How long to wait for another one; the next poll ends the wait.
        """
        with self._news:
            self._polls += 1
            own = self._polls
            self._silence.end()
            if number > self.poll_number:  # of two polls the older one may arrive last
                self.poll_number, self.directive = number, directive
            self._news.notify_all()
            self._news.wait_for(lambda: self._version != known or self._polls != own, seconds)
            return self._version, replace(self.status, clock=time.time())

    def report(self, **changes: Any) -> None:
        """Change the status."""
        with self._news:
            before, self.status = self.status, replace(self.status, **changes)
            unhurried = {name: getattr(before, name) for name in UNHURRIED}
            if replace(self.status, **unhurried) != before:
                self._version += 1
                self._news.notify_all()

    def begin(self, generation: int) -> None:
        """Begin a start of the scripts, with the status of a worker whose script has not started."""
        kept = {name: getattr(self.status, name) for name in ("metrics", "url", "is_prepared")}
        with self._news:
            self.status = WorkerStatus(generation=generation, **kept)
            self._version += 1
            self._news.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait for the driver's next poll, or for a time."""
        with self._news:
            polls = self._polls
            self._news.wait_for(lambda: self._polls != polls, seconds)

    @property
    def is_to_run(self) -> bool:
        """True while the driver wants the scripts of this start to run."""
        directive = self.directive
        is_this_start = directive.generation == self.status.generation
        return is_this_start and directive.action == "run" and not self.has_lost_driver

    @property
    def has_lost_driver(self) -> bool:
        """True once the driver has not polled for long."""
        return self._silence.measure() > DRIVER_LOST_SECONDS
