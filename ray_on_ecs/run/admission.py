"""A run from its command to its turn: checked settings, stored code, a locked folder and a place in the queue.

Nothing here imports Ray Train or PyTorch: a run may wait for hours, beside others on the head.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from rich.console import Console
from rich.markup import escape

from ray_on_ecs import secrets
from ray_on_ecs.config import JOB_VARIABLE, SUBMITTED, RunConfig
from ray_on_ecs.errors import Interrupted, StorageError, TrainingError, one_line
from ray_on_ecs.filesystem import short_reason
from ray_on_ecs.run import code, queue, results
from ray_on_ecs.run.program_source import driver_reason, with_driver
from ray_on_ecs.run.stop import Stop, stoppable
from ray_on_ecs.tracking.lock import HeldError, hold_lock
from ray_on_ecs.tracking.run_record import RunRecord, job_metadata
from ray_on_ecs.tracking.storage import RunStorage


@dataclass(frozen=True)
class Admission:
    """A run whose turn it is.

    Attributes:
        config: Its settings, with its name and the place of its code.
        storage: Its folder.
        record: Says in that folder how it is doing.
    """

    config: RunConfig
    storage: RunStorage
    record: RunRecord


@contextmanager
def admit(config: RunConfig, console: Console) -> Generator[Admission]:
    """Wait for a run's turn, and hold its lock, its place in the queue and its secrets until the block ends.

    Args:
        config: The settings as the user gave them.
        console: Shows lines.

    Raises:
        UsageError: A setting, the script or a file that it needs can't be used, or the run has finished.
        StorageError, Interrupted: See `hold`.
    """
    is_job = JOB_VARIABLE in os.environ
    # Those of a job `ray-on-ecs run` has stored.
    values = {} if is_job else secrets.take_from_environment(config.secret)
    requested = config if config.code is None else replace(config.without_code(), working_dir=".")
    config, storage = _resolve(config)
    with _secrets_till_end(config, storage, values, is_job):
        config = _with_code(config, storage)
        admission = Admission(config, storage, RunRecord(storage, requested, config))
        with hold(admission, console):
            yield admission


def _resolve(config: RunConfig) -> tuple[RunConfig, RunStorage]:
    """Return the settings of the run and its folder, and check the user's own."""
    if config.code is None:
        config.check_files()
        if not config.driver and (reason := driver_reason(config)):
            print(f"ray-on-ecs: {reason}", flush=True)
        config = with_driver(config)
    config = replace(config.resolve_defaults(), working_dir=str(config.folder))
    return config, RunStorage.open(config.storage_path, str(config.run_name))


def _with_code(config: RunConfig, storage: RunStorage) -> RunConfig:
    """Check that the run may begin, and store the user's code unless that is done."""
    storage.check_writable()
    results.check_not_finished(storage)
    return config if config.code is not None else code.store(config, storage, print, links=True)


@contextmanager
def _secrets_till_end(
    config: RunConfig, storage: RunStorage, values: Mapping[str, str], is_job: bool
) -> Generator[None]:
    """Have the run's secrets stored until the block ends.

    They stay if another command has the run, or if a job is interrupted: the head may go on with it.

    Raises:
        UsageError: One is not there.
    """
    if values:
        secrets.store(storage.uri).put(values)
    stays = is_job  # unless an end is known to be final
    try:
        secrets.read(config.secret, storage.uri)  # as the workers do, which may have to be started first
        yield
        stays = False
    except TrainingError as end:
        stays = isinstance(end, HeldError) or (is_job and isinstance(end, Interrupted))
        raise
    finally:
        names = secrets.stored_names(config.secret)
        if names and not stays:
            _delete_secrets(storage, names)


def _delete_secrets(storage: RunStorage, names: Sequence[str]) -> None:
    """Delete the run's secrets; the run ends as it does if they can't be deleted."""
    try:
        secrets.store(storage.uri).delete(names)
    except (OSError, TrainingError) as cause:
        print(f"ray-on-ecs: {', '.join(names)} could not be deleted ({one_line(cause)})", flush=True)


@contextmanager
def hold(admission: Admission, console: Console) -> Generator[None]:
    """Hold a run's lock and its place in the queue until the block ends; the block begins when it is the run's turn.

    Args:
        admission: The run.
        console: Shows lines.

    Raises:
        UsageError: Another command trains the run.
        StorageError: The storage failed within the block.
        Interrupted: The user stopped the run.
    """
    config, storage, record = admission.config, admission.storage, admission.record

    def say(line: str) -> None:
        console.print(escape(f"ray-on-ecs: {line}"), highlight=False, soft_wrap=True)

    def waits_behind(ticket: queue.Ticket) -> None:
        if record.behind is None:
            waiting.enter_context(record.queued())
        record.behind = ticket.run_name
        say(queue.describe(ticket))

    since = float(job_metadata().get(SUBMITTED) or time.time())
    try:
        with (
            hold_lock(storage, say) as lock,
            record.closing(lambda: lock.is_held, say),
            stoppable(),
            ExitStack() as waiting,
            queue.turn(queue.Ticket.of(config, record.owner, since), waits_behind),
        ):
            waiting.close()
            yield
    except OSError as cause:
        raise StorageError(
            f"{storage.uri} can't be read or written ({short_reason(cause)}); "
            f"continue with --run-name {config.run_name}"
        ) from cause
    except (KeyboardInterrupt, SystemExit) as stop:  # the latter is Ray's own answer to SIGTERM
        raise interrupted(config, stop) from stop


def interrupted(config: RunConfig, stop: BaseException) -> Interrupted:
    """Return the error of a run that was stopped."""
    error = Interrupted(f"interrupted; continue with --run-name {config.run_name}")
    error.exit_status = stop.exit_status if isinstance(stop, Stop) else Interrupted.exit_status
    return error
