"""End of a run in time and dollars, estimated from its latest steps, and its line in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from ray_on_ecs.rules import finite

# Intervals that an estimate needs, and those of which it is made, in groups: a pause is in few groups, and their median
# leaves it out. A mean of each group, as single steps may differ much.
FEWEST, RECENT, GROUPS = 5, 60, 5
# Two records are as far apart in time, so that the intervals grow with the training.
SHORTEST_SECONDS, SHARE = 1.0, 0.005
LONGEST_SECONDS = 1e9  # of an estimate in a document that can be one
# The line comes into a run's log for the first time after so long, and then with each tenth of the steps.
LOG_SECONDS, TENTHS = 300.0, 10
# A warning needs steps of so long, as the first ones often are slow, and then estimates of as long.
WARNING_SECONDS = 120.0
HOUR, DAY = 3600.0, 86400.0
# Up to these limits a time is rounded to this number of seconds.
ROUNDED = ((HOUR, 60), (10 * HOUR, 600), (2 * DAY, 3600))


@dataclass(frozen=True)
class Steps:
    """Steps of a training that are done, and all of them if their number is known."""

    step: int
    total: int | None = None


class Record(NamedTuple):
    """Steps that were done at a time (monotonic, in seconds)."""

    seconds: float
    step: int


@dataclass(frozen=True)
class End:
    """The progress of a run, and its end; unknown values are None.

    Attributes:
        step: Steps that are done.
        total: All steps.
        seconds_left: Seconds to the last step, without pauses and restarts to come.
        usd: Cost of the run's workers so far, over all commands.
        usd_at_end: Their cost at the last step.
    """

    step: int
    total: int | None = None
    seconds_left: float | None = None
    usd: float | None = None
    usd_at_end: float | None = None


def noted(records: Sequence[Record], now: float, step: int) -> Sequence[Record]:
    """Return the records of a start with another step: the first one, which tells its age, and the latest."""
    if not records:
        return (Record(now, step),)
    first, last = records[0], records[-1]
    if 2 * step < first.step + last.step:  # they begin again; the steps of a slower rank are only a bit lower
        return (Record(now, step),)
    if step <= last.step or now - last.seconds < max(SHORTEST_SECONDS, SHARE * (now - first.seconds)):
        return records
    return (first, *records[1:][-RECENT:], Record(now, step))


def end_of(
    steps: Steps, records: Sequence[Record], now: float, usd: float | None = None, hourly_usd: float | None = None
) -> End:
    """Return the end of a run.

    Args:
        steps: Its steps.
        records: Those of this start of the scripts (`noted`); empty if the scripts don't run.
        now: The time, as in the records.
        usd: The cost so far.
        hourly_usd: The cost of an hour on the instances that it has now.
    """
    total = steps.total if steps.total and steps.total >= steps.step else None
    left = _seconds_left(steps.step, total, records, now) if total else None
    at_end = None if left is None or usd is None or hourly_usd is None else usd + left / HOUR * hourly_usd
    return End(steps.step, total, left, usd, at_end)


def _seconds_left(step: int, total: int, records: Sequence[Record], now: float) -> float | None:
    recent = records[-RECENT - 1 :]
    if len(recent) <= FEWEST:
        return None
    marks = [recent[number * (len(recent) - 1) // GROUPS] for number in range(GROUPS + 1)]
    pace = median((b.seconds - a.seconds) / (b.step - a.step) for a, b in pairwise(marks))
    last = recent[-1]
    since = min(now - last.seconds, pace * max(step + 1 - last.step, 0))  # a pause does not bring the end nearer
    return max(pace * (total - last.step) - since, 0.0)


def end_in(status: Mapping[str, Any], *, is_training: bool) -> End | None:
    """Return the end in a status, which others may have written; None before the first step.

    There is not an estimate unless the run trains.
    """
    found = status.get("end")
    known = {key: finite(value) for key, value in (found if isinstance(found, dict) else status).items()}
    step, total, seconds_left, usd, usd_at_end = map(known.get, End.__annotations__)
    if step is None:
        return None
    if not is_training or seconds_left is None or not 0 <= seconds_left < LONGEST_SECONDS:
        seconds_left = usd_at_end = None
    return End(int(step), int(total) if total else None, seconds_left, usd, usd_at_end)


def words(end: End) -> str:
    """Return a line: `step 1,200 of 10,000, 3 h 10 min left, 12.40 USD so far, about 41 at the end`."""
    return ", ".join([steps(end)] + [cost(end)] * (end.usd is not None))


def steps(end: End) -> str:
    """Return the step, with all steps and the time left if they are known."""
    text = f"step {end.step:,}" + ("" if end.total is None else f" of {end.total:,}")
    return text if end.seconds_left is None or end.step == end.total else f"{text}, {duration(end.seconds_left)} left"


def cost(end: End) -> str:
    """Return the cost so far, with that at the end if it is known; empty if none is."""
    return "" if end.usd is None else f"{end.usd:,.2f} USD so far{at_end(end)}"


def at_end(end: End) -> str:
    """Return the cost at the end, after a comma; empty if it is not known, or the last step is done."""
    if end.usd is None or end.usd_at_end is None or end.step == end.total:
        return ""
    return f", about {_rounded(end.usd_at_end, end.usd)} at the end"


def duration(seconds: float) -> str:
    """Return a time in words, as exact as an estimate can be: 25 min, 3 h 10 min, 31 h, 4.2 days."""
    if seconds < ROUNDED[0][1]:
        return "under 1 min"
    for limit, unit in ROUNDED:
        rounded = round(seconds / unit) * unit
        if rounded < limit:
            hours, minutes = divmod(rounded // 60, 60)
            return " ".join([f"{hours} h"] * bool(hours) + [f"{minutes} min"] * bool(minutes))
    return f"{seconds / DAY:.1f} days"


def _rounded(number: float, least: float) -> str:
    """Return a number with two digits that count, or with two decimals if that does not show it above the least."""
    decimals = 1 - math.floor(math.log10(max(number, 0.1)))
    rounded = round(number, decimals)
    return f"{number:,.2f}" if rounded <= round(least, 2) else f"{rounded:,.{max(decimals, 0)}f}"


class EndLog:
    """Lines of a run's log about its end: now and then how far it is, and once that a limit comes before the end.

    Args:
        began: Time at which the scripts may begin (monotonic).
        max_hours: Limit of the run's hours; 0 without one.
        max_usd: Limit of its dollars; 0 without one.
    """

    def __init__(self, began: float, max_hours: float = 0.0, max_usd: float = 0.0) -> None:
        self._at = began
        self._tenth = -1
        self._max_hours, self._max_usd = max_hours, max_usd
        self._over_at: float | None = None  # since when a limit comes before the end
        self._has_warned = False

    def line(self, end: End, now: float) -> str:
        """Return the line of the end, if it is time for one."""
        if end.seconds_left is None or not end.total or end.step == end.total or now - self._at < LOG_SECONDS:
            return ""
        tenth = TENTHS * end.step // end.total
        if tenth <= self._tenth:
            return ""
        self._at, self._tenth = now, tenth
        return words(end)

    def warning(self, end: End, hours: float, now: float, began: float) -> str:
        """Return a line if a limit comes before the end, and has done so for a while.

        Args:
            end: How far the run is.
            hours: Those that the run has had.
            now: The time (monotonic).
            began: That of the first record of this start of the scripts.
        """
        over = self._over(end, hours) if now - began >= WARNING_SECONDS else []
        self._over_at = (now if self._over_at is None else self._over_at) if over else None
        if self._has_warned or self._over_at is None or now - self._over_at < WARNING_SECONDS:
            return ""
        self._has_warned = True
        return f"to its last step the run needs {'; and '.join(over)}"

    def _over(self, end: End, hours: float) -> list[str]:
        """Return each limit that comes before the end, in words."""
        at_end = 0.0 if end.seconds_left is None else hours + end.seconds_left / HOUR
        needs = (at_end, self._max_hours, "hours", "hours"), (end.usd_at_end or 0.0, self._max_usd, "USD", "usd")
        return [
            f"about {_rounded(number, most)} {unit}, and --max-{name} is {most:.15g}"
            for number, most, unit, name in needs
            if 0 < most < round(number, 2)
        ]
