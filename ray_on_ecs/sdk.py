"""Optional functions for scripts: `ray_on_ecs.progress`, `log` and `seconds_left`.

Under `ray-on-ecs run` they feed the run's metrics and its hang detection. Elsewhere, as under torchrun, they do
nothing. This module imports only the standard library.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress

# Folder of this process for the files below, set by the run.
FOLDER_VARIABLE = "RAY_ON_ECS_SDK_DIR"
REPORTS = "reports.jsonl"
DEADLINE = "deadline"
# Exists if this process has asked for the deadline when there was one.
TOLD = "told"
# Names the last event for which a script with a Checkpointer saves once and goes on.
EXTRA_SAVE = "extra-save"
# Exists if this process watches `seconds_left` and saves itself.
CHECKPOINTER = "checkpointer"

# The variables of the rank under mpirun, also one that the script itself starts, and under torchrun.
RANK_VARIABLES = ("PMIX_RANK", "PMI_RANK", "RANK")

STEP = "step"
TOTAL = "total"
VALUES = "values"
NEXT = "next"
AGAIN = "again"

# Minimum interval between two reports of a loop with fast steps.
PROGRESS_SECONDS = 0.2
_reported_at = -math.inf
_step: int | None = None
_total: int | None = None
_is_step_reported = True


def progress(step: int, total: float | None = None) -> None:
    """Report the number of steps since the start of the training, including steps before a restart.

    Args:
        step: The number of steps, 0 or more.
        total: The number of all steps, which holds for later calls without one; 0 or less, or one that is not finite,
            if it is not known.

    Raises:
        ValueError: The step is negative.
    """
    global _reported_at, _step, _total, _is_step_reported
    if step < 0:
        raise ValueError(f"step: {step} is negative; it must be the number of steps that are done")
    _step = int(step)
    if total is not None:
        _total = max(int(total), 0) if math.isfinite(total) else 0
    _is_step_reported = time.monotonic() - _reported_at >= PROGRESS_SECONDS
    if _is_step_reported:
        _reported_at = time.monotonic()
        _write_step()


@atexit.register
def _report_last_step() -> None:
    if not _is_step_reported and _is_rank_0():
        _write_step()


def _write_step() -> None:
    total = {} if _total is None else {TOTAL: _total}
    _write({STEP: _step, **total} if _is_rank_0() else {STEP: None})


def alive() -> None:
    """Report that this process is alive between steps, for example while it reads a checkpoint."""
    global _reported_at
    if time.monotonic() - _reported_at >= PROGRESS_SECONDS:
        _reported_at = time.monotonic()
        _write({STEP: None})


def log(**values: float) -> None:
    """Log metrics of the last reported step; only rank 0's are kept.

    Args:
        **values: The metrics by name. NaN and infinities are stored as null. `step`, an integer from 0, is the step of
            these metrics; `time` is left out, because every record has a time.

    Raises:
        ValueError: A value is not a number.
    """
    global _step
    numbers = {name: float(value) for name, value in values.items()}
    if (step := numbers.get(STEP, -1.0)) >= 0 and step % 1 == 0:
        _step = int(numbers.pop(STEP))
    finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
    if _is_rank_0():
        _write({STEP: _step, VALUES: finite})


def write_report(
    step: int | None,
    values: Mapping[str, float | None] | None = None,
    *,
    again: bool = False,
    total: int | None = None,
) -> None:
    """Report metrics of a step; without metrics, the step from which the steps continue.

    Args:
        step: The number of the step; None for the next one.
        values: The metrics by name; None for one that is not finite.
        again: The metrics may have been reported before.
        total: The number of all steps, if it is known.
    """
    report: dict[str, object] = {STEP: step, NEXT: step is None, AGAIN: again}
    if values is not None:
        report[VALUES] = values
    if total is not None:
        report[TOTAL] = total
    _write(report)


def seconds_left() -> float:
    """Return the seconds until this node is reclaimed, or the run's limit is reached; infinity without a notice.

    A script that has called it is taken to save itself: it gets SIGTERM only in the last seconds.
    """
    register_checkpointer()
    try:
        deadline = float(_read(DEADLINE))
    except ValueError:
        return math.inf
    _touch(TOLD)
    return max(deadline - time.time(), 0.0)


def extra_save() -> str:
    """Return the event for which a Checkpointer saves once and goes on, or nothing."""
    return _read(EXTRA_SAVE)


def register_checkpointer() -> None:
    """Declare that this process watches `seconds_left` and saves itself: it gets SIGTERM only in the last seconds."""
    _touch(CHECKPOINTER)  # without the file it gets SIGTERM at once


def _is_rank_0() -> bool:
    """Return True on the rank whose metrics are kept; the processes of a node under mpirun share a file."""
    ranks = [os.environ[name] for name in RANK_VARIABLES if name in os.environ]
    return not ranks or ranks[0] == "0"


def _read(name: str) -> str:
    """Return what the run says in this file; nothing outside a run."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None:
        return ""
    try:
        with open(os.path.join(folder, name)) as file:
            return file.read()
    except (OSError, ValueError):
        return ""


def _touch(name: str) -> None:
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is not None:
        with suppress(OSError), open(os.path.join(folder, name), "w"):
            pass


def _write(report: dict[str, object]) -> None:
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None:
        return
    with suppress(OSError), open(os.path.join(folder, REPORTS), "a") as file:  # a full disk must not end a training
        file.write(json.dumps(report) + "\n")
