"""A worker's side of the monitoring: it feeds the watchdog, and rank 0 reports to the run state."""

from __future__ import annotations

import time
import uuid
from typing import Any

from ray_on_ecs.tracking.run_actor import REPORT_SECONDS, Progress, RunClient
from training import results
from training.engine.config import TrainingConfig
from training.engine.fit import Listener
from training.engine.trainer import Trainer
from training.engine.watchdog import Watchdog


class Reporter(Listener):
    """Hears how one rank's training advances.

    Args:
        run_state: Where rank 0 reports, no more often than the driver reads.
        watchdog: Gets a heartbeat with everything heard.
        config: The run's settings.
        trainer: The rank's trainer.
    """

    def __init__(self, run_state: RunClient, watchdog: Watchdog, config: TrainingConfig, trainer: Trainer) -> None:
        self._run_state = run_state
        self._watchdog = watchdog
        self._config = config
        self._trainer = trainer
        self._worker_group = uuid.uuid4().hex
        self._steps_made = 0
        self._first_step_at: float | None = None
        self._reported_at = 0.0

    def resumed(self, trainer: Trainer) -> None:
        """Report where the workers continue."""
        self.heartbeat()
        self._report(trainer.step % trainer.steps_per_epoch)

    def step(self, step: int, steps: int) -> None:
        """Report how many of the epoch's steps are done, if the last report is old enough."""
        self.heartbeat()
        self._steps_made += 1
        if self._first_step_at is None:
            self._first_step_at = time.time()
        if time.monotonic() - self._reported_at >= REPORT_SECONDS:
            self._report(step)

    def heartbeat(self) -> None:
        """Tell the watchdog that this rank is working, though not necessarily on a step."""
        self._watchdog.heartbeat()

    def trained(self, metrics: Any) -> None:
        """Print this worker's line for the epoch."""
        self.heartbeat()
        print(results.worker_epoch_line(metrics, self._config, self._trainer.rank, self._trainer.device), flush=True)

    def epoch(self, metrics: Any) -> None:
        """Report a finished epoch."""
        self.heartbeat()
        if self._trainer.rank == 0:
            self._run_state.report_metrics(metrics["epoch"], metrics)
        self._report(0)

    def _report(self, step: int) -> None:
        if self._trainer.rank == 0:
            self._reported_at = time.monotonic()
            self._run_state.report(
                Progress(
                    self._trainer.epoch,
                    step,
                    self._trainer.steps_per_epoch,
                    self._worker_group,
                    self._steps_made,
                    self._first_step_at,
                )
            )
