"""Starts of a run on new workers: the parts of the time from the request for workers to the first step.

Several machines tell the time: the driver, the instance, ECS's agent and Ray's head. So a part is never negative, and
the parts add up to the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, TypedDict

# The parts in order, with the moment that ends each: EC2 launched the instance, its kernel booted, ECS began and ended
# the pull of the image, the Ray node joined, all scripts were started, and rank 0 reported or printed a step.
PARTS = {
    "alarm": "launched",
    "instance": "booted",
    "boot": "pulling",
    "image": "pulled",
    "Ray": "joined",
    "environment": "script",
    "first step": "step",
}
# The parts of a node, in which nothing is known but how long they took together, as without ECS.
OF_NODE, WORKERS = list(PARTS)[:5], "workers"
# A moment that is later than now is that of another clock, and by more than this, no moment of this start.
SKEW_SECONDS = 10.0
# A script that has neither reported nor printed a step by then never may.
FIRST_STEP_SECONDS = 1800.0
LONGEST = 1e9  # seconds of a part in a document that can be one

# Times in seconds since 1970, by the names in PARTS.
Moments = Mapping[str, float]


class Start(TypedDict):
    """One start, in `status.json` and `result.json`."""

    requested: str  # when the driver requested the workers, in UTC (ISO 8601)
    parts: dict[str, float]  # in seconds; `alarm to boot` are three that no moment divides
    is_over: bool


def moment(value: object) -> float | None:
    """Return a Unix time or an ISO 8601 time, in UTC without a zone, as a Unix time; None if it is neither."""
    try:
        seconds = float(value)  # ty: ignore[invalid-argument-type]
    except (OverflowError, TypeError, ValueError):
        try:
            time = datetime.fromisoformat(value)  # ty: ignore[invalid-argument-type]
            seconds = (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
        except (OverflowError, TypeError, ValueError):
            return None
    # Go's zero time is of the year 1; a bool is a number in Python.
    return seconds if 0 < seconds < math.inf and not isinstance(value, bool) else None


def moments_in(document: Mapping[str, object]) -> dict[str, float]:
    """Return the moments in a document, such as the labels of a node, without what is not a time."""
    found = {name: moment(document.get(name)) for name in PARTS.values()}
    return {name: time for name, time in found.items() if time is not None}


def compose(requested: float, moments: Moments, until: float) -> dict[str, float]:
    """Return the parts in seconds, which add up to the time from the request to `until`; no part is 0.

    Parts between which a moment is missing become one. A moment before the request, as of a node that was there, counts
    as the request.
    """
    end = max(requested, until)
    known = {name: time for name, time in moments.items() if time <= end + SKEW_SECONDS}
    if known.get("booted", math.inf) <= requested:  # the instance was up, and waited for its task
        known["launched"] = known["booted"] = known.get("pulling", known["booted"])
    parts: dict[str, float] = {}
    at, names = requested, list[str]()
    for part, ends_at in PARTS.items():
        names.append(part)
        if ends_at in known:
            before, at = at, min(max(known[ends_at], at), end)
            parts[_joined(names)] = at - before
            names = []
    # The part that goes on: of a node nothing is known before it has joined.
    names = [part for part in names if part in OF_NODE] or names[:1] or list(PARTS)[-1:]
    parts[_joined(names)] = parts.get(_joined(names), 0.0) + end - at
    return {name: seconds for name, seconds in parts.items() if seconds > 0}


def _joined(names: list[str]) -> str:
    """Return the name of parts that no moment divides."""
    if names == OF_NODE:
        return WORKERS
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def describe(start: Start) -> str:
    """Return the whole and the parts of a start: `7 min 52 s = alarm 1:04, …`; those shown add up to the whole."""
    exact, whole, shown = 0.0, 0, []
    for name, seconds in start["parts"].items():
        exact += float(seconds)
        part = round(exact) - whole
        whole += part
        if part:
            shown.append(f"{name} {part // 60}:{part % 60:02}")
    total = f"{whole // 60} min {whole % 60} s" + " so far" * (not start["is_over"])
    return f"{total} = {', '.join(shown)}" if shown else total


def starts_in(document: Any) -> list[Start]:
    """Return the starts in a status or a result, which another version of this program may have written."""
    found = document.get("starts") if isinstance(document, dict) else None
    return [each for each in (found if isinstance(found, list) else ()) if _is_start(each)]


def _is_start(value: Any) -> bool:
    try:
        datetime.fromisoformat(value["requested"])
        parts = [(name, float(seconds)) for name, seconds in value["parts"].items()]
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError):
        return False
    return "is_over" in value and all(isinstance(name, str) and 0 <= seconds < LONGEST for name, seconds in parts)


@dataclass(frozen=True)
class _Open:
    """A start that goes on."""

    requested: float
    is_first: bool
    moments: Mapping[str, float]

    @property
    def has_waited(self) -> bool:
        """True if it has waited for a node, or still may."""
        return self.moments.get("joined", math.inf) > self.requested

    def document(self, until: float, *, is_over: bool) -> Start:
        parts = {name: round(seconds, 2) for name, seconds in compose(self.requested, self.moments, until).items()}
        requested = datetime.fromtimestamp(self.requested, UTC).isoformat(timespec="milliseconds")
        return {"requested": requested, "parts": parts, "is_over": is_over}


class Starts:
    """The starts of a run's commands so far: the first of each, and those that waited for a node.

    The driver's thread calls the methods with the time; `documents` may be called on another thread.
    """

    def __init__(self) -> None:
        self._over: tuple[Start, ...] = ()
        self._has_begun = False
        self._open: _Open | None = None

    def follow(self, earlier: Iterable[Start]) -> None:
        """Take the starts of the commands before."""
        self._over = (*earlier, *self._over)

    @property
    def needs_places(self) -> bool:
        """True while a start waits for its workers."""
        return self._open is not None and "joined" not in self._open.moments

    @property
    def is_open(self) -> bool:
        """True while a start goes on."""
        return self._open is not None

    def request(self, now: float) -> None:
        """Begin a start; one whose scripts never began goes on instead."""
        self.end()
        if self._open:
            self._open = replace(self._open, moments={})
        else:
            self._open = _Open(now, is_first=not self._has_begun, moments={})
        self._has_begun = True

    def place(self, nodes: Iterable[Moments], now: float) -> None:
        """Take the moments of the workers' nodes, of which the last one counts; without nodes there was no wait."""
        if self._open:
            last = max(nodes, key=lambda node: node.get("joined", now), default={"joined": self._open.requested})
            self._open = replace(self._open, moments={"joined": now, **last})

    def begin_scripts(self, at: float) -> None:
        """Note the time at which all scripts had been started; a restart that has not waited for a node ends here."""
        if self._open and "script" not in self._open.moments:
            is_shown = self._open.is_first or self._open.has_waited
            self._open = replace(self._open, moments={**self._open.moments, "script": at}) if is_shown else None

    def reach_step(self, now: float) -> Start | None:
        """End the start whose scripts run, as one has made a step; return it if it has waited for a node."""
        start = self._open
        if start is None or "script" not in start.moments:
            return None
        done = replace(start, moments={**start.moments, "step": now}).document(now, is_over=True)
        self._open, self._over = None, (*self._over, done)  # in the other order, `documents` might return it twice
        return done if start.has_waited else None

    def look(self, now: float) -> None:
        """End a start whose script has run for long without a step."""
        if self._open and now - self._open.moments.get("script", now) > FIRST_STEP_SECONDS:
            self.end()

    def end(self) -> None:
        """End a start without a step, when its scripts have begun: it took until then."""
        if self._open and "script" in self._open.moments:
            done = self._open.document(self._open.moments["script"], is_over=True)
            self._open, self._over = None, (*self._over, done)

    def documents(self, now: float) -> list[Start]:
        """Return the starts, with the one that goes on."""
        over, start = self._over, self._open
        is_shown = start and (start.is_first or start.has_waited)
        return [*over, start.document(now, is_over=False)] if start and is_shown else [*over]
