"""The reports of Ray Train and Ray Tune as metrics of the run; Ray creates these classes in a program's `fit`."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from numbers import Real
from pathlib import Path
from typing import Any

# Not public: test_ray_private.py looks for them in each new version of Ray.
from ray.train.v2._internal.constants import CHECKPOINT_MANAGER_SNAPSHOT_FILENAME
from ray.train.v2._internal.execution.callback import ControllerCallback, ReportCallback, WorkerGroupCallback
from ray.tune import Callback

from ray_on_ecs import sdk
from ray_on_ecs.rules import finite
from ray_on_ecs.run.metrics import TOTAL_STEPS
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.filesystem import open_filesystem
from ray_on_ecs.tracking import records

# Ray Tune's numbers about a result, which are not metrics of the program.
OF_TUNE = (
    *("config", "done", "iterations_since_restore", "pid", "should_checkpoint", "time_since_restore"),
    *("time_this_iter_s", "time_total_s", "timestamp"),
)
# Names that a record has for itself, also one of a trial.
RESERVED = (*records.RESERVED, "trial")
# The calls of `fit` in this process.
_fits = itertools.count()


def numbers_of(metrics: Mapping[str, Any] | None, folder: str = "") -> dict[str, float | None]:
    """Return the metrics that are numbers, by name.

    Those of a nested one are `outer/inner`, truth is 1 or 0, and a number that is not finite is None.
    """
    found: dict[str, float | None] = {}
    for key, value in (metrics or {}).items():
        name = f"{folder}{key}"
        if isinstance(value, Mapping):
            found |= numbers_of(value, f"{name}/")
            continue
        with suppress(Exception):  # of an integer that is too large, or another library's tensor
            if getattr(value, "shape", None) in ((), (1,)):  # of NumPy and PyTorch
                value = value.item()
            if isinstance(value, Real) and name not in RESERVED:
                found[name] = finite(float(value))
    return found


def kept_reports(run_config: Any) -> tuple[dict[int, dict[str, Any]], int] | None:
    """Return the metrics of the checkpoints that Ray Train has kept, by the number of their report from 1.

    Returns:
        The metrics, and the number of reports until the last checkpoint: nothing and 0 for a new run. None if they
        can't be read, as in a storage that needs more than a path.
    """
    path = f"{run_config.storage_path}/{run_config.name}/{CHECKPOINT_MANAGER_SNAPSHOT_FILENAME}"
    try:
        filesystem = run_config.storage_filesystem
        if filesystem is None:
            store, path = open_filesystem(path)
            content = store.read(path)
        else:
            content = filesystem.open_input_file(path).read()
        snapshot = json.loads(content)
        reports = zip(snapshot["checkpoint_report_indices"], snapshot["checkpoint_results"], strict=True)
        return {index + 1: result["metrics"] for index, result in reports}, snapshot["current_report_index"]
    except FileNotFoundError:
        return {}, 0
    except Exception:  # an error here would end the training
        return None


class TrainReporter(ControllerCallback, WorkerGroupCallback, ReportCallback):
    """Logs the metrics that rank 0 reports, each under the number of its report.

    Ray Train calls it in the process of its controller, which is on the driver's node. The reports of a trainer that is
    not the first of the program, or whose storage can't be read, follow what there is, without such a number. The
    metric total_steps is the number of all reports.
    """

    def __init__(self) -> None:
        self._folder = os.environ.get(sdk.FOLDER_VARIABLE)
        self._is_counted = next(_fits) == 0
        self._number = self._stored = 0

    def after_controller_start(self, train_run_context: Any) -> None:
        """Log the reports of the run's earlier part whose checkpoints are kept: it may have been killed before that."""
        if not self._is_counted or (kept := kept_reports(train_run_context.run_config)) is None:
            self._is_counted = False
            return
        reports, self._stored = kept
        for number, metrics in sorted(reports.items()):
            self._log(number, metrics, again=True)

    def before_worker_group_start(self, worker_group_context: Any) -> None:
        """Count from the last checkpoint, from which the workers start."""
        self._number = self._stored
        if self._is_counted:
            self._log(self._stored, None)

    def after_report(self, training_report: Any, metrics: list[dict[str, Any]]) -> None:
        """Log the report of rank 0."""
        self._number += 1
        if training_report.checkpoint:
            self._stored = self._number
        self._log(self._number, metrics[0])

    def _log(self, number: int, metrics: dict[str, Any] | None, *, again: bool = False) -> None:
        if self._folder is not None:
            os.environ[sdk.FOLDER_VARIABLE] = self._folder
            values = None if metrics is None else numbers_of(metrics)
            total = values.pop(TOTAL_STEPS, None) if values else None
            if self._is_counted:
                sdk.write_report(number, values, again=again, total=int(total) if total else None)
            else:
                sdk.write_report(None, values, again=again)


class TuneReporter(Callback):
    """Logs the results of all trials, one after the other, and keeps a table of the trials for the run's driver."""

    def __init__(self) -> None:
        self._folder = os.environ.get(sdk.FOLDER_VARIABLE)
        next(_fits)

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """Log a result."""
        sdk.write_report(None, {"trial": float(trials.index(trial)), **_of_trial(result)})

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Write the table."""
        self.on_experiment_end(trials)

    on_trial_error = on_trial_complete

    def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
        """Write the table."""
        if self._folder is None:
            return
        path = Path(self._folder, layout.TRIALS)
        with suppress(OSError, ValueError):  # of a full disk: an error here would end the program
            table = json.loads(path.read_text()) if path.exists() else {}  # of an earlier sweep of the program
            table |= {trial.trial_id: _row(trial) for trial in trials}
            part = path.with_suffix(".part")
            part.write_text(json.dumps(table, indent=2))
            part.replace(path)


def _row(trial: Any) -> dict[str, Any]:
    """Return what the table says of a trial; its configuration is None if JSON can't have it."""
    config = None
    with suppress(Exception):  # of a user's object, or of one that contains itself
        config = json.loads(json.dumps(_named(trial.config), default=str))
    return {"status": trial.status, "config": config, "metrics": _of_trial(trial.last_result)}


def _of_trial(result: dict[str, Any] | None) -> dict[str, float | None]:
    return numbers_of({name: value for name, value in (result or {}).items() if name not in OF_TUNE})


def _named(value: Any) -> Any:
    """Return a configuration in which all keys are text, as JSON needs it."""
    if isinstance(value, Mapping):
        return {str(key): _named(inner) for key, inner in value.items()}
    return [_named(inner) for inner in value] if isinstance(value, list | tuple) else value
