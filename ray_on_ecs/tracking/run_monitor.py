"""Progress and metrics of a run, as rank 0 reports them to the driver."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ray_on_ecs.tracking.end import Record, Steps, noted


class RunMonitor:
    """Progress and metrics of a run."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = -1
        self._last_number = -1
        self.step: int | None = None  # that the script has reported since its last start
        self.history: list[dict[str, Any]] = []  # of this command, each record once
        self.metrics: dict[str, Any] = {}  # the last value of each
        self.url: str | None = None  # the run's page at an experiment tracker
        self.guess: dict[str, Any] = {}  # loss and step of the output of a script that reports none
        self.steps: Steps | None = None  # of the training, also those that are only printed
        self.records: Sequence[Record] = ()  # of these steps since the last start
        self.steps_made = 0  # by this command; steps that were lost and made again count twice

    def update(
        self,
        start: int,
        step: int | None,
        record: tuple[int, dict[str, Any]] | None = None,
        url: str | None = None,
        guess: dict[str, Any] | None = None,
        steps: Steps | None = None,
    ) -> None:
        """Take a report of the scripts' start with this number.

        The record is number and content of the last one of the metrics, which grows until the next step.
        """
        before = self.step if start == self._start else None
        records = self.records if start == self._start else ()
        self.records = noted(records, self._clock(), steps.step) if steps else records
        self.steps = steps or self.steps
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
