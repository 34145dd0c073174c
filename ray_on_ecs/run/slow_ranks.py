"""Slow ranks: those that the others wait for in collectives, by the times at which the ranks join these.

Step times do not show the slow rank: in synchronous training each rank is as slow as the slowest. But all others wait,
and the slow rank does not. So the waiting of each rank in the last half minute is added up, from when it joins a
collective to when the last rank does. A rank that itself waits for the slow one, as in another process group, is late
without being slow.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from itertools import pairwise

from ray_on_ecs.run.collectives import Reading
from ray_on_ecs.run.group import Place
from ray_on_ecs.tracking.slow_ranks import SlowTime, Wait

logger = logging.getLogger(__name__)

# Evidence: so many collectives, over such a time, and so many waits that are at least this share of the longest. Rank 0
# validates and saves for all every so many steps, which the others have to wait for; another rank needs fewer waits.
MIN_COLLECTIVES, MIN_SECONDS, MIN_WAITS, MIN_WAITS_OF_OTHERS = 200, 20.0, 20, 6
COUNTED_SHARE = 0.25
# The window is as long, or longer for slow steps. A rank is named once it has been slow for the second time.
WINDOW_SECONDS, HOLD_SECONDS = 30.0, 20.0
# This share of all waiting is for the slow rank; of that, the longest 90 % count. On busy CPUs all ranks wait for each
# other between the waits for the slow one.
LAST_SHARE, LONG_SHARE = 0.6, 0.9
# The others wait for it this share of the time; an episode is over below the second one.
WAIT_SHARE, OVER_SHARE = 0.1, 0.05
# Between nodes, only what is longer counts as a wait: clocks are known to 5 ms, and counters are read every 10 ms.
MARGIN_SECONDS = 0.015
# The sends and receives for each collective from which on ranks count as stages of a pipeline, which wait by design.
PIPELINE = 0.05
# A look at the ranks, and the share of the driver's time that looks may take.
LOOK_SECONDS, LOOK_SHARE = 4.0, 0.02
# The arrivals that are compared at once, or the collectives of many ranks; and how long one waits for all its arrivals.
MOST_ARRIVALS, MOST_COLLECTIVES, PENDING_SECONDS = 40_000, 500, 600.0
SHOWN_RANKS = 8

Interval = tuple[float, float]


@dataclass(frozen=True)
class Collective:
    """A collective that all ranks of its group have joined, and when each of them joined it (Unix time)."""

    group: str
    sequence: int
    arrivals: Mapping[int, float]

    @cached_property
    def first(self) -> float:
        """The time at which the first rank joined it."""
        return min(self.arrivals.values())

    @cached_property
    def last(self) -> float:
        """The time at which the last rank joined it."""
        return max(self.arrivals.values())

    def wait_for(self, ranks: frozenset[int]) -> float:
        """Return how long the others wait for the last of these ranks, in seconds; less than 0 if they don't."""
        others = [at for rank, at in self.arrivals.items() if rank not in ranks]
        own = [at for rank, at in self.arrivals.items() if rank in ranks]
        return max(own) - max(others) if own and others else 0.0


@dataclass(frozen=True)
class Slow:
    """Ranks that the others wait for: one, or all those of a node."""

    ranks: frozenset[int]
    last_share: float  # of the waiting that is for one of them
    wait_share: float  # of the time that the others wait for them


def waits_of(collectives: Sequence[Collective], margin: float = 0.0) -> dict[int, float]:
    """Return the share of the time that each rank waits in these collectives, longer than a margin in each."""
    waits: dict[int, list[Interval]] = {}
    covered: list[Interval] = []
    for each, following in pairwise(sorted(collectives, key=lambda each: (each.group, each.sequence))):
        if (each.group, each.sequence + 1) == (following.group, following.sequence):
            covered.append((each.first, following.first))
            for rank, at in each.arrivals.items():
                waits.setdefault(rank, []).append((at, max(each.last - margin, at)))
    seconds = _length(covered)
    return {rank: min(_length(spans) / seconds, 1.0) for rank, spans in waits.items()} if seconds > 0 else {}


def find(
    collectives: Sequence[Collective],
    units: Iterable[frozenset[int]],
    wait_share: float,
    margin: float,
) -> Slow | None:
    """Return the slow one of some units, such as the ranks of a node; None without one, or with too little evidence.

    The others must wait for it for this share of the time; of each wait, the margin in seconds does not count.
    """
    if len(collectives) < MIN_COLLECTIVES:
        return None
    if max(each.last for each in collectives) - min(each.first for each in collectives) < MIN_SECONDS:
        return None
    waits = waits_of(collectives, margin)
    fewest = min(waits, key=lambda rank: waits[rank], default=None)
    unit = next((unit for unit in units if fewest in unit), frozenset())
    if _gap(waits, unit) <= wait_share:
        return None
    shared = [each for each in collectives if not each.arrivals.keys().isdisjoint(unit)]
    for_unit = [each.wait_for(unit) - margin for each in shared]
    for_others = [_wait(each) - margin for each in shared]
    long = _longest([max(each) for each in zip(for_unit, for_others, strict=True)])
    waited = [wait for number, wait in long.items() if for_unit[number] > 0]
    counted = [wait for wait in waited if wait >= COUNTED_SHARE * max(waited)]
    if len(counted) < (MIN_WAITS if 0 in unit else MIN_WAITS_OF_OTHERS):
        return None
    last_share = sum(waited) / sum(long.values())
    return Slow(unit, last_share, _gap(waits_of(collectives), unit)) if last_share > LAST_SHARE else None


def _gap(waits: Mapping[int, float], unit: frozenset[int]) -> float:
    """Return how much more all other ranks wait than each of a unit; 0 without others."""
    outside = [share for rank, share in waits.items() if rank not in unit]
    inside = [share for rank, share in waits.items() if rank in unit]
    return min(outside) - max(inside) if inside and outside else 0.0


def _wait(collective: Collective) -> float:
    """Return how long the last rank but one waits for the last one, in seconds."""
    *_, before, last = sorted(collective.arrivals.values())
    return last - before


def _longest(waits: Sequence[float]) -> dict[int, float]:
    """Return the longest waits that make up most of the waiting, by their number."""
    longest: dict[int, float] = {}
    rest = LONG_SHARE * sum(wait for wait in waits if wait > 0)
    for number, wait in sorted(enumerate(waits), key=lambda each: each[1], reverse=True):
        if wait <= 0 or rest <= 0:
            break
        longest[number] = wait
        rest -= wait
    return longest


def _length(intervals: list[Interval]) -> float:
    """Return the length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return total


class SlowRanks:
    """Looks for slow ranks during one start of the scripts; prints a line when it finds one, and when that is over.

    Args:
        times: To which each time with a slow rank is added, for the run's record.

    Attributes:
        waits: How much each rank waits, by rank; of many, the ranks that wait least.
    """

    def __init__(self, times: list[SlowTime]) -> None:
        self.waits: list[Wait] = []
        self._times = times
        self._slow: Slow | None = None
        self._found: tuple[frozenset[int], float] | None = None  # and since when
        self._collectives: list[Collective] = []
        self._pending: dict[tuple[str, int, tuple[int, ...]], dict[int, float]] = {}
        self._numbers: dict[int, int] = {}  # of the last reading, by rank
        self._pipelined: set[int] = set()
        self._nodes: dict[int, str] = {}  # by rank
        self._names: dict[int, str] = {}  # of the node, by rank
        self._clocks: dict[int, float] = {}  # by rank
        self._steps: list[tuple[float, int]] = []
        self._look_at = 0.0

    def take(self, reading: Reading, place: Place, clock: float) -> None:
        """Take a rank's reading from its place; `clock` is how far its node's clock is behind, at most."""
        rank, node = reading.rank, place.node_id
        self._nodes[rank] = node
        self._names[rank] = ", ".join(filter(None, (reading.instance, place.host if place.node_id else "")))
        self._clocks[rank] = clock
        if self._numbers.get(rank) == reading.number:
            return
        self._numbers[rank] = reading.number
        self._pipelined.discard(rank)
        if reading.p2p > PIPELINE * len(reading.arrivals):
            self._pipelined.add(rank)
        of_node = [self._clocks[other] for other, its_node in self._nodes.items() if its_node == node]
        offset = min(of_node) if len(set(self._nodes.values())) > 1 else 0.0
        for group, sequence, at in reading.arrivals:
            self._arrive(group, reading.groups.get(group, ()), sequence, rank, at + offset)

    def _arrive(self, group: str, ranks: tuple[int, ...], sequence: int, rank: int, at: float) -> None:
        if len(ranks) < 2 or rank not in ranks:
            return
        key = (group, sequence, ranks)
        arrivals = self._pending.setdefault(key, {})
        arrivals[rank] = at
        if len(arrivals) == len(ranks):
            del self._pending[key]
            self._collectives.append(Collective(f"{group} {ranks}", sequence, arrivals))

    def look(self, now: float, step: int | None) -> None:
        """Look for a slow rank; the step is where the script is, if it says so."""
        if now < self._look_at or not self._numbers:
            return
        began = time.monotonic()
        self._forget(now)
        if step is not None:
            self._steps = [(at, of) for at, of in self._steps if at > now - WINDOW_SECONDS and of <= step]
            self._steps.append((now, step))
        self._note_waits()
        found = self._find()
        if self._slow and (found is None or found.ranks != self._slow.ranks):
            logger.info(f"the others no longer wait for {self._describe(self._slow)}")
            self.end(now)
        if found is None or self._found is None or found.ranks != self._found[0]:
            self._found = (found.ranks, now) if found else None
        elif not self._slow and now - self._found[1] >= HOLD_SECONDS:
            self._slow = found
            line = f"{self._describe(found)} {self._how(found)}"
            logger.warning(line)
            self._times.append({"since": _iso(now), "until": None, "what": line})
        self._look_at = now + max(LOOK_SECONDS, (time.monotonic() - began) / LOOK_SHARE)

    def end(self, now: float) -> None:
        """End the episode that is under way."""
        if self._slow:
            self._slow = None
            self._times[-1]["until"] = _iso(now)

    def _note_waits(self) -> None:
        shares = waits_of(self._collectives)
        least = sorted(sorted(shares, key=lambda rank: shares[rank])[:SHOWN_RANKS])
        self.waits = [{"rank": rank, "node": self._names[rank], "share": round(shares[rank], 3)} for rank in least]

    def _forget(self, now: float) -> None:
        """Forget what is older than the window, or more than the evidence needs."""
        self._pending = {key: at for key, at in self._pending.items() if max(at.values()) > now - PENDING_SECONDS}
        self._collectives.sort(key=lambda each: each.last)
        kept = self._collectives[-max(MOST_ARRIVALS // len(self._numbers), MOST_COLLECTIVES) :]
        since = kept[-1].last - WINDOW_SECONDS if kept else now  # the readings are up to half a minute old
        recent = [each for each in kept[:-MIN_COLLECTIVES] if each.last > since]
        self._collectives = recent + kept[-MIN_COLLECTIVES:]

    def _find(self) -> Slow | None:
        for collectives in _independent(self._collectives):
            ranks = sorted({rank for each in collectives for rank in each.arrivals})
            if not self._pipelined.isdisjoint(ranks):
                continue
            names = dict.fromkeys(self._nodes[rank] for rank in ranks)
            of_nodes = [frozenset(rank for rank in ranks if self._nodes[rank] == name) for name in names]
            margin = MARGIN_SECONDS if len(of_nodes) > 1 else 0.0
            for units in ([frozenset([rank]) for rank in ranks], of_nodes):
                share = OVER_SHARE if self._slow and self._slow.ranks in units else WAIT_SHARE
                if slow := find(collectives, units, share, margin):
                    return slow
        return None

    def _describe(self, slow: Slow) -> str:
        """Return the ranks with their node: `rank 5 (i-0abc, 10.0.2.7)`."""
        ranks = sorted(slow.ranks)
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        node = self._names[ranks[0]]
        return f"{who} ({node})" if node else who

    def _how(self, slow: Slow) -> str:
        come, them = ("comes", "it") if len(slow.ranks) == 1 else ("come", "them")
        last = f"{come} last to the collectives: {100 * slow.last_share:.0f} % of the waiting is for {them}"
        if len(self._steps) > 1 and self._steps[-1][1] > self._steps[0][1]:
            (began, first), (ended, latest) = self._steps[0], self._steps[-1]
            step = 1000 * (ended - began) / (latest - first)
            return f"{last}, {slow.wait_share * step:.0f} of {step:.0f} ms a step"
        return f"{last}, {100 * slow.wait_share:.0f} % of the time"


def _independent(collectives: Sequence[Collective]) -> list[list[Collective]]:
    """Return the collectives of ranks that wait for each other, at once or by way of others."""
    parts: list[set[int]] = []
    for ranks in {each.group: each.arrivals.keys() for each in collectives}.values():
        joined = [part for part in parts if not part.isdisjoint(ranks)]
        parts = [part for part in parts if part.isdisjoint(ranks)] + [set(ranks).union(*joined)]
    return [[each for each in collectives if next(iter(each.arrivals)) in part] for part in parts]


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
