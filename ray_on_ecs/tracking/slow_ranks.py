"""Slow ranks in a run's documents: the times in which a rank was slow, and how much each rank waits for others."""

from __future__ import annotations

from typing import Any, TypedDict, get_type_hints


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


def slow_in(document: Any) -> list[SlowTime]:
    """Return the slow ranks in a document, which another version of this program may have written."""
    return _rows(document, "slow", SlowTime)


def waits_in(document: Any) -> dict[str, str]:
    """Return the waits in a document as rows of a table: the rank, and its share of the time."""
    rows = {}
    for each in _rows(document, "waits", Wait):
        node = f" ({each['node']})" if each["node"] else ""
        rows[f"rank {each['rank']}{node}"] = f"waits {each['share']:.1%} of the time".replace("%", " %")
    return rows


def _rows(document: Any, name: str, kind: type) -> list[Any]:
    """Return the rows of a list in a document that have the keys of a TypedDict, without others."""
    found = document.get(name) if isinstance(document, dict) else None
    rows = [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []
    hints = get_type_hints(kind)
    whole = (row for row in rows if all(key in row and isinstance(row[key], hints[key]) for key in hints))
    return [{key: row[key] for key in hints} for row in whole]
