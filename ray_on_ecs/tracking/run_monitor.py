"""Driver's view of a run: polls the run's actor and keeps its reports, also when the actor is lost."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from ray_on_ecs.periodic import run_every
from ray_on_ecs.tracking.run_actor import REPORT_SECONDS, Progress, RunClient, RunState

logger = logging.getLogger(__name__)


class RunMonitor:
    """Progress and metrics of a run.

    Attributes:
        progress: The last report, or None before the first.
        history: The metrics that were reported during this command, each once.
        metrics: The last value of each of them.
        url: The page that an experiment tracker has for the run, or None.
        guess: Loss and step of the output of a script that reports none; empty if there are none.
        steps_made: Steps that this command has made; steps that were lost and made again count twice.
    """

    def __init__(self, run_state: RunClient) -> None:
        self._run_state = run_state
        self._incarnation: str | None = None
        self._last_number = -1
        self.progress: Progress | None = None
        self.history: list[Any] = []
        self.metrics: dict[str, Any] = {}
        self.url: str | None = None
        self.guess: dict[str, Any] = {}
        self.steps_made = 0

    @contextmanager
    def polling(self) -> Generator[None]:
        """Poll the actor until the block ends, and once more then."""
        with run_every(REPORT_SECONDS, self.poll, "run monitor"):
            yield
        self.poll()

    def poll(self) -> None:
        """Read the actor once."""
        # The last record again: it grows until the next step.
        state = self._run_state.read(self._last_number - 1)
        if state is not None:
            self.update(state)

    def update(self, state: RunState) -> None:
        """Add the actor's state."""
        if self._incarnation not in (None, state.incarnation):
            logger.warning("the actor of the run was lost and restarted; training continues")
        self._incarnation = state.incarnation
        for number, record in state.metrics.items():
            if number == self._last_number:
                self.history[-1] = record
            else:
                self.history.append(record)
            self.metrics = self.metrics | record
        self.url = state.url or self.url
        self.guess = state.guess or self.guess
        self._last_number = max(state.metrics, default=self._last_number)
        if state.progress is None:
            return
        steps_before = 0
        if self.progress is not None and self.progress.workers == state.progress.workers:
            steps_before = self.progress.step
        self.steps_made += state.progress.step - steps_before
        self.progress = state.progress
