"""Whether a run continues after a failure: as long as it makes progress in between."""

from __future__ import annotations

from collections.abc import Callable


class RestartPolicy:
    """Counts failures without progress in between, whatever has failed. Progress is a new checkpoint.

    So a run of weeks on machines that fail every few days ends well, and one that can't work ends soon.

    Args:
        max_restarts: Failures in a row that are survived.
        newest_checkpoint: Returns the name of the newest stored checkpoint, or None; may raise OSError, which counts as
            no progress.
    """

    def __init__(self, max_restarts: int, newest_checkpoint: Callable[[], str | None]) -> None:
        self.max_restarts = max_restarts
        self.failures = 0
        self._newest_checkpoint = newest_checkpoint
        self._last_seen = newest_checkpoint()

    def survives_failure(self) -> bool:
        """Count a failure; returns whether the run continues."""
        if self._has_progressed():
            self.failures = 0
        self.failures += 1
        return self.failures <= self.max_restarts

    def survives_preemption(self) -> bool:
        """Count a preemption, which is a failure only if there was no progress; returns whether the run continues."""
        if self._has_progressed():
            self.failures = 0
            return True
        self.failures += 1
        return self.failures <= max(self.max_restarts, 1)

    def _has_progressed(self) -> bool:
        try:
            newest = self._newest_checkpoint()
        except OSError:
            return False
        progressed = newest != self._last_seen
        self._last_seen = newest
        return progressed
