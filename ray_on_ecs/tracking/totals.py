"""Time and cost of a run over all its commands, from its `status.json` and `result.json`.

Each command writes the totals of the commands before it under `earlier`, and its own time and cost beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, TypedDict

Document = Mapping[str, Any]


class Earlier(TypedDict):
    """Totals of the commands before this one.

    Attributes:
        seconds: Time.
        usd: Cost of the workers, in dollars; None where a command's is not known.
    """

    seconds: float
    usd: float | None


def earlier_of(status: Document | None) -> Earlier:
    """Return the totals that the next command has before it, from the status of the last one."""
    if not status:
        return {"seconds": 0.0, "usd": 0.0}
    return {"seconds": total_seconds(status, {}) or 0.0, "usd": total_usd(status, {})}


def total_seconds(status: Document, result: Document) -> float | None:
    """Return the time of a run's commands, or None if it has not begun."""
    if not (status or result):
        return None
    if result:
        seconds = result["times"]["total_seconds"]
    else:
        seconds = (_time(status["updated"]) - _time(status["started"])).total_seconds()
    return seconds + _earlier(status, result)["seconds"]


def total_usd(status: Document, result: Document) -> float | None:
    """Return the cost of a run's workers in dollars, or None if a part is not known."""
    own = (result.get("cost") or {}).get("usd") if result else status.get("cost_usd")
    before = _earlier(status, result)["usd"]
    return None if own is None or before is None else own + before


def _earlier(status: Document, result: Document) -> Earlier:
    return result.get("earlier") or status.get("earlier") or {"seconds": 0.0, "usd": 0.0}


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)
