"""A run from its document to its turn: a locked folder, secrets and a place in the queue.

Nothing here imports Ray Train or PyTorch: a run may wait for hours, and several may wait on one head.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace

from ray_on_ecs import logs
from ray_on_ecs.cluster_info import ClusterInfo, is_refused, read_cluster_info
from ray_on_ecs.config import SUBMITTED, RunConfig
from ray_on_ecs.contract import CLUSTER_INFO_VARIABLE
from ray_on_ecs.errors import Interrupted, ResourceError, StorageError, UsageError, resume_line
from ray_on_ecs.jobs.record import RESUBMISSIONS, number_in
from ray_on_ecs.pools import kinds_by_pool
from ray_on_ecs.run import limit, queue, run_secrets
from ray_on_ecs.run.document import DIGEST, RunDocument
from ray_on_ecs.run.files.newest import has_stored, nothing_stored_line
from ray_on_ecs.run.pool_choice import candidates, default_workers
from ray_on_ecs.signals import exit_status_of, stoppable
from ray_on_ecs.storage.filesystem import short_reason
from ray_on_ecs.storage.lock import hold_lock
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.tracking.results import check_not_finished
from ray_on_ecs.tracking.run_record import RunRecord, job_metadata

logger = logging.getLogger(__name__)

# How long a run waits for the stack's description of its pools, which AWS may not give for a moment.
INFO_SECONDS, INFO_POLL_SECONDS = 300.0, 5.0


@dataclass(frozen=True)
class Admission:
    """A run whose turn it is.

    Attributes:
        document: The run as its user gave it.
        record: The run's state in its folder.
        info: The stack's workers; None without a stack, and if they can't be read.
        kinds: The kinds of node that can hold it, in order; see `candidates`.
        place: Its place in the queue.
    """

    document: RunDocument
    record: RunRecord
    info: ClusterInfo | None = None
    kinds: Sequence[str] = ()
    place: queue.Place | None = None


@contextmanager
def admit(uri: str) -> Generator[Admission]:
    """Wait for a run's turn, and hold its lock, its place in the queue and its secrets until the block ends.

    Raises:
        ResourceError: The stack's pools can't be read.
        UsageError: The run's document can't be used, the run has finished, or --max-usd lacks a price.
        StorageError, LimitReached, Interrupted: See `hold`.
    """
    document = RunDocument.read(uri, os.environ, job_metadata().get(DIGEST))
    try:
        info = read_pools(document.config)
        if info and document.config.num_workers is None:
            number = default_workers(document.config, info)
            document = replace(document, config=replace(document.config, num_workers=number))
        kinds = candidates(document.config, info) if info else []
        logs.set_up("ray-on-ecs", document.config.variables)
        # A run that the head submits again was admitted before: it goes on although a price has become unknown.
        if document.config.max_usd and not number_in(job_metadata(), RESUBMISSIONS):
            limit.check_prices(info or _wait_for_info(), kinds)
        document.storage.check_writable()
        check_not_finished(document.storage)
    except (ResourceError, UsageError) as refusal:
        RunRecord(document.storage, document.config).refuse(refusal)
        raise
    admission = Admission(document, RunRecord(document.storage, document.config), info, kinds)
    with hold(admission) as place:
        document.keep()
        yield replace(admission, place=place)


def read_pools(config: RunConfig) -> ClusterInfo | None:
    """Return the stack's workers, for which a run waits a while; None for a Ray program, and without a stack.

    A run that names neither GPUs nor pools goes on without them, at once if AWS refuses them.

    Raises:
        ResourceError: They can't be read.
        UsageError: This is not a stack, and so has no pools to choose from.
    """
    given = {"--gpu": config.gpu, "--pool": config.pool, "--require-efa": config.require_efa or None}
    option = next((name for name, value in given.items() if value is not None), "")
    name = os.environ.get(CLUSTER_INFO_VARIABLE)
    if option and not name:
        raise UsageError(f"{option}: this cluster has no pools, as it is not a stack's; leave it out")
    if not name or config.driver or queue.is_without_ray():
        return None
    info = _wait_for_info(also_if_refused=bool(option))
    if info is None and option:
        raise ResourceError(f"{option}: the stack's pools can't be read ({name})")
    return info


def _wait_for_info(*, also_if_refused: bool = False) -> ClusterInfo | None:
    """Return the stack's workers, for which a run waits a while; None without a stack, and if they can't be read."""
    until = time.monotonic() + (INFO_SECONDS if os.environ.get(CLUSTER_INFO_VARIABLE) else 0.0)
    while (info := read_cluster_info()) is None and time.monotonic() < until:
        if not also_if_refused and is_refused():
            break
        time.sleep(INFO_POLL_SECONDS)
    return info


@contextmanager
def hold(admission: Admission) -> Generator[queue.Place]:
    """Hold a run's lock, secrets and place in the queue until the block ends; the block begins when it is its turn.

    Raises:
        UsageError: Another command trains the run, or has finished it.
        LimitReached: The run has spent what its limits allow.
        StorageError: The storage failed within the block.
        Interrupted: The user stopped the run.
    """
    config, storage, record = admission.document.config, admission.document.storage, admission.record

    def waits_behind(ticket: queue.Ticket) -> None:
        is_first = record.behind is None
        record.behind = ticket.run_name
        record.line = ticket.pool if info and len(kinds_by_pool(info)) > 1 else ""
        if is_first:
            waiting.enter_context(record.queued())
        logger.info(queue.describe(ticket, record.line, config.storage_path))

    since = float(job_metadata().get(SUBMITTED) or time.time())
    info = admission.info
    of_pools = [info["groups"][kind]["pool"] for kind in admission.kinds] if info else []
    try:
        with (
            hold_lock(storage, logger.info) as lock,
            record.closing(lambda: lock.is_held),
            stoppable(),
            run_secrets.till_end(config, storage, lambda: lock.is_held),
        ):
            check_not_finished(storage)  # the command that held the lock may have ended while this one waited for it
            limit.check(config, storage, record)
            ticket = queue.Ticket.of(config, record.owner, since, [*dict.fromkeys(of_pools)])
            with ExitStack() as waiting, queue.turn(ticket, waits_behind) as place:
                waiting.close()
                logger.debug(f"the turn of {storage.uri}, with its lock")
                yield place
    except OSError as cause:
        fault = f"{storage.uri} can't be read or written ({short_reason(cause)})"
        raise StorageError(f"{fault}; {resume_line(config.run_name)}") from cause
    except (KeyboardInterrupt, SystemExit) as stop:  # the latter is Ray's own answer to SIGTERM
        raise interrupted(config, stop, is_stored=_is_stored(config, storage)) from stop


def interrupted(config: RunConfig, stop: BaseException, *, is_stored: bool = True) -> Interrupted:
    """Return the error of a run that was stopped; `is_stored` is True if it has stored a file to continue from."""
    name = str(config.run_name)
    way_on = resume_line(name) if is_stored else nothing_stored_line(name)
    error = Interrupted(f"stopped; {way_on}")
    error.exit_status = exit_status_of(stop)
    return error


def _is_stored(config: RunConfig, storage: RunStorage) -> bool:
    """Return whether a run has stored anything to continue from; True if that can't be read."""
    with suppress(OSError, UsageError, ValueError):
        return has_stored(config, storage)
    return True
