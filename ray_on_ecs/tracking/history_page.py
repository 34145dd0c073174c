"""Page of all runs: their table, their curves, the settings that differ, and their cost by owner and month."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from ray_on_ecs.errors import counted
from ray_on_ecs.tracking.page import render_page, script

NEWEST = 5  # of the runs have their curves shown at first
MARK, START_BYTES = "ray-on-ecs history", 1000  # of the page, and the bytes at its start that have it


def render_history(
    rows: Sequence[Mapping[str, Any]],
    *,
    uri: str,
    command: str,
    made: datetime,
    since: datetime | None = None,
    chosen: Sequence[str] = (),
    reports: Mapping[str, str] | None = None,
) -> str:
    """Return the page as HTML.

    Args:
        rows: The runs, of `cluster.history_rows`, the newest first.
        uri: Their storage.
        command: The command that copies the report of a run.
        made: Time of the page, by the storage's clock.
        since: Start of the oldest run, if that is limited.
        chosen: Names of the runs whose curves are shown at first; by default the newest.
        reports: Addresses of the reports, relative to the page, by the run's name.
    """
    counts = Counter(name for row in rows for name in row["curves"])
    metrics = sorted(counts, key=lambda name: counts[name] * (2 if "loss" in name.lower() else 1), reverse=True)
    newest = [row["name"] for row in rows if metrics and metrics[0] in row["curves"]][:NEWEST]
    return render_page(
        "history.html.j2",
        mark=MARK,
        heading=counted(len(rows), "run") + (f" since {since:%Y-%m-%d}" if since else ""),
        uri=uri,
        command=command,
        made=f"{made:%Y-%m-%d %H:%M} UTC",
        data={"runs": rows, "metrics": metrics, "chosen": [*chosen] or newest, "reports": reports or {}},
        **script("history.js"),
    )


def is_history(file: Path) -> bool:
    """Return whether a file is such a page."""
    try:
        if not file.is_file():  # a pipe would wait for its writer
            return False
        with file.open("rb") as page:
            return MARK.encode() in page.read(START_BYTES)
    except OSError:
        return False
