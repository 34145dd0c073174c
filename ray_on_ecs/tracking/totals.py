"""Total time and cost of a run over all its commands, from its `status.json` and `result.json`.

Each command writes its time and cost, and the totals of the commands before it under `earlier`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any, TypedDict

Document = Mapping[str, Any]


class Earlier(TypedDict):
    """Totals of the commands before this one.

    Attributes:
        usd: Cost of the workers, in dollars; None if the cost of one of the commands is not known.
    """

    seconds: float
    usd: float | None


def earlier_of(status: Document | None) -> Earlier:
    """Return the totals up to and including the command with this status."""
    if not status:
        return {"seconds": 0.0, "usd": 0.0}
    return {"seconds": total_seconds(status, {}) or 0.0, "usd": total_usd(status, {})}


def total_seconds(status: Document, result: Document) -> float | None:
    """Return the total time of a run's commands, or None if it has not begun.

    Raises:
        Exception: A document is not one of the runner's, such as TypeError for a text in place of a number.
    """
    if not (status or result):
        return None
    if result:
        seconds = result["times"]["total_seconds"]
    else:
        started = datetime.fromisoformat(status["started"])
        updated = datetime.fromisoformat(status["updated"])
        seconds = (updated - started).total_seconds()
    return math.fsum((seconds, _earlier(status, result)["seconds"]))


def total_usd(status: Document, result: Document) -> float | None:
    """Return the total cost of a run's workers in dollars, or None if a part of it is not known; raise likewise."""
    usd = status.get("cost_usd")
    if result:
        usd = (result.get("cost") or {}).get("usd")
    earlier_usd = _earlier(status, result)["usd"]
    if usd is None or earlier_usd is None:
        return None
    return math.fsum((usd, earlier_usd))


def _earlier(status: Document, result: Document) -> Earlier:
    return result.get("earlier") or status.get("earlier") or {"seconds": 0.0, "usd": 0.0}
