"""Membership of a worker in its group: statuses of the workers and the driver's directive."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from ray_on_ecs.run.group import Directive, FilesStatus, WorkerStatus
from ray_on_ecs.tracking.run_actor import RunClient

logger = logging.getLogger(__name__)

# The driver counts as lost when its actor has not answered for so long.
LOST_SECONDS = 60.0


class GroupMember:
    """One worker's exchange with the others and with the driver, through the run's actor.

    One thread reports. Others may read meanwhile: each attribute is replaced as a whole.

    Attributes:
        group: The ID of the worker's group.
        status: The worker's own status.
        statuses: The last statuses of the workers of this start, by rank.
        directive: The driver's last directive to this group, or None.
    """

    def __init__(self, actor: RunClient, group: str, rank: int, status: WorkerStatus) -> None:
        self._actor = actor
        self._rank = rank
        self._blank = status
        self._silent_since: float | None = None
        self.group = group
        self.status = status
        self.statuses: dict[int, WorkerStatus] = {}
        self.directive: Directive | None = None

    def begin(self, generation: int) -> None:
        """Begin a start of the scripts, with the status of a worker whose script has not started."""
        self.status = replace(self._blank, generation=generation)

    def report(self, files: FilesStatus | None, *, wants_statuses: bool = False) -> Directive | None:
        """Report the status; return the driver's directive, or None if there is none to this group.

        Args:
            files: The status of the node's files, from its first worker.
            wants_statuses: True to read the statuses of the other workers, too.
        """
        answer = self._actor.update(self.group, self._rank, replace(self.status, files=files), wants_statuses)
        if answer is None:
            if self._silent_since is None:
                logger.debug(f"rank {self._rank}: the run's actor does not answer; trying again")
                self._silent_since = time.monotonic()
            return None
        self._silent_since = None
        directive, statuses = answer
        generation = self.status.generation
        new = {rank: status for rank, status in statuses.items() if status.generation == generation}
        earlier = {rank: status for rank, status in self.statuses.items() if status.generation == generation}
        self.statuses = earlier | new
        if directive is None or directive.group != self.group:
            return None
        self.directive = directive
        return directive

    @property
    def is_to_run(self) -> bool:
        """True while the driver wants the scripts of this start to run."""
        directive = self.directive
        if directive is None or directive.generation != self.status.generation:
            return False
        return directive.action == "run" and not self.has_lost_driver

    @property
    def has_lost_driver(self) -> bool:
        """True once the driver's actor has not answered for long."""
        return self._silent_since is not None and time.monotonic() - self._silent_since > LOST_SECONDS

    @property
    def on_node(self) -> list[WorkerStatus]:
        """The statuses of the workers of this node."""
        node_rank = self.status.node_rank
        workers = {rank: status for rank, status in self.statuses.items() if status.node_rank == node_rank}
        return list((workers | {self._rank: self.status}).values())
