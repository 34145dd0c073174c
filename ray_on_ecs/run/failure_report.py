"""What a run that failed leaves: one line for its user, `error.json` and the stacks of a hang in the run's folder."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from ray.exceptions import RayActorError, RayError
from ray.train import ControllerError, TrainingFailedError, WorkerGroupError

from ray_on_ecs.checkpoint.resume import newest_checkpoint
from ray_on_ecs.config import RunConfig
from ray_on_ecs.errors import ScriptError, TrainingError, one_line
from ray_on_ecs.run.worker_dump import WorkerRemains
from ray_on_ecs.tracking import layout
from ray_on_ecs.tracking.storage import RunStorage

NO_STACKS = "It wrote none: the system had stopped it, or it was stuck in a system call.\n"
# What a rank raises when another one has gone.
CONSEQUENCES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket Timeout")


@dataclass(frozen=True)
class Failure:
    """Why the workers ended.

    Attributes:
        cause: The exception of the rank that failed first, as far as that can be told, or of the controller.
        what: The cause on one line.
        rank: That rank, or None.
        where: All that Ray Train says, with the traceback.
        stacks: The folder with the stacks of a hang, or None.
        log: The end of that worker's log.
    """

    cause: BaseException
    what: str
    rank: int | None = None
    where: str = ""
    stacks: str | None = None
    log: Sequence[str] = ()

    def __str__(self) -> str:
        on_rank = "" if self.rank is None or self.stacks else f" on rank {self.rank}"
        return f"training failed{on_rank}: {self.what}"


def describe_failure(
    error: TrainingFailedError | RayError, workers: Sequence[WorkerRemains], config: RunConfig, storage: RunStorage
) -> Failure:
    """Find out why the workers ended, and store the stacks if they hung.

    Args:
        error: What Ray Train's `fit` raised.
        workers: What the workers have left.
        config: The run's settings.
        storage: The run's folder.
    """
    rank, cause = _first_cause(error)
    has_hung = any(worker.stacks for worker in workers)
    stacks = {worker.rank: worker.stacks or NO_STACKS for worker in workers} if has_hung else {}
    folder = f"{layout.STACKS_FOLDER}/{datetime.now(UTC):%Y%m%d-%H%M%S}"
    what = f"no progress for {config.hang_timeout:g} s" if has_hung else _name(cause)
    try:
        for each, text in stacks.items():
            storage.write(f"{folder}/rank_{each}.txt", text)
    except OSError as lost:
        what += f" (the stacks could not be stored: {one_line(lost)})"
    uri = f"{storage.uri}/{folder}" if has_hung else None
    return Failure(cause, what, rank, str(error), uri, _log(workers, rank or 0))


def write_error(failure: Failure, line: str, config: RunConfig, storage: RunStorage) -> TrainingError:
    """Write `error.json` and return the error to raise: the line, where to read more, and how to continue."""
    document = {
        "run_name": storage.run_name,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "what": failure.what,
        "rank": failure.rank,
        "where": failure.where,
        "log": list(failure.log),
        "stacks": failure.stacks,
        "next": shlex.join(config.command_line()),
    }
    try:
        document["checkpoint"] = newest_checkpoint(storage)
        storage.write_json(layout.ERROR, document)
        see = f"see {storage.uri}/{layout.ERROR}"
    except OSError as cause:
        see = f"{layout.ERROR} could not be written to {storage.uri} ({one_line(cause)})"
    return TrainingError(f"{line}; {see}; continue with --run-name {config.run_name}")


def _first_cause(error: TrainingFailedError | RayError) -> tuple[int | None, BaseException]:
    if isinstance(error, WorkerGroupError) and error.worker_failures:
        rank, cause = min(error.worker_failures.items(), key=lambda each: (_is_consequence(each[1]), each[0]))
        return rank, getattr(cause, "health_check_failure", cause)
    return None, error.controller_failure if isinstance(error, ControllerError) else error


def _is_consequence(cause: BaseException) -> bool:
    import torch.distributed as dist  # takes a second, which a script should not wait for

    return isinstance(cause, dist.DistError) or any(each in str(cause) for each in CONSEQUENCES)


def _name(cause: BaseException) -> str:
    if isinstance(cause, TrainingError | ScriptError):
        return one_line(cause)
    if isinstance(cause, RayActorError):
        return f"a process of the run ended ({one_line(cause)})"
    return one_line(f"{type(cause).__name__}: {cause}")


def _log(workers: Sequence[WorkerRemains], rank: int) -> Sequence[str]:
    """Return the end of a worker's log, or why it can't be had."""
    return next((each.log for each in workers if each.rank == rank), ["the worker's node is gone"])
