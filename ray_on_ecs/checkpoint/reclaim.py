"""The agreement of all ranks that a node of the run is being reclaimed."""

from __future__ import annotations

import math

from ray_on_ecs import sdk
from ray_on_ecs.checkpoint.collectives import Collectives
from ray_on_ecs.checkpoint.pace import Pace


class Reclaim:
    """Asks about once per second. The process saves by itself and gets SIGTERM in the last seconds alone."""

    def __init__(self) -> None:
        self._pace = Pace()
        self._ranks: Collectives | None = None
        sdk.register_checkpointer()

    def is_near(self) -> bool:
        """Return whether a node is being reclaimed, the same on all ranks, which must call it after each step."""
        if not self._pace.is_due():
            return False
        if self._ranks is None:  # the process group is made after the callback
            self._ranks = Collectives()
        return self._pace.poll(self._ranks, math.isfinite)
