"""A worker's side of the run state: it reports where it trains and how far it is."""

from __future__ import annotations

import time
from typing import Any

from training.engine.fit import Listener
from training.engine.trainer import Trainer
from training.monitoring.run_state import REPORT_SECONDS, WorkerProcess


class Reporter(Listener):
    """Reports for one rank: every rank its process, rank 0 the progress, no more often than the driver reads it."""

    def __init__(self, run_state: Any, rank: int, process: WorkerProcess) -> None:
        run_state.register_worker.remote(rank, process)
        self._run_state = run_state if rank == 0 else None
        self._epoch = 0
        self._reported_at = 0.0

    def resumed(self, trainer: Trainer) -> None:
        """Report where this rank continues."""
        self._epoch = trainer.epoch
        if self._run_state:
            steps = trainer.steps_per_epoch
            self._run_state.resumed.remote(trainer.epoch, trainer.step % steps, steps)

    def step(self, step: int, steps: int) -> None:
        """Report how many of the epoch's steps are done."""
        if self._run_state and self._is_time():
            self._run_state.step.remote(self._epoch, step, steps)

    def heartbeat(self) -> None:
        """Report that this rank is working, though not on a step."""
        if self._run_state and self._is_time():
            self._run_state.heartbeat.remote()

    def epoch(self, metrics: Any) -> None:
        """Report a finished epoch."""
        self._epoch = metrics["epoch"] + 1
        if self._run_state:
            self._run_state.epoch.remote(metrics)

    def _is_time(self) -> bool:
        now = time.monotonic()
        if now - self._reported_at < REPORT_SECONDS:
            return False
        self._reported_at = now
        return True
