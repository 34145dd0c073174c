"""Simulated runs with a limit: fake time, real account (run/limit.py), random lives of drivers, workers and prices.

A run has commands until its limit ends it. The truth is counted beside the account: each second in which workers have
places after a command's first start, and each dollar of instances. A command may end by a user, or by the death of its
driver, which loses what its status does not have yet, and whose scripts may go on for 30 s.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from ray_on_ecs.config import RunConfig
from ray_on_ecs.run.instance_hours import InstanceHours
from ray_on_ecs.run.limit import Limit, counts, reached, spent_before
from ray_on_ecs.run.supervisor import GRACE_SECONDS
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.tracking.cost import InstanceKind
from ray_on_ecs.tracking.run_record import Spent

GPU = InstanceKind("g5.xlarge", "spot", "workers")
STATUS_SECONDS, LOOK_SECONDS, HOURS_SECONDS, PRICE_SECONDS = 10.0, 10.0, 2.0, 300.0
LONGEST_LATE = 120.0
EPOCH = 1e9  # of the storage's clock, whose times have passed


@dataclass
class Outcome:
    """End of a run: truth, limits, and what may lie between the two.

    Attributes:
        seconds: How long it has run.
        usd: What its instances have cost.
        hourly_usd: The price of its instances when it was told, all together.
        notice: The longest notice (s).
        interval: The time between two checkpoints (s).
        lost: How long before deaths of its driver nothing could be stored (s), neither a checkpoint nor the time.
        lost_usd: The cost of that.
        blind: How often it died while its status could not be written.
        unwritten: For how long that was (s): a wait in it is not told from running time.
        deaths: How often its driver died.
        is_refused: True if the last command was refused at once.
    """

    seconds: float = 0.0
    usd: float = 0.0
    hourly_usd: float = 0.0
    notice: float = 0.0
    interval: float = 0.0
    lost: float = 0.0
    lost_usd: float = 0.0
    blind: int = 0
    unwritten: float = 0.0
    deaths: int = 0
    is_refused: bool = False


@dataclass
class LimitedRun:
    """One run until its limit."""

    folder: Path
    random: Random
    outcome: Outcome = field(default_factory=Outcome)
    now: float = 0.0

    def __post_init__(self) -> None:
        """Draw the run."""
        draw = self.random
        by_hours, by_usd = draw.choice([(True, False), (False, True), (True, True)])
        self.price = draw.uniform(0.2, 5.0)  # of an instance
        self.most = 4 * self.price
        self.count = draw.randint(1, 8)
        hours = 10 ** draw.uniform(-1.5, 1.0)
        self.config = RunConfig(
            run_name="mine",
            max_hours=hours if by_hours else 0.0,
            max_usd=hours * self.price * self.count * draw.uniform(0.7, 1.4) if by_usd else 0.0,
        )
        self.storage = RunStorage.open(str(self.folder), "mine")
        Path(self.storage.path()).mkdir(parents=True, exist_ok=True)
        self.interval = self.outcome.interval = draw.uniform(300.0, 1800.0)
        self.saves_in = draw.uniform(1.0, 60.0) if draw.random() < 0.7 else None  # else without a Checkpointer
        self.step_seconds = 10 ** draw.uniform(-1.0, 1.3)
        self.mean_life = hours * 3600 * draw.choice([0.2, 1.0, 10.0])  # between two disturbances

    def play(self) -> Outcome:
        """Run commands until the limit ends one."""
        while True:
            before = spent_before(self.config, self.storage)
            if reached(self.config, before):
                self._note_notice(before)
                self.outcome.is_refused = True
                return self.outcome
            if self._command(before):
                return self.outcome
            self.now += 10 ** self.random.uniform(0.0, 4.5)  # until somebody, or the head, starts it again

    def _command(self, before: Spent) -> bool:
        """Run one command; return True if it ends by the limit."""
        draw = self.random
        self.offset = draw.uniform(0.0, 1e6)  # of the monotonic clock of this machine
        self.held = 0
        hours = InstanceHours(lambda: {GPU: self.held} if self.held else {})
        limit = Limit(
            self.config, before, hours, lambda kinds: dict.fromkeys(kinds, self.price), lambda: self.now + self.offset
        )
        self.limit, self.hours, self.has_begun, self.counts = limit, hours, False, False
        self.storage_is_back = self.look_at = self.hours_at = self.recorded_at = self.saves_at = 0.0
        self.saved = -EPOCH
        hours.read(self.now + self.offset)
        ends_at = self.now + draw.expovariate(1 / self.mean_life)
        while True:
            self._wait(10 ** draw.uniform(0.0, 3.5))
            self.held = self.count
            if self._start(ends_at):
                return self._end_by_limit()
            if self.now >= ends_at:
                break
            self.held, self.counts = 0, False  # a lost node: the others are given up, and requested again
            limit.count(is_running=False)
            hours.read(self.now + self.offset)
        if draw.random() < 0.6:
            self._die()
        else:  # by its user
            self._pass(draw.uniform(0.0, GRACE_SECONDS))
            limit.count(is_running=False)
            self._close("interrupted")
        return False

    def _start(self, ends_at: float) -> bool:
        """Start the scripts until they are disturbed; return True once the limit is due."""
        draw = self.random
        begins_at = self.now + draw.uniform(5.0, 200.0)
        disturbed_at = self.now + draw.expovariate(1 / self.mean_life) * 0.7
        while self.now < min(disturbed_at, ends_at):
            self._pass(self._pause())
            if self.now >= begins_at:
                self.has_begun = True
            if self.limit.error():
                return True
            self.counts = self.has_begun
            self.limit.count(is_running=self.counts)
        return False

    def _pause(self) -> float:
        """Return the time to the next poll: mostly a second, but far from the limit it may as well be minutes."""
        draw = self.random
        near = [count.left_seconds - count.notice_seconds for count in counts(self.config, self.limit.spent())]
        if draw.random() < 0.02:
            return draw.uniform(5.0, LONGEST_LATE)
        return max(min(*near, 600.0) * draw.uniform(0.2, 0.5), draw.uniform(0.1, 2.0))

    def _end_by_limit(self) -> bool:
        """Let the scripts end: with a Checkpointer once they have saved after a step, else by SIGTERM."""
        has = self.limit.end_seconds
        self._note_notice(self.limit.spent())
        if self.saves_in is not None:
            ends_in = self.saves_in + self.step_seconds
        else:
            ends_in = has - min(GRACE_SECONDS, has / 2) + self.random.uniform(0.0, GRACE_SECONDS)
        self._pass(min(has, ends_in))
        self.limit.count(is_running=False)
        self._close("limit")
        return True

    def _note_notice(self, spent: Spent) -> None:
        self.outcome.notice = max(count.notice_seconds for count in counts(self.config, spent))
        self.outcome.hourly_usd = spent["hourly_usd"]

    def _wait(self, seconds: float) -> None:
        self.counts = False
        self._pass(seconds)

    def _pass(self, seconds: float) -> None:
        """Let time pass: the truth, and what the driver's threads and the storage do meanwhile."""
        draw, end = self.random, self.now + seconds
        while self.now < end:
            part = min(end - self.now, LOOK_SECONDS if self.held else PRICE_SECONDS)
            self.now += part
            self.outcome.seconds += part if self.counts else 0.0
            self.outcome.usd += part * self.held * self.price / 3600
            if draw.random() < part / PRICE_SECONDS:
                self.price = min(self.price * draw.uniform(0.8, 1.25), self.most)
            self._live()

    def _live(self) -> None:
        draw, now = self.random, self.now
        if now >= self.hours_at:
            self.hours.read(now + self.offset)
            self.hours_at = now + HOURS_SECONDS
        if now >= self.look_at:
            self.limit.look()
            self.look_at = now + (LOOK_SECONDS if draw.random() > 0.02 else 60.0)  # AWS answers slowly
        if now < self.storage_is_back:
            return
        if draw.random() < 0.0005:
            self.storage_is_back = now + 10 ** draw.uniform(1.0, 3.5)
            return
        if draw.random() < 0.0005:  # of the status alone
            self.recorded_at = now + 10 ** draw.uniform(1.0, 3.5)
        if now >= self.recorded_at:
            self.status = (now, self.limit.spent())
            self.recorded_at = now + STATUS_SECONDS
        if self.counts and now >= self.saves_at:
            self.saved = now
            self.saves_at = now + self.interval

    def _die(self) -> None:
        """Lose the driver; the scripts may take their 30 s."""
        self.outcome.deaths += 1
        if self.now < self.storage_is_back:
            lost = self.now - max(self.status[0], self.saved)
            self.outcome.lost += lost
            self.outcome.lost_usd += lost * self.held * self.price / 3600
        if (unwritten := self.now - self.status[0]) > 6 * STATUS_SECONDS:
            self.outcome.blind += 1
            self.outcome.unwritten += unwritten
        orphaned = self.random.uniform(0.0, GRACE_SECONDS) if self.held and self.random.random() < 0.3 else 0.0
        self.outcome.seconds += orphaned if self.counts else 0.0
        self.outcome.usd += orphaned * self.held * self.price / 3600
        self.now += orphaned
        self._store("training", *self.status)
        self._touch("checkpoints/step-000000009/checkpoint.json", self.saved)

    def _close(self, state: str) -> None:
        self.hours.read(self.now + self.offset)
        self.limit.look()
        self.held, self.counts = 0, False
        self._store(state, self.now, self.limit.spent())

    def _store(self, state: str, at: float, spent: Spent) -> None:
        Path(self.storage.path("status.json")).write_text(json.dumps({"state": state, "spent": spent}))
        self._touch("status.json", at)

    def _touch(self, name: str, at: float) -> None:
        path = Path(self.storage.path(name))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (EPOCH + at, EPOCH + at))
