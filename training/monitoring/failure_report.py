"""What a run that can't go on leaves: one line for whoever started it, and `error.json` beside its checkpoints."""

import os
import shlex
from collections.abc import Iterator
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

import torch.distributed as dist
from ray.exceptions import RayActorError
from ray.train import ControllerError, TrainingFailedError, WorkerGroupError
from ray.util.state import get_log

from training.checkpoint.store import CheckpointStore
from training.config import RunConfig, environment_variable, flag
from training.errors import ResourceError, TrainingError, UsageError, one_line
from training.monitoring.run_state import RunState, read_run_state
from training.monitoring.watchdog import Watchdog
from training.run import layout
from training.run.storage import RunStorage

LAST_LINES = 50
LOG_SECONDS = 10
# What a rank says when another one has gone.
CONSEQUENCES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket Timeout")


def describe_failure(
    error: TrainingFailedError, config: RunConfig, storage: RunStorage, run_state: Any, stalls: Watchdog
) -> TrainingError:
    """The one line for a failed run: a mistake of the user's as it is, else the cause and how to go on.

    Of a failure that is no such mistake `error.json` is left in the run's folder.

    Args:
        error: What Ray Train says.
        config: The run's settings.
        storage: The run's folder.
        run_state: The run's run_state.
        stalls: What watched over it.
    """
    rank, cause = _cause(error)
    if isinstance(cause, UsageError):
        return cause
    state = read_run_state(run_state)
    late = type(cause).__name__ == "WorkerGroupStartupTimeoutError"  # of Ray's internals: it has no public name
    if late and not (state and state.worker_group_starts):
        return ResourceError(
            f"the cluster has the {config.num_workers} workers' CPUs and GPUs, but they were not free within "
            f"{config.wait_seconds:.0f} s; wait for the other run to end, or ask for fewer workers"
        )
    stalled = (
        stalls.found
        and isinstance(cause, RayActorError)
        and not (state and state.worker_group_starts > stalls.worker_group_starts)
    )
    what = f"no step for {config.stall_timeout:g} s, {len(stalls.found)} times" if stalled else _named(cause)
    if late:
        what = f"workers that were lost did not come back within {config.wait_seconds:g} s"
    found = {"what": what, "where": str(error), "rank": rank, "log": _log(state, rank), "stacks": stalls.found}
    on_rank = "" if rank is None or stalled else f" on rank {rank}"
    return _failed(f"training failed{on_rank}: {what}", found, config, storage)


def fatal_failure(cause: TrainingError, config: RunConfig, storage: RunStorage, run_state: Any) -> TrainingError:
    """The one line for what no new start mends; `error.json` is left, but of a mistake of the user's."""
    if isinstance(cause, UsageError):
        return cause
    return _failed(str(cause), {"what": str(cause), "log": _log(read_run_state(run_state), None)}, config, storage)


def _failed(line: str, found: dict[str, Any], config: RunConfig, storage: RunStorage) -> TrainingError:
    document = {
        "run_name": storage.run_name,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        **found,
        "next": command(config),
    }
    return TrainingError(f"{line}; {_leave(document, storage)}; continue with --run-name {config.run_name}")


def command(config: RunConfig) -> str:
    """What to type for the run to go on: the flags that are not at their defaults."""
    return shlex.join(["python", "-m", "training", *_flags(config)])


def _flags(config: RunConfig) -> Iterator[str]:
    for spec in fields(config):
        if (value := getattr(config, spec.name)) != (os.environ.get(environment_variable(spec.name)) or spec.default):
            yield from (flag(spec.name), str(value))


def _cause(error: TrainingFailedError) -> tuple[int | None, BaseException]:
    """The rank that failed first, as far as it can be told, and why."""
    if isinstance(error, WorkerGroupError) and error.worker_failures:
        rank, cause = min(error.worker_failures.items(), key=lambda each: (_is_consequence(each[1]), each[0]))
        return rank, getattr(cause, "health_check_failure", cause)
    return None, error.controller_failure if isinstance(error, ControllerError) else error


def _is_consequence(cause: BaseException) -> bool:
    return isinstance(cause, dist.DistError) or any(each in str(cause) for each in CONSEQUENCES)


def _named(cause: BaseException) -> str:
    if isinstance(cause, RayActorError):
        return f"the worker's process ended ({one_line(cause)})"
    return one_line(f"{type(cause).__name__}: {cause}")


def _log(state: RunState | None, rank: int | None) -> list[str]:
    """The end of the worker's log, or why it can't be had."""
    worker = state.ranks.get(0 if rank is None else rank) if state else None
    if worker is None:
        return ["it is not known where the worker ran"]
    try:
        return [
            line
            for suffix in ("out", "err")
            for part in get_log(
                node_id=worker.node_id, pid=worker.pid, tail=LAST_LINES, suffix=suffix, timeout=LOG_SECONDS
            )
            for line in part.splitlines()
        ]
    except Exception as cause:  # Ray's state API has many ways to fail, none of which matters more than the failure
        return [f"Ray has not kept it: {_named(cause)}"]


def _leave(document: dict[str, Any], storage: RunStorage) -> str:
    try:
        newest = max(CheckpointStore(storage).names, default=None)
        storage.write_json(layout.ERROR, {**document, "checkpoint": newest})
    except OSError as cause:
        return f"{layout.ERROR} could not be written to {storage.uri} ({cause})"
    return f"see {storage.uri}/{layout.ERROR}"
