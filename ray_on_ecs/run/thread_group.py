"""Workers that are threads of the driver's process: those of a run on one machine, and the one of a Ray program."""

from __future__ import annotations

import threading
import time

from ray_on_ecs.run.exchange import Exchange
from ray_on_ecs.run.group import Directive, Place, WorkerRank, WorkerStatuses
from ray_on_ecs.run.worker import ScriptWorker, Settings

POLL_SECONDS = 0.05


class ThreadGroup:
    """See Group."""

    def __init__(self, settings: Settings, world_size: int) -> None:
        self.ranks: list[WorkerRank] = []
        self.places: list[Place] = []
        self.lost: dict[int, str] = {}
        self.next_poll = 1
        self._settings = settings
        self._world_size = world_size
        self._exchanges: list[Exchange] = []
        self._told: Directive | None = None

    def poll(self, directive: Directive) -> WorkerStatuses:
        """See Group."""
        if not self._exchanges:
            size = self._world_size
            self.ranks = [WorkerRank(rank, size, local_rank=rank, local_world_size=size) for rank in range(size)]
            self.places = [Place()] * size
            workers = [ScriptWorker(self._settings, rank, Place()) for rank in self.ranks]
            self._exchanges = [worker.exchange for worker in workers]
            for worker in workers:
                threading.Thread(target=worker.run, name="worker", daemon=True).start()
        if directive == self._told:  # a new one is told at once
            time.sleep(POLL_SECONDS)
        self._told = directive
        number = self.next_poll
        self.next_poll += 1
        return {rank: exchange.poll(number, directive, -1, 0.0)[1] for rank, exchange in enumerate(self._exchanges)}

    def replace_lost(self) -> bool:
        """See Group: a thread is not lost without its process."""
        return True

    def can_grow(self) -> bool:
        """See Group."""
        return False

    def close(self) -> None:
        """See Group."""
