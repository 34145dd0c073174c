"""Progress bar of a run's steps on the user's terminal."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ray_on_ecs.tracking.run_monitor import RunMonitor


class ProgressBar:
    """Progress bar as a context manager. The workers' output appears above it.

    Args:
        monitor: Source of the progress.
        console: Shows the bar if it is a terminal.
    """

    def __init__(self, monitor: RunMonitor, console: Console) -> None:
        self._monitor = monitor
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        )
        self._task = self._bar.add_task("starting the workers", total=None)

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
        """Show the current step."""
        progress = self._monitor.progress
        if progress:
            self._bar.update(self._task, description="running", completed=progress.step)
