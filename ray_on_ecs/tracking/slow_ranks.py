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
    share: float  # of the time


def slow_in(document: Any) -> list[SlowTime]:
    """Return the slow ranks in a document, which another version of this program may have written."""
    return [SlowTime(since=each["since"], until=each["until"], what=each["what"]) for each in _rows(document, "slow")]


def waits_in(document: Any) -> dict[str, str]:
    """Return the waits in a document as rows of a table: the rank, and its share of the time."""
    rows = {}
    for each in _rows(document, "waits"):
        node = f" ({each['node']})" if each["node"] else ""
        rows[f"rank {each['rank']}{node}"] = f"waits {each['share']:.1%} of the time".replace("%", " %")
    return rows


KINDS: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {
    "slow": {"since": str, "until": (str, type(None)), "what": str},
    "waits": {"rank": int, "node": str, "share": (float, int)},
}


def _rows(document: Any, name: str) -> list[dict[str, Any]]:
    """Return the rows of a list in a document that have what they must have."""
    found = document.get(name) if isinstance(document, dict) else None
    kinds = KINDS[name].items()
    rows = found if isinstance(found, list) else []
    return [row for row in rows if isinstance(row, dict) and all(isinstance(row.get(key), of) for key, of in kinds)]
