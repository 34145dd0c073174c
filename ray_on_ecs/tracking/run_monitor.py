"""Progress and metrics of a run, as rank 0 reports them to the driver."""

from __future__ import annotations

from typing import Any


class RunMonitor:
    """Progress and metrics of a run.

    Attributes:
        step: The steps that the script has reported since its last start, or None before the first.
        history: The metrics that were reported during this command, each once.
        metrics: The last value of each of them.
        url: The page that an experiment tracker has for the run, or None.
        guess: Loss and step of the output of a script that reports none; empty if there are none.
        steps_made: Steps that this command has made; steps that were lost and made again count twice.
    """

    def __init__(self) -> None:
        self._start = -1
        self._last_number = -1
        self.step: int | None = None
        self.history: list[dict[str, Any]] = []
        self.metrics: dict[str, Any] = {}
        self.url: str | None = None
        self.guess: dict[str, Any] = {}
        self.steps_made = 0

    def update(
        self,
        start: int,
        step: int | None,
        record: tuple[int, dict[str, Any]] | None = None,
        url: str | None = None,
        guess: dict[str, Any] | None = None,
    ) -> None:
        """Take a report.

        Args:
            start: The number of the scripts' start.
            step: The steps of that start, or None before the first.
            record: Number and content of the last record of the metrics, which grows until the next step.
            url: See RunMonitor.
            guess: See RunMonitor.
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
