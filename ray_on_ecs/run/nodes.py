"""The driver's view of the nodes: ends of their scripts, their files, and mpirun's daemons."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

from ray_on_ecs.run.files.moment import Moments
from ray_on_ecs.run.group import Group, WorkerStatus, WorkerStatuses
from ray_on_ecs.signals import SIGNALLED


class Nodes:
    """The nodes of a group during one start of the scripts; `mpi` is True for a program under mpirun."""

    def __init__(self, *, mpi: bool) -> None:
        self._mpi = mpi
        self._moments = Moments()
        self._last_parts: Mapping[int, str] = {}

    def look(self, group: Group, workers: WorkerStatuses) -> dict[str, Any]:
        """Take the statuses of this start; return what the directive says of the nodes."""
        ended: set[int] = set()
        killed: dict[int, float | None] = {}
        nodes = {rank.node_rank for rank in group.ranks}
        for node in nodes:
            ranks = [rank.rank for rank in group.ranks if rank.node_rank == node]
            living = [workers[rank] for rank in ranks if rank in workers and rank not in group.lost]
            is_lost = any(rank in group.lost for rank in ranks)
            if all(worker.has_ended for worker in living) and (is_lost or len(living) == len(ranks)):
                ended.add(node)
            rested_at = [worker.rested_at for worker in living if self._is_killed(worker)]
            if is_lost or rested_at:
                killed[node] = None if is_lost else min(rested_at)
        first = workers.get(0)
        if self._mpi and first and self._is_killed(first):  # mpirun kills the others
            killed = dict.fromkeys(nodes)
        pids: dict[int, tuple[int, ...]] = {}
        last_parts: dict[int, str] = {}
        for rank, worker in sorted(workers.items()):
            node = group.ranks[rank].node_rank
            if worker.files and node not in killed:
                self._moments.hear(node, worker.files, group.next_poll)
            if worker.files and worker.files.is_last:
                last_parts[node] = worker.files.part
            if worker.pid and not (worker.has_ended and worker.status == 0):  # others of its node may train on
                pids[node] = (*pids.get(node, ()), worker.pid)
        self._last_parts = last_parts if len(last_parts) == len(nodes) else {}
        changes: dict[str, Any] = {"pids": pids, "ended": frozenset(ended), "killed": killed}
        if len(nodes) > 1:
            changes["scan"] = self._moments.needs_look(len(nodes))
            changes["commit"] = self._last_parts or self._moments.common(len(nodes))
        if self._mpi and first:
            statuses = {group.ranks[rank].node_rank: worker.daemon_status for rank, worker in workers.items()}
            changes["daemons"] = first.daemons
            changes["daemon_statuses"] = {node: status for node, status in statuses.items() if status is not None}
            changes["mpirun_has_ended"] = first.status is not None
        return changes

    def have_committed(self, workers: WorkerStatuses) -> bool:
        """Return whether the last snapshot of several nodes is written, or can't be."""
        parts, first = self._last_parts, workers.get(0)
        if len(parts) < 2 or first is None or first.files is None or first.not_stored:
            return True
        has_files = any(part.split("-")[1] != "0" for part in parts.values())
        return not has_files or first.files.committed == parts

    def _is_killed(self, worker: WorkerStatus) -> bool:
        """Return whether a script was killed: a shell adds 128 to the signal, and mpirun kills the others."""
        status = worker.status
        is_of_shell = status is not None and SIGNALLED < status <= SIGNALLED + signal.SIGRTMAX
        return status is not None and (status < 0 or is_of_shell or (self._mpi and status != 0))
