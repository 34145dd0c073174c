"""A run on the user's screen: a line for each epoch, and a bar on a terminal or, elsewhere, a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ray_on_ecs.tracking.run_monitor import RunMonitor

# Between two lines that say where the run is, where no bar does.
LINE_SECONDS = 60.0


class ProgressBar:
    """Shows a run; a context. What the workers print meanwhile appears above the bar.

    Args:
        monitor: Knows the run.
        console: Where it is shown.
        epochs: How many the run has, or None if it counts steps alone.
        line: Returns the line for new metrics, or None for no line.
    """

    def __init__(
        self, monitor: RunMonitor, console: Console, epochs: int | None, line: Callable[[Any], str | None]
    ) -> None:
        self._monitor = monitor
        self._console = console
        self._epochs = epochs
        self._line = line
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        )
        self._task = self._bar.add_task("starting the workers", total=None)
        self._shown = 0
        self._next_line = time.monotonic() + LINE_SECONDS

    def __enter__(self) -> ProgressBar:
        if self._console.is_interactive:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.update(self._task, visible=False)
        if self._console.is_interactive:  # elsewhere it would print an empty line
            self._bar.stop()

    def draw(self) -> None:
        """Show what is new."""
        for metrics in self._monitor.history[self._shown :]:
            if line := self._line(metrics):
                self._print(line)
            self._shown += 1
        if (progress := self._monitor.progress) is None:
            return
        description, total = "running", None
        if self._epochs is not None:
            description = f"epoch {min(progress.epoch + 1, self._epochs)}/{self._epochs}"
            total = self._epochs * progress.steps_per_epoch
            if not self._console.is_terminal and time.monotonic() >= self._next_line:
                self._print(f"{description}  step {progress.total_steps:,} of {total:,}")
        self._bar.update(self._task, description=description, completed=progress.total_steps, total=total)

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False)
        self._next_line = time.monotonic() + LINE_SECONDS
