"""The reports of Ray Train and Ray Tune as metrics of the run; Ray creates these classes in a program's `fit`."""

from __future__ import annotations

import itertools
import json
import math
import os
from pathlib import Path
from typing import Any

from ray.tune import Callback

from ray_on_ecs import sdk
from ray_on_ecs.filesystem import open_filesystem
from ray_on_ecs.run.ray_private import (
    CHECKPOINT_MANAGER_SNAPSHOT_FILENAME,
    ControllerCallback,
    ReportCallback,
    WorkerGroupCallback,
)
from ray_on_ecs.tracking import layout

# Tune's own numbers of a result, which nobody has reported.
OF_TUNE = ("pid", "timestamp", "iterations_since_restore", "time_since_restore", "time_this_iter_s", "time_total_s")
_trainers = itertools.count()


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Return what is a number of a report."""
    found = {
        name: each for name, each in metrics.items() if isinstance(each, int | float) and not isinstance(each, bool)
    }
    return {name: float(value) for name, value in found.items() if math.isfinite(float(value))}


def kept_reports(run_config: Any) -> tuple[dict[int, dict[str, Any]], int]:
    """Return the metrics of the checkpoints that Ray Train has kept, by the number of their report from 1.

    Returns:
        The metrics, and the number of reports until the last checkpoint; nothing and 0 for a new run.
    """
    filesystem, folder = open_filesystem(f"{run_config.storage_path}/{run_config.name}")
    try:
        with filesystem.open_input_file(f"{folder}/{CHECKPOINT_MANAGER_SNAPSHOT_FILENAME}") as file:
            snapshot = json.loads(file.read())
        reports = zip(snapshot["checkpoint_report_indices"], snapshot["checkpoint_results"], strict=True)
        return {index + 1: result["metrics"] for index, result in reports}, snapshot["current_report_index"]
    except (OSError, ValueError, KeyError):
        return {}, 0


class TrainReporter(ControllerCallback, WorkerGroupCallback, ReportCallback):
    """Logs the metrics that rank 0 reports, each under the number of its report.

    Ray Train calls it in the process of its controller, which is on the driver's node. Reports of a second trainer of
    the program follow those of the first, without such a number.
    """

    def __init__(self) -> None:
        self._folder = os.environ.get(sdk.FOLDER_VARIABLE)
        self._is_first = next(_trainers) == 0
        self._number = self._stored = 0

    def after_controller_start(self, train_run_context: Any) -> None:
        """Log the reports of the run's earlier part whose checkpoints are kept: it may have been killed before that."""
        if self._is_first:
            reports, self._stored = kept_reports(train_run_context.run_config)
            for number, metrics in sorted(reports.items()):
                self._log(number, metrics, again=True)

    def before_worker_group_start(self, worker_group_context: Any) -> None:
        """Count from the last checkpoint, from which the workers start."""
        self._number = self._stored
        if self._is_first:
            self._report(self._stored)

    def after_report(self, training_report: Any, metrics: list[dict[str, Any]]) -> None:
        """Log the report of rank 0."""
        self._number += 1
        if training_report.checkpoint:
            self._stored = self._number
        self._log(self._number, metrics[0])

    def _log(self, number: int, metrics: dict[str, Any], *, again: bool = False) -> None:
        values = {name: value for name, value in numbers(metrics).items() if name != "step"}
        self._report(number if self._is_first else None, values, again=again)

    def _report(self, number: int | None, values: dict[str, float] | None = None, *, again: bool = False) -> None:
        if self._folder is not None:
            os.environ[sdk.FOLDER_VARIABLE] = self._folder
            sdk.write_report(number, values, again=again)


class TuneReporter(Callback):
    """Logs the results of all trials, one after the other, and keeps a table of the trials for the run's driver."""

    def __init__(self) -> None:
        self._folder = os.environ.get(sdk.FOLDER_VARIABLE)
        self._results = 0
        self._trials: dict[str, dict[str, Any]] = {}

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """Log a result."""
        self._results += 1
        shown = {name: value for name, value in numbers(result).items() if name not in OF_TUNE}
        sdk.write_report(self._results, {"trial": float(trials.index(trial)), **shown})
        self._note(trial)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Write the table."""
        self._note(trial)
        self._write()

    on_trial_error = on_trial_complete

    def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
        """Write the table."""
        for trial in trials:
            self._note(trial)
        self._write()

    def _note(self, trial: Any) -> None:
        shown = {name: value for name, value in numbers(trial.last_result or {}).items() if name not in OF_TUNE}
        self._trials[trial.trial_id] = {"status": trial.status, "config": trial.config, "metrics": shown}

    def _write(self) -> None:
        if self._folder is not None:
            path = Path(self._folder, layout.TRIALS)
            part = path.with_suffix(".part")
            part.write_text(json.dumps(self._trials, indent=2, default=str))
            part.replace(path)
