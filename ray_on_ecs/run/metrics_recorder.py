"""Rank 0's metrics, on their way to the run's folder and to the run's actor."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ray_on_ecs.errors import one_line
from ray_on_ecs.run.metrics import MetricsLog, tracker_url
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.tracking.records import RecordFile, merge_records, read_records
from ray_on_ecs.tracking.run_actor import Progress, RunClient

logger = logging.getLogger(__name__)


class MetricsRecorder:
    """Records the metrics of a run's script, and reports them and its progress to the run's actor.

    Raises:
        OSError: The records of the run's earlier parts can't be read.
    """

    def __init__(self, patterns: Mapping[str, str], storage: RunStorage, actor: RunClient) -> None:
        self._log = MetricsLog(patterns, read_records(storage))
        self._file = RecordFile(storage)
        self._storage = storage
        self._actor = actor
        self._reported: tuple[int, dict[str, Any]] | None = None
        self._reported_guess: dict[str, Any] = {}

    @property
    def step(self) -> int | None:
        """The steps that the script has reported since its start, or None before the first."""
        return self._log.step

    def restart(self) -> None:
        """Forget the step: the script begins again."""
        self._log.restart()

    def take_report(self, report: Mapping[str, Any]) -> None:
        """Take a report that the script has made through `ray_on_ecs.sdk`."""
        self._log.take_report(report)

    def read_line(self, line: str) -> None:
        """Take the metrics of a line of output, and the address of the run at an experiment tracker."""
        self._log.read_line(line)
        if url := tracker_url(line):
            self._actor.report_url(url)

    def write(self, *, is_last: bool = False) -> None:
        """Report the latest metrics, and store the new ones; an error is printed, and the next call tries again.

        Args:
            is_last: True if the script has ended, so that the parts of the records can be merged.
        """
        guess = self._log.guess
        if guess and guess != self._reported_guess:
            self._actor.report_guess(guess)
            self._reported_guess = guess
        last = self._log.last
        if last is None:
            return
        if last != self._reported:
            self._actor.report_metrics(*last)
            self._reported = last
        try:
            self._file.write(self._log)
            if is_last:
                merge_records(self._storage)
        except OSError as cause:
            logger.warning(f"the metrics could not be stored, and will be tried again ({one_line(cause)})")

    def report_progress(self, workers: str) -> None:
        """Report the step of these workers; 0 before the first."""
        self._actor.report(Progress(workers, self.step or 0))
