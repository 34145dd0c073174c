"""Limits of a run, in hours of running time and in dollars over all its commands.

Running time begins with the first start of a command's scripts, and goes on while its workers have their places: the
wait for workers does not count. Dollars count the instances with workers, each at its price of the moment. The run's
status has both, and its next command goes on from there, however this one has ended.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from ray_on_ecs.cluster_info import ClusterInfo, read_cluster_info
from ray_on_ecs.config import RunConfig
from ray_on_ecs.errors import LimitReached, UsageError, one_line
from ray_on_ecs.flags import flag
from ray_on_ecs.periodic import run_every
from ray_on_ecs.pools import listed
from ray_on_ecs.run.files.newest import newest_stored
from ray_on_ecs.run.instance_hours import InstanceHours
from ray_on_ecs.run.supervisor import GRACE_SECONDS
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.tracking.cost import InstanceKind, hourly_prices, labelled, recent_spot_prices
from ray_on_ecs.tracking.run_record import RunRecord, Spent

logger = logging.getLogger(__name__)

# The scripts are told so long before the limit, as before a Spot interruption, or a quarter of a shorter limit.
NOTICE_SECONDS, NOTICE_SHARE = 90.0, 0.25
# Of these, the last files are stored in the last seconds.
MARGIN_SECONDS = 5.0
POLL_SECONDS = 10.0
# A driver writes its status every 10 s. If its storage has not taken it for longer than an hour, the driver was dead,
# and a file that is newer than that has been copied or changed since.
LONGEST_UNWRITTEN_SECONDS = 3600.0
EXCLUDED = "without the head, disks, traffic and idle instances"


@dataclass(frozen=True)
class Count:
    """One limit, and what the run has spent of it: hours at 1 an hour, or dollars. Its name is that of the setting."""

    name: str
    unit: str
    most: float
    spent: float
    hourly: float

    @property
    def notice_seconds(self) -> float:
        """The time between the notice and the limit, in seconds."""
        if not self.hourly:
            return 0.0
        return min(NOTICE_SECONDS, NOTICE_SHARE * self.most / self.hourly * 3600)

    @property
    def left_seconds(self) -> float:
        """The remaining seconds; negative beyond the limit."""
        left = self.most - self.spent
        if not self.hourly:
            return math.inf if left > 0 else 0.0
        return left / self.hourly * 3600

    @property
    def is_due(self) -> bool:
        """True from the notice on."""
        return self.left_seconds <= self.notice_seconds

    @property
    def end_seconds(self) -> float:
        """The seconds that the scripts have; at a late look as many as after SIGTERM."""
        margin = min(MARGIN_SECONDS, self.notice_seconds / 4)
        return max(self.left_seconds - margin, min(GRACE_SECONDS, self.notice_seconds / 2))


def counts(config: RunConfig, spent: Spent) -> list[Count]:
    """Return the limits that a run has."""
    hours = Count("max_hours", "hours of running time", config.max_hours, spent["seconds"] / 3600, 1.0)
    usd = Count("max_usd", "USD", config.max_usd, spent["usd"], spent["hourly_usd"])
    return [each for each in (hours, usd) if each.most]


def describe(config: RunConfig) -> str:
    """Return the limits in words; empty if there is none."""
    hours = [f"{config.max_hours:.15g} h of running time"] * bool(config.max_hours)
    return " or ".join([*hours, *[f"{config.max_usd:.15g} USD, {EXCLUDED}"] * bool(config.max_usd)])


def reached(config: RunConfig, spent: Spent) -> LimitReached | None:
    """Return the error of a run that has reached a limit, or will within the time of a notice; else None."""
    due = [each for each in counts(config, spent) if each.is_due]
    if not due:
        return None
    first, name = due[0], flag(due[0].name)
    higher = {each.name: float(f"{each.spent + each.most:.3g}") for each in due}
    error = LimitReached(
        f"{name} {first.most:.15g} is reached: the run has spent {first.spent:,.2f} {first.unit}; the same command "
        f"with --run-name {config.run_name} and a higher limit, as {name} {higher[first.name]:.15g}, resumes it"
    )
    error.next_command = replace(config, **higher).next_command()
    return error


def check_prices(info: ClusterInfo | None, kinds: Collection[str]) -> None:
    """Raise UsageError for --max-usd if the price of an instance that the run may get is not known.

    Args:
        info: The stack's workers; None without a stack, and if they can't be read.
        kinds: The kinds of node that can hold the run; none if it may use all.
    """
    way_on = "limit the run by --max-hours, and leave --max-usd out or give 0"
    if info is None:
        raise UsageError(f"--max-usd: the prices of this cluster's instances are not known; {way_on}")
    prices = info["prices"] or {}
    types = {each for kind in kinds or info["groups"] for each in info["groups"][kind]["types"]}
    unknown = sorted(types - prices.keys())
    if unknown:
        raise UsageError(f"--max-usd: the price of {listed(unknown)} is not known; {way_on}")


def spent_before(config: RunConfig, storage: RunStorage) -> Spent:
    """Return what the commands before this one have spent.

    A driver that died may have failed to write its status for a while before. The scripts ran on at least until their
    last checkpoint or file; what they have done since is lost.

    Raises:
        OSError: The storage can't be read.
    """
    spent: Spent = {"seconds": 0.0, "usd": 0.0, "hourly_usd": 0.0}
    with suppress(LookupError, TypeError, UsageError, ValueError):  # a missing or broken document has no totals
        status = storage.read_json(layout.STATUS)
        numbers = {key: float(status["spent"][key]) for key in ("seconds", "usd", "hourly_usd")}
        spent = {**spent, **{key: max(number, 0.0) for key, number in numbers.items() if math.isfinite(number)}}
        if status["state"] in layout.UNDER_WAY:
            written, kept = storage.listing().files[layout.STATUS].mtime_ns / 1e9, newest_stored(config, storage)
            changed = min(kept.changed_at.timestamp(), time.time()) if kept else written
            more = changed - written if 0.0 < changed - written <= LONGEST_UNWRITTEN_SECONDS else 0.0
            spent["seconds"] += more
            spent["usd"] += more * spent["hourly_usd"] / 3600
    return spent


def check(config: RunConfig, storage: RunStorage, record: RunRecord) -> None:
    """Let a record go on from what the commands before have spent; the caller holds the run's lock.

    Raises:
        LimitReached: The run has reached a limit.
        OSError: The storage can't be read.
    """
    before = spent_before(config, storage)
    record.spent = lambda: before
    if error := reached(config, before):
        record.end_dead(error)
        raise error


class Money(NamedTuple):
    """Dollars up to a moment (monotonic time), and how they go on."""

    usd: float
    hourly_usd: float
    at: float
    goes_on: bool


class Limit:
    """Account of a run, which goes on from its commands before, and its limits.

    The driver's thread counts the time, and another one the dollars.
    """

    def __init__(
        self,
        config: RunConfig,
        before: Spent,
        hours: InstanceHours,
        prices: Callable[[Collection[InstanceKind]], Mapping[InstanceKind, float]] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._hours, self._now = config, hours, now
        self._prices = prices or Prices().read
        self._seconds = before["seconds"]
        self._counted_at: float | None = None  # while the time is running
        self._priced: dict[InstanceKind, float] = {}
        self._money = Money(before["usd"], before["hourly_usd"], now(), False)

    def count(self, *, is_running: bool) -> None:
        """Add the time since the last call if it was running then."""
        now = self._now()
        if self._counted_at is not None:
            self._seconds += now - self._counted_at
        self._counted_at = now if is_running else None

    @contextmanager
    def watching(self) -> Generator[None]:
        """Count the dollars until the block ends."""
        try:
            with run_every(POLL_SECONDS, self.look, "limit"):
                yield
        finally:
            self.look()
            self._money = self._money._replace(usd=self.spent()["usd"], goes_on=False)

    def look(self) -> None:
        """Add the cost of the instances' hours since the last look, at the prices at hand."""
        money, now = self._money, self._now()
        hours, held = dict(self._hours.by_kind), self._hours.most(0.0)
        try:
            prices = self._prices({*hours, *held})
        except Exception as cause:  # AWS's answers must not end a run, and the last rate goes on
            logger.debug(f"the cost is not known: {one_line(cause)}")
            if bool(held) != money.goes_on:
                self._priced = hours if money.goes_on else self._priced  # what the rate has counted is not priced again
                self._money = Money(self.spent()["usd"], money.hourly_usd, now, bool(held))
            return
        usd = sum((count - self._priced.get(kind, 0.0)) * prices[kind] for kind, count in hours.items())
        self._priced = hours
        hourly = sum(count * prices[kind] for kind, count in held.items())
        self._money = Money(money.usd + usd, hourly or money.hourly_usd, now, bool(hourly))

    def spent(self) -> Spent:
        """Return what all commands of the run have spent by now."""
        now, money, counted_at = self._now(), self._money, self._counted_at
        more = (now - money.at) * money.hourly_usd / 3600 if money.goes_on else 0.0
        return {
            "seconds": self._seconds + (0.0 if counted_at is None else now - counted_at),
            "usd": money.usd + more,
            "hourly_usd": money.hourly_usd,
        }

    @property
    def end_seconds(self) -> float:
        """The seconds that scripts have if they are told now; infinity without a limit."""
        return min((each.end_seconds for each in counts(self._config, self.spent())), default=math.inf)

    def error(self) -> LimitReached | None:
        """Return the error of the run if it has reached a limit."""
        return reached(self._config, self.spent())


class Prices:
    """Prices of instances in dollars an hour: the current one, the last known one, or the on-demand price.

    An instance without any, of a type that the stack has got since, counts as the most expensive one of the stack.
    """

    def __init__(self) -> None:
        self._known: dict[InstanceKind, float] = {}
        self._on_demand: Mapping[str, float] = {}

    def read(self, kinds: Collection[InstanceKind]) -> dict[InstanceKind, float]:
        """Return the price of each kind of instance.

        Raises:
            LookupError: The stack has had no price at all yet.
        """
        if kinds and (info := read_cluster_info()):
            names = {kind: labelled(kind, info) for kind in kinds}
            found = hourly_prices(info, {*names.values()}, recent_spot_prices)
            self._on_demand = info["prices"] or self._on_demand
            for kind, name in names.items():
                known = found.get(name), self._known.get(kind), self._on_demand.get(name.instance_type or "")
                if prices := [price for price in known if price is not None]:  # 0 in a Capacity Block
                    self._known[kind] = prices[0]
        highest = max([*self._known.values(), *self._on_demand.values()], default=0.0)
        if kinds and not (self._known or self._on_demand):
            raise LookupError("the stack has no prices")
        return {kind: self._known.get(kind, highest) for kind in kinds}
