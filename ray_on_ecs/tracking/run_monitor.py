"""Progress and metrics of a run, as rank 0 reports them to the driver."""

from __future__ import annotations

from typing import Any


class RunMonitor:
    """Progress and metrics of a run."""

    def __init__(self) -> None:
        self._start = -1
        self._last_number = -1
        self.step: int | None = None  # that the script has reported since its last start
        self.history: list[dict[str, Any]] = []  # of this command, each record once
        self.metrics: dict[str, Any] = {}  # the last value of each
        self.url: str | None = None  # the run's page at an experiment tracker
        self.guess: dict[str, Any] = {}  # loss and step of the output of a script that reports none
        self.steps_made = 0  # by this command; steps that were lost and made again count twice

    def update(
        self,
        start: int,
        step: int | None,
        record: tuple[int, dict[str, Any]] | None = None,
        url: str | None = None,
        guess: dict[str, Any] | None = None,
    ) -> None:
        """Take a report of the scripts' start with this number.

        The record is number and content of the last one of the metrics, which grows until the next step.
        """
        before = self.step if start == self._start else None
        self._start, self.step = start, step
        self.steps_made += (step or 0) - (before or 0)
        self.url = url or self.url
        self.guess = guess or self.guess
        if record is None:
            return
        number, metrics = record
        if number == self._last_number:
            self.history[-1] = metrics
        else:
            self.history.append(metrics)
        self._last_number = number
        self.metrics = self.metrics | metrics
