"""The announcement that nodes of a run are being reclaimed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Preemption:
    """Nodes that are being reclaimed.

    Attributes:
        ranks: The workers on them.
        deadline: When everything must be saved (Unix time).
    """

    ranks: list[int]
    deadline: float
