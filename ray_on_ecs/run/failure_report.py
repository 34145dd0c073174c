"""Reports of a failure: one line for the user, `error.json` and the stacks of a hang in the run's folder."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from ray.exceptions import RayActorError, RayError
from ray.train import ControllerError, TrainingFailedError, WorkerGroupError

from ray_on_ecs.config import RunConfig
from ray_on_ecs.errors import ScriptError, TrainingError, one_line
from ray_on_ecs.run.failure_policy import Failure, Raise
from ray_on_ecs.run.ray_private import WorkerGroupStartupTimeoutError
from ray_on_ecs.run.worker_dump import WorkerDump
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.run_storage import RunStorage

NO_STACKS = "It wrote none: the system had stopped it, or it was stuck in a system call.\n"


def is_start_timeout(error: BaseException) -> bool:
    """Return whether Ray Train gave up because it did not get the workers' resources."""
    return isinstance(error, ControllerError) and isinstance(error.controller_failure, WorkerGroupStartupTimeoutError)


def describe_failure(error: TrainingFailedError | RayError, workers: Sequence[WorkerDump]) -> Failure:
    """Return why the workers ended."""
    rank, cause = _first_cause(error)
    return Failure(_name(cause), "failed", rank, cause=cause, where=str(error), log=tuple(_log(workers, rank or 0)))


def store_stacks(stacks: Mapping[int, str], storage: RunStorage) -> str:
    """Store the stacks of the workers by rank, or that a worker wrote none, and return the folder's address.

    Raises:
        OSError: The storage can't be written.
    """
    folder = f"{layout.STACKS_FOLDER}/{datetime.now(UTC):%Y%m%d-%H%M%S}"
    for rank, text in stacks.items():
        storage.write(f"{folder}/rank_{rank}.txt", text or NO_STACKS)
    return f"{storage.uri}/{folder}"


def write_error(failure: Failure, decision: Raise, config: RunConfig, storage: RunStorage) -> TrainingError:
    """Write `error.json`, and return the error to raise: the cause, the file, and the command to continue with."""
    if not decision.is_recorded:
        return decision.error(decision.line)
    document = {
        "run_name": storage.run_name,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "what": failure.what,
        "rank": failure.rank,
        "where": failure.where,
        "log": list(failure.log),
        "stacks": failure.stacks,
        "next": shlex.join(config.next_command()),
    }
    try:
        storage.write_json(layout.ERROR, document)
        see = f"see {storage.uri}/{layout.ERROR}"
    except OSError as cause:
        see = f"{layout.ERROR} could not be written to {storage.uri} ({one_line(cause)})"
    return decision.error(f"{decision.line}; {see}; continue with --run-name {config.run_name}")


def _first_cause(error: TrainingFailedError | RayError) -> tuple[int | None, BaseException]:
    if isinstance(error, WorkerGroupError) and error.worker_failures:
        rank = min(error.worker_failures)
        cause = error.worker_failures[rank]
        return rank, getattr(cause, "health_check_failure", cause)
    return None, error.controller_failure if isinstance(error, ControllerError) else error


def _name(cause: BaseException) -> str:
    if isinstance(cause, TrainingError | ScriptError):
        return one_line(cause)
    if isinstance(cause, RayActorError):
        return f"a process of the run ended ({one_line(cause)})"
    return one_line(f"{type(cause).__name__}: {cause}")


def _log(workers: Sequence[WorkerDump], rank: int) -> Sequence[str]:
    """Return the end of a worker's log, or why it can't be had."""
    return next((worker.log for worker in workers if worker.rank == rank), ["the worker's node is gone"])
