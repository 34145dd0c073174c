"""Queue of the runs of one head: a run starts when a pool can hold its workers and those of the runs before it there.

Each pool has a line: first come, first served, without backfill, so a small run does not pass a large one that waits. A
run that may use several pools waits in each of their lines, and begins in the first one that has room. A run on CPUs
stays in all of them and begins at their heads, as it may train on the nodes of any.

Each driver holds a ticket, a file that it has locked, so a driver that dies leaves the queue by itself, and a run that
is submitted again takes its old place among those that wait. Ray programs have tickets and do not wait, since Ray gives
them their workers one by one.

A driver that waits here has imported neither Ray Train nor PyTorch, and has not joined the cluster.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from ray_on_ecs.cluster_info import ClusterInfo, read_cluster_info
from ray_on_ecs.config import LOCAL_VARIABLE, RunConfig
from ray_on_ecs.contract import DEFAULT_POOL
from ray_on_ecs.errors import counted, one_line
from ray_on_ecs.pools import gpus_of, kinds_by_pool
from ray_on_ecs.private_folder import temporary
from ray_on_ecs.run.local_gpus import count_gpus

logger = logging.getLogger(__name__)

POLL_SECONDS = 2.0  # a run waits for minutes or hours
TIMEOUT_SECONDS = 10  # a head that is busy is asked again
# Names of tickets: runs that have begun sort before runs that wait, and these sort by time.
TICKETS, BEGUN, WAITING = "*.ticket", "begun-", "waiting-"


@dataclass(frozen=True)
class Ticket:
    """A run that waits or trains.

    Attributes:
        run_name: The run.
        owner: The user who started it.
        since: When it was submitted (Unix time).
        device: `auto`, `cpu` or `cuda`.
        workers: The most workers that it takes; None for all that the cluster has, 0 for a Ray program.
        pools: The pools that it may use, in order of preference.
        pool: The pool in which it has begun; empty while it waits.
        storage_path: The folder of its folder.
    """

    run_name: str
    owner: str
    since: float
    device: str
    workers: int | None
    pools: Sequence[str] = (DEFAULT_POOL,)
    pool: str = ""
    storage_path: str = ""

    @classmethod
    def of(cls, config: RunConfig, owner: str, since: float, pools: Sequence[str] = ()) -> Ticket:
        """Return the ticket of a run with these settings, for these pools."""
        most = config.workers[1] if config.workers else None
        workers = 0 if config.driver else most
        path, names = config.storage_path.rstrip("/"), tuple(pools) or (DEFAULT_POOL,)
        return cls(str(config.run_name), owner, since, config.device, workers, names, storage_path=path)

    @property
    def lines(self) -> Sequence[str]:
        """The pools whose lines it is in."""
        if not self.pool:
            return self.pools
        return (self.pool, *self.pools) if self.device == "cpu" else (self.pool,)


def find_room(tickets: Sequence[Ticket], own: Ticket, gpus: Mapping[str, int] | None) -> str | Ticket:
    """Return the first of a run's pools that has room for it, or else the run that it is queued behind.

    That run's `pool` is then the one in whose line it is.

    Runs on CPUs take turns, since a run takes as many CPU threads as the nodes have.

    Args:
        tickets: The tickets before it, the oldest first.
        own: The run.
        gpus: The number of GPUs that each pool has or can start; None if the cluster does not answer.
    """
    behind: Ticket | None = None
    for pool in own.pools:
        line, number = [each for each in tickets if pool in each.lines], None if gpus is None else gpus.get(pool, 0)
        blocking = _predecessor(line, own, number)
        if blocking is None and own.device != "cpu":
            return pool
        behind = behind or (blocking and replace(blocking, pool=pool))
    return behind or own.pools[0]


def _predecessor(tickets: Sequence[Ticket], own: Ticket, gpus: int | None) -> Ticket | None:
    """Return the run that `own` is queued behind in the line of a pool with so many GPUs, or None."""
    tickets = [ticket for ticket in tickets if ticket.workers != 0]
    if own.workers == 0 or not tickets:
        return None
    if gpus is None:
        return tickets[-1]

    def uses_gpus(ticket: Ticket) -> bool:
        return ticket.device == "cuda" or (ticket.device == "auto" and gpus > 0)

    alike = [ticket for ticket in tickets if uses_gpus(ticket) == uses_gpus(own)]
    if not alike:
        return None
    needed = [gpus if ticket.workers is None else min(ticket.workers, gpus) for ticket in (*alike, own)]
    has_room = uses_gpus(own) and sum(needed) <= gpus
    return None if has_room else alike[-1]


class Place:
    """A run's place in the queue until the block ends; a context."""

    def __init__(self, ticket: Ticket, folder: Path) -> None:
        self._ticket, self._folder = ticket, folder
        self._path = folder / f"{WAITING}{ticket.since:017.3f}-{os.getpid()}.ticket"

    def __enter__(self) -> Self:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        unnamed = self._path.with_suffix(".new")
        self._file = unnamed.open("w")
        # Locked before it has its name: others delete a ticket without a lock, which a dead driver has left.
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._write()
        unnamed.rename(self._path)
        return self

    @property
    def pool(self) -> str:
        """The pool in which the run has begun; empty while it waits."""
        return self._ticket.pool

    def __exit__(self, *_: object) -> None:
        self._path.unlink(missing_ok=True)
        self._file.close()

    def tickets_before(self) -> list[Ticket]:
        """Return the runs that have begun, then the runs that have waited longer."""
        return self._tickets(lambda path: path < self._path or path.name.startswith(BEGUN))

    def _tickets(self, is_meant: Callable[[Path], bool] = lambda path: True) -> list[Ticket]:
        tickets = []
        for path in sorted(self._folder.glob(TICKETS)):
            if path == self._path or not is_meant(path):
                continue
            with suppress(OSError, ValueError, TypeError), path.open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink(missing_ok=True)
                except BlockingIOError:  # its driver lives
                    tickets.append(Ticket(**json.load(file)))
        return tickets

    def begin_if_free(self, gpus: Mapping[str, int] | None) -> Ticket | None:
        """Begin in a pool with room, else return the run that this one is queued behind."""
        with self._deciding():
            found = find_room(self.tickets_before(), self._ticket, gpus)
            if isinstance(found, Ticket):
                return found
            self._begin_in(found)
            self._path = self._path.rename(self._path.with_name(self._path.name.replace(WAITING, BEGUN)))
        return None

    def move(self, pool: str, gpus: Mapping[str, int]) -> bool:
        """Move a run that has begun to another pool, if that has room beside those before it; return whether it has.

        Those that have begun come before it, and those that wait longer than it has since its submission.
        """
        with self._deciding():
            older = [each for each in self._tickets() if each.pool or each.since < self._ticket.since]
            found = find_room(older, replace(self._ticket, pools=(pool,)), gpus)
            if isinstance(found, Ticket):
                return False
            self._begin_in(pool)
        return True

    @contextmanager
    def _deciding(self) -> Generator[None]:
        """Let one driver decide at a time."""
        with (self._folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _begin_in(self, pool: str) -> None:
        self._ticket = replace(self._ticket, pool=pool)
        self._write()

    def _write(self) -> None:
        self._file.seek(0)
        self._file.truncate()
        json.dump(asdict(self._ticket), self._file)
        self._file.flush()


def is_without_ray() -> bool:
    """Return whether this is the driver of `run --local`, which needs Ray for a Ray program alone."""
    return LOCAL_VARIABLE in os.environ and not os.environ.get("RAY_ADDRESS")


@contextmanager
def turn(ticket: Ticket, waits_behind: Callable[[Ticket], None]) -> Generator[Place]:
    """Wait for the run's turn, and keep its place until the block ends.

    When it waits, `waits_behind` is called with the run before it, and again whenever that is another one.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    folder = temporary() / "queue" / hashlib.sha256(address.encode()).hexdigest()[:16]  # this user's, of this head
    with Place(ticket, folder) as place:
        behind: Ticket | None = None
        while True:
            gpus = None
            if place.tickets_before():  # an empty queue asks neither Ray nor AWS
                info, there = read_cluster_info(), _gpus(address)
                gpus = None if there is None else gpus_by_pool(info) if info else {DEFAULT_POOL: there}
            blocking = place.begin_if_free(gpus)
            if blocking is None:
                break
            if blocking != behind:
                behind = blocking
                waits_behind(blocking)
            time.sleep(POLL_SECONDS)
        yield place


def gpus_by_pool(info: ClusterInfo) -> dict[str, int]:
    """Return the number of GPUs that each pool can start."""
    groups = info["groups"]
    return {pool: groups[kinds[0]]["max"] * gpus_of(groups[kinds[0]]) for pool, kinds in kinds_by_pool(info).items()}


def _gpus(gcs_address: str) -> int | None:
    """Return the number of GPUs of the cluster, or of this machine without one; None if it does not answer."""
    if not gcs_address:
        return count_gpus()
    try:
        from ray.autoscaler.v2 import sdk

        status = sdk.get_cluster_status(gcs_address, timeout=TIMEOUT_SECONDS)
    except Exception as cause:  # any of Ray's errors
        logger.debug(f"the cluster's GPUs are not known, and will be asked again ({one_line(cause)})")
        return None
    nodes = [*status.active_nodes, *status.idle_nodes]
    return int(sum(node.total_resources().get("GPU", 0) for node in nodes))


def describe(behind: Ticket, line: str = "", storage_path: str = "") -> str:
    """Return the text of a run that waits; `line` is the pool in whose line it does.

    The run ahead may be below another storage path than this one's.
    """
    workers = f", {counted(behind.workers, 'worker')}" if behind.workers else ""
    is_other = behind.storage_path not in ("", storage_path.rstrip("/"))
    path = f", in {behind.storage_path}" if is_other and storage_path else ""
    of_pool = f" in pool {line}" if line else ""
    return f"queued behind {behind.run_name} ({behind.owner}{workers}{path}){of_pool}"
