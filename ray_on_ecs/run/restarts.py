"""Restarts of a run: what the scripts find at each, its line in the log, and scripts that begin again."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from ray_on_ecs.run.extent import Extent
from ray_on_ecs.run.files.newest import Kept
from ray_on_ecs.tracking.run_record import Restarted

logger = logging.getLogger(__name__)

UP_TO_SCRIPT = "restarting; whether it continues is up to the script"
ADVICE = 'docs/fault-tolerance.md, "Your script"'


class Restarts:
    """Restarts of one command.

    Args:
        resume_args: See --resume-args.
        records: The run's restarts so far, to which each one is added.
        extents: Those of the run's first start and of the furthest one of the command before, and then of this one.

    Attributes:
        kept: The newest kept file or checkpoint.
        has_files: True if without one the script finds text or settings, which may be its state.
        is_known: True if the storage has said what is kept.
        dropped: A file that was not kept, as the script was killed when it may have been half-written.
    """

    def __init__(self, resume_args: str | None, records: list[Restarted], extents: list[dict[str, Any]]) -> None:
        self._resume_args = resume_args
        self._records = records
        self._extents = extents
        self._earlier: tuple[Extent, Extent] | None = None
        self.kept: Kept | None = None
        self.has_files = False
        self.is_known = False
        self.dropped = ""
        self._first = self._best = Extent()
        self._extent = Extent()  # of the current start
        self._has_said = False

    def note(self, cause: str, count: str) -> None:
        """Record a restart, and print its line; `count` is that of the failures."""
        kept = self.kept if self.is_known else None
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._records.append({"time": now, "cause": cause, "kept": kept.name if kept else None})
        notes = [count] * bool(count)
        if not self.is_known:
            how = "restarting from where the run was"
        elif kept is None:
            why = f", as {self.dropped} had just changed and may be half-written" if self.dropped else ""
            how = f"restarting from the beginning{why}"
            if self.has_files:
                how = UP_TO_SCRIPT
                notes.insert(0, f"kept: only text and settings{why}")
        elif kept.is_loaded:
            how = f"restarting from {kept}"
        else:
            how = UP_TO_SCRIPT
            if self._resume_args:
                how = f"restarting with {self._resume_args}"
            notes.insert(0, f"newest kept file: {kept}")
        logger.warning(f"{cause}; {how}" + (f" ({'; '.join(notes)})" if notes else ""))

    def begin(self) -> None:
        """Note that another start of the scripts begins."""
        if self._first.second is None:
            self._first = self._extent
        if self._best.second is None or self._extent.is_beyond(self._best):
            self._best = self._extent
        self._extent, self._has_said, self.dropped = Extent(), False, ""

    @property
    def is_beyond(self) -> bool | None:
        """True if the current start has got further than those before; None if that is not known."""
        return self._extent.is_beyond(self._best)

    def look(self, extent: Extent) -> None:
        """Print a line if the current start does again what an earlier one had done, although there are files."""
        self._extent = extent
        if self._earlier is None:
            self._earlier = Extent(), Extent()
            with suppress(LookupError, TypeError, ValueError):  # of another version of this program
                self._earlier = Extent.of(self._extents[0]), Extent.of(self._extents[1])
        is_first = self._best.second is None
        first = self._earlier[0] if self._earlier[0].second else self._first
        best = self._earlier[1] if is_first else self._best
        if extent.second:
            furthest = extent if is_first or extent.is_beyond(best) else best
            self._extents[:] = asdict(first if first.second else extent), asdict(furthest)
        if self._has_said or not self.kept or not extent.begins_again(first, best):
            return
        self._has_said = True
        began = "the script began again"
        if difference := extent.difference(best):
            unit, number, before = difference
            began += f" at {unit} {number:g} (before: {before:g})"
        way_on = ADVICE if self._resume_args else f"--resume-args, or {ADVICE}"
        logger.warning(f"{began}: it did not load {self.kept.name}; {way_on}")
