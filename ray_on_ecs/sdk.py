"""The functions that a script may call, all optional: `ray_on_ecs.progress`, `log` and `seconds_left`.

Under `ray-on-ecs run` they reach the run's metrics and its detection of hangs. Elsewhere, as under torchrun,
they do nothing. This module imports the standard library alone.
"""

from __future__ import annotations

import json
import math
import os
import time

# Folder of this process, for the two files below; set by the run.
FOLDER_VARIABLE = "RAY_ON_ECS_SDK_DIR"
REPORTS = "reports.jsonl"
DEADLINE = "deadline"
# This process saves by itself when its node is reclaimed, and wants the time until then.
CHECKPOINTER = "checkpointer"

# By which mpirun tells a process its rank, that of Open MPI and that of MPICH; and by which all others do.
MPI_RANK_VARIABLES = ("PMIX_RANK", "PMI_RANK")
RANK_VARIABLES = (*MPI_RANK_VARIABLES, "RANK")

STEP = "step"
VALUES = "values"
NEXT = "next"
AGAIN = "again"

# A loop of fast steps need not be heard at every one.
PROGRESS_SECONDS = 0.2
_reported_at = -math.inf
_step: int | None = None


def progress(step: int) -> None:
    """Report that `step` steps are done since the start of the training, parts before a restart included.

    Args:
        step: The number of steps, 0 or more.

    Raises:
        ValueError: It is negative.
    """
    global _reported_at, _step
    if step < 0:
        raise ValueError(f"step: {step} is negative; it must be the number of steps that are done")
    _step = int(step)
    if time.monotonic() - _reported_at >= PROGRESS_SECONDS:
        _reported_at = time.monotonic()
        _write({STEP: _step if _is_rank_0() else None})


def alive() -> None:
    """Report that this process is alive while it makes no steps, as while it stores or reads a checkpoint."""
    global _reported_at
    if time.monotonic() - _reported_at >= PROGRESS_SECONDS:
        _reported_at = time.monotonic()
        _write({STEP: None})


def log(**values: float) -> None:
    """Log metrics of the step that was reported last; those of rank 0 are kept.

    Args:
        **values: The metrics by name. A number that is not finite is kept as null.

    Raises:
        ValueError: A value is no number.
    """
    numbers = {name: float(value) for name, value in values.items()}
    finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
    if _is_rank_0():
        _write({STEP: _step, VALUES: finite})


def write_report(step: int | None, values: dict[str, float] | None = None, *, again: bool = False) -> None:
    """Report metrics of a step, or that the steps go on from there; without a step they are of the next one.

    Args:
        step: The number of the step.
        values: The metrics by name, all finite.
        again: Whether they may have been reported before.
    """
    _write({STEP: step, NEXT: step is None, AGAIN: again, **({} if values is None else {VALUES: values})})


def seconds_left() -> float:
    """Return the seconds until this node is reclaimed, or infinity if nothing of the kind has been announced."""
    if (folder := os.environ.get(FOLDER_VARIABLE)) is None:
        return math.inf
    try:
        with open(os.path.join(folder, DEADLINE)) as file:
            return max(float(file.read()) - time.time(), 0.0)
    except (OSError, ValueError):
        return math.inf


def register_checkpointer() -> None:
    """Say that this process looks at `seconds_left` and saves by itself: it then gets SIGTERM late."""
    if (folder := os.environ.get(FOLDER_VARIABLE)) is None:
        return
    try:
        with open(os.path.join(folder, CHECKPOINTER), "w"):
            pass
    except OSError:  # it gets SIGTERM at once
        pass


def _is_rank_0() -> bool:
    """Return whether this is the process whose metrics are kept; those of a node that mpirun starts share a file."""
    return next((os.environ[name] == "0" for name in RANK_VARIABLES if name in os.environ), True)


def _write(report: dict[str, object]) -> None:
    if (folder := os.environ.get(FOLDER_VARIABLE)) is None:
        return
    try:
        with open(os.path.join(folder, REPORTS), "a") as file:
            file.write(json.dumps(report) + "\n")
    except OSError:  # a full disk is no reason to end a training
        pass
