"""Agreement of all ranks that a node of the run is being reclaimed."""

from __future__ import annotations

import math

from ray_on_ecs import sdk
from ray_on_ecs.checkpoint.collectives import Collectives
from ray_on_ecs.checkpoint.pace import Pace


class Reclaim:
    """Poll for notices about once per second. The script saves itself, and gets SIGTERM only in the last seconds."""

    def __init__(self) -> None:
        self._pace = Pace()
        self._ranks: Collectives | None = None
        sdk.register_checkpointer()

    def is_near(self) -> bool:
        """Return True if a node is being reclaimed; all ranks must call it after each step, and agree."""
        if not self._pace.is_due():
            return False
        if self._ranks is None:  # trainers create the callback before the process group
            self._ranks = Collectives()
        return self._pace.poll(self._ranks, math.isfinite)
