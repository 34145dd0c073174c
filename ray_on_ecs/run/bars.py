"""Progress bars in a script's output, of which a log has a state every ten seconds, and the last one."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from ray_on_ecs.tracking.shown_log import BAR

SECONDS = 10.0
# Bars that are known at once; a script may print another text with each `\r`.
MOST = 50
# The move up with which a bar below another one ends.
UP = re.compile(r"\x1b\[\d*A\s*$")
BLANK = re.compile(r"(?:\s|\x1b\[[0-?]*[ -/]*[@-~])*")


class Bars:
    """Decides what is shown of an output whose lines may be states of progress bars."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._shown_at: dict[str, float] = {}
        self._held: dict[str, str] = {}
        self._is_after_bar = False

    def is_state(self, line: str, end: str) -> bool:
        """Return whether a line with this end is a state that another one replaces."""
        is_bar = BAR.search(line) is not None
        is_blank = BLANK.fullmatch(line) is not None and (end == "\r" or self._is_after_bar)
        is_state = is_blank or end == "\r" or UP.search(line) is not None or (is_bar and "100%" not in line)
        self._is_after_bar = is_state or is_bar
        if not is_state:  # the last state, with its newline
            self._held.pop(_name(line), None)
        return is_state

    def take(self, line: str) -> str | None:
        """Take a state; return the line to show, if it is time for one."""
        if BLANK.fullmatch(line):
            return None
        name, now = _name(line), self._clock()
        if now - self._shown_at.setdefault(name, now) < SECONDS:
            self._held[name] = line
            for known in (self._held, self._shown_at):
                if len(known) > MOST:
                    known.pop(next(iter(known)))
            return None
        self._shown_at[name] = now
        self._held.pop(name, None)
        return line

    def rest(self) -> list[str]:
        """Return the last states that have not been shown."""
        held, self._held = list(self._held.values()), {}
        return held


def _name(line: str) -> str:
    """Return what the states of a bar have in common: its description without numbers."""
    return re.sub(r"[\d.?]+", "#", re.split(r"\d+%", line)[0].strip())[:40]
