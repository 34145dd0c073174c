"""Slow ranks in a run's documents: the times in which a rank was slow, and how much each rank waits for others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict


class SlowTime(TypedDict):
    """A time in which a rank was slow."""

    since: str  # in UTC (ISO 8601), as is `until`
    until: str | None  # null while it lasts
    what: str  # the line that was printed


class Wait(TypedDict):
    """The time that a rank waits for others in collectives."""

    rank: int
    node: str  # its instance and address
    share: float | int  # of the time


def waits_in(document: Mapping[str, Any]) -> dict[str, str]:
    """Return the waits in a document as rows of a table: the rank, and its share of the time."""
    rows = {}
    for each in document.get("waits") or ():
        node = f" ({each['node']})" if each["node"] else ""
        rows[f"rank {each['rank']}{node}"] = f"waits {each['share']:.1%} of the time".replace("%", " %")
    return rows
