"""Storage of a node's files, by its first worker: while the scripts run, and once they have ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

import psutil

from ray_on_ecs.errors import one_line
from ray_on_ecs.run.files.folder import RunFolder
from ray_on_ecs.run.files.rounds import SnapshotRounds
from ray_on_ecs.run.group import FilesStatus, WorkerStatus
from ray_on_ecs.run.group_member import GroupMember
from ray_on_ecs.signals import SIGNALLED
from ray_on_ecs.storage.run_storage import RunStorage

logger = logging.getLogger(__name__)

WAIT_SECONDS = 0.05  # all workers wait for the last one


class NodeFiles:
    """The files of a node's run folder, on their way to the storage.

    On a worker that is not the first of its node, `begin` is never called, and nothing is stored.
    """

    def __init__(self, storage: RunStorage, folder: RunFolder, member: GroupMember, *, is_mpi: bool) -> None:
        self._storage = storage
        self._folder = folder
        self._member = member
        self._is_mpi = is_mpi
        self._rounds: SnapshotRounds | None = None
        self._left_out: tuple[str, ...] = ()

    @property
    def status(self) -> FilesStatus | None:
        """The status of the node's files, or None if this worker does not store them now."""
        return self._rounds.status if self._rounds else None

    def forget(self) -> None:
        """Forget the snapshots of the last start."""
        self._rounds = None

    def begin(self) -> None:
        """Begin the snapshots of a start, whose workers have met."""
        member = self._member
        nodes = len({worker.node_rank for worker in member.statuses.values()})
        key = f"{member.group}-{member.status.generation}"
        self._rounds = SnapshotRounds(self._storage, self._folder, member.status.node_rank, nodes, key)

    def store(self) -> None:
        """Store the files that are complete; called on another thread while the scripts run."""
        if self._rounds is None or self._was_killed:
            return
        try:
            self._rounds.poll(self._statuses, _descendants(worker.pid for worker in self._member.on_node))
            left_out = self._folder.part.left_out
            if left_out and left_out != self._left_out:
                logger.info(f"not kept: {', '.join(left_out)}; --keep-gib keeps more, --exclude keeps files out")
            self._left_out = left_out
        except Exception as cause:  # the thread continues
            logger.warning(f"files could not be stored, and will be tried again ({one_line(cause)})")

    def store_last(self) -> None:
        """Store the last files of the node, and on the first node the last snapshot, unless a script was killed."""
        if self._rounds is None or self._was_killed:
            return
        member = self._member
        try:
            self._rounds.finish()
            while member.status.node_rank == 0 and not self._rounds.commit_last(self._statuses):
                member.report(self.status, wants_statuses=True)
                if member.has_lost_driver or any(map(self._has_no_last_part, member.statuses.values())):
                    break
                time.sleep(WAIT_SECONDS)
        except Exception as cause:
            member.status = replace(member.status, not_stored=one_line(cause))
            return
        if outside := self._folder.outside:
            logger.info(f"not kept, because it is outside the working directory: {', '.join(outside)}")
        if failed := self._folder.failed:
            reason = "; ".join(f"{name}: {why}" for name, why in failed.items())
            member.status = replace(member.status, not_stored=reason)

    @property
    def _statuses(self) -> dict[int, FilesStatus]:
        """The statuses of the nodes' files, by the nodes' ranks."""
        return {worker.node_rank: worker.files for worker in self._member.statuses.values() if worker.files}

    @property
    def _was_killed(self) -> bool:
        """True if a script of this node was killed, perhaps in the middle of a write."""
        if any(map(self._is_killed, self._member.on_node)):
            return True
        mpirun = self._member.statuses.get(0)
        return self._is_mpi and mpirun is not None and self._is_killed(mpirun)

    def _is_killed(self, worker: WorkerStatus) -> bool:
        """Return whether a worker's script was killed: a shell adds 128 to the signal, and mpirun kills the others."""
        status = worker.status
        return status is not None and (status < 0 or status > SIGNALLED or (self._is_mpi and status != 0))

    def _has_no_last_part(self, worker: WorkerStatus) -> bool:
        """Return whether a worker of another node has ended without a last part of its node's files."""
        lacks = worker.is_stored and worker.files is not None and not worker.files.is_last
        return worker.node_rank != self._member.status.node_rank and (lacks or self._is_killed(worker))


def _descendants(pids: Iterable[int]) -> Iterator[psutil.Process]:
    """Yield the processes that these have started, directly or not."""
    for pid in pids:
        with suppress(psutil.Error):
            yield from psutil.Process(pid).children(recursive=True)
