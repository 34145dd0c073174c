"""A run on the user's screen: a progress bar on a terminal, and a line for each epoch everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from training.engine.recipe import Quality
from training.monitoring.run_monitor import RunMonitor


class ProgressBar:
    """Shows a run; a context. What the workers print meanwhile appears above the bar."""

    def __init__(self, monitor: RunMonitor, epochs: int, qualities: Sequence[Quality], console: Console) -> None:
        self._monitor = monitor
        self._epochs = epochs
        self._qualities = qualities
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        )
        self._task = self._bar.add_task("starting the workers", total=None)
        self._shown = 0

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.update(self._task, visible=False)
        self._bar.stop()

    def draw(self) -> None:
        """Show what is new."""
        for metrics in self._monitor.history[self._shown :]:
            self._console.print(_epoch_line(metrics, self._epochs, self._qualities), highlight=False)
            self._shown += 1
        if progress := self._monitor.progress:
            self._bar.update(
                self._task,
                description=f"epoch {min(progress.epoch + 1, self._epochs)}/{self._epochs}",
                completed=progress.total_steps,
                total=self._epochs * progress.steps_per_epoch,
            )


def _epoch_line(metrics: Any, epochs: int, qualities: Sequence[Quality]) -> str:
    tested = "  ".join(f"test {each.name} {metrics[f'test_{each.name}']:.4f}" for each in qualities)
    return (
        f"epoch {metrics['epoch'] + 1}/{epochs}  train loss {metrics['train_loss']:.4f}  {tested}  "
        f"{metrics['train_seconds'] + metrics['test_seconds']:.1f} s"
    )
