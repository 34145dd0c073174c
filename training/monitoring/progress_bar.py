"""The driver's view of a run: a progress bar on a terminal, and a line for each epoch everywhere."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from training.engine.recipe import Quality
from training.monitoring.run_state import REPORT_SECONDS, read_run_state


class ProgressBar:
    """The driver's end, a context: a bar where there is a terminal, and a line for each epoch everywhere.

    What the workers print meanwhile appears above the bar.
    """

    def __init__(self, run_state: Any, epochs: int, qualities: Sequence[Quality], console: Console) -> None:
        self._run_state = run_state
        self._epochs = epochs
        self._qualities = qualities
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        )
        self._task = self._progress.add_task("starting the workers", total=None)
        self._shown = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        if kind is None:
            self._draw()
        self._progress.update(self._task, visible=False)
        self._progress.stop()

    def _watch(self) -> None:
        while not self._stop.wait(REPORT_SECONDS):
            self._draw()

    def _draw(self) -> None:
        if (state := read_run_state(self._run_state)) is None:
            return
        for metrics in state.finished[self._shown :]:
            self._console.print(_epoch_line(metrics, self._epochs, self._qualities), highlight=False)
        self._shown = len(state.finished)
        if state.step or state.finished:
            description = f"epoch {min(state.epoch + 1, self._epochs)}/{self._epochs}"
            done, total = state.epoch * state.steps + state.step, self._epochs * state.steps
            self._progress.update(self._task, description=description, resolve_defaults=done, total=total)


def _epoch_line(metrics: Any, epochs: int, qualities: Sequence[Quality]) -> str:
    tested = "  ".join(f"test {each.name} {metrics[f'test_{each.name}']:.4f}" for each in qualities)
    return (
        f"epoch {metrics['epoch'] + 1}/{epochs}  train loss {metrics['train_loss']:.4f}  {tested}  "
        f"{metrics['train_seconds'] + metrics['test_seconds']:.1f} s"
    )
