"""AWS of a head that sleeps: its two alarms, its service, its task and its instance, event by event.

A history draws what AWS's documents leave open: the delays, how long an alarm evaluates its last data points again
while newer ones are missing, and which scaling activities a cooldown holds up.
https://docs.aws.amazon.com/autoscaling/application/APIReference/API_StepScalingPolicyConfiguration.html
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from heapq import heappop, heappush
from random import Random
from typing import Any, Protocol

from infra.definitions import sleep
from tests.cloudwatch_alarm import Alarm
from tests.metric_math import evaluate

MINUTE, HOUR, DAY = 60, 3600, 24 * 3600
NEVER = math.inf
DELAY_SECONDS, SKEW_SECONDS = 90, 600
# Of an action: it is executed at a multiple of GRID, with a fault later, and perhaps again.
GRID, ACTION_SECONDS, AGAIN_SECONDS = 5, 120, 60
STOP_SECONDS, PROTECTED_SECONDS = 90, 15 * MINUTE
# Managed scaling starts an instance for a pending task, and ends one without a task.
MANAGED_SECONDS, UNUSED_SECONDS = (60, 180), (15 * MINUTE, 20 * MINUTE)
BOOT_SECONDS, IMAGE_SECONDS, WARM_SECONDS, PLACING_SECONDS = (55, 135), (60, 250), (20, 60), (5, 15)


@dataclass(frozen=True, kw_only=True)
class Design:
    """Arithmetic of the two alarms, with what the head and its clients do for it; a test changes one part."""

    minutes: int = 15
    expression: str = sleep.IDLE_MINUTES
    wake_points: int = sleep.WAKE_POINTS
    is_flag: bool = False
    missing_breaches: bool = False
    sleep_ends_group: bool = False
    publishes_first: bool = True
    busy_head_requests: bool = True
    sends_times: bool = False

    @property
    def threshold(self) -> int:
        """Idle minutes of a breaching data point; of a flag, 1."""
        return 1 if self.is_flag else self.minutes


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Faults until a time: lost and late data points, outages of the head's publication, and its deaths."""

    until: float = 0.0
    lossy: float = 0.0
    late: float = 0.0
    outages: tuple[tuple[float, float], ...] = ()
    kills: tuple[float, ...] = ()


@dataclass
class Task:
    """ECS task of the head, with its jobs."""

    state: str = "pending"  # then starting, up, stopping
    up_at: float = NEVER
    is_protected: bool = False
    jobs: list[Any] = field(default_factory=list)


@dataclass
class Instance:
    """EC2 instance of the head's group."""

    launched_at: float
    ready_at: float
    has_image: bool = False


@dataclass
class Watch:
    """Alarm with its data points and policies; `acts_at` is the time of its next actions while it is active."""

    alarm: Alarm
    breaches: Callable[[int], bool | None]
    policies: tuple[Callable[[], None], ...]
    acts_at: float = 0.0


class Events:
    """Clock that goes from event to event, and chance."""

    def __init__(self, seed: int) -> None:
        self.random, self.now = Random(seed), 0.0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()

    def at(self, time: float, call: Callable[..., None], *args: Any) -> None:
        heappush(self._queue, (time, next(self._numbers), call, args))

    def within(self, seconds: tuple[float, float], call: Callable[..., None], *args: Any) -> None:
        self.at(self.now + self.random.uniform(*seconds), call, *args)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def play(self, until: float) -> bool:
        """Let events happen; return False if some are left."""
        while self._queue:
            self.now, _, call, args = heappop(self._queue)
            if self.now > until:
                return False
            call(*args)
        return True


class Head(Protocol):
    """The head and its observer, as AWS's events reach them."""

    def about_to_sleep(self, moment: float) -> None: ...
    def sleeps(self) -> None: ...
    def wakes(self) -> None: ...
    def comes_up(self, task: Task) -> None: ...
    def stops(self, task: Task) -> None: ...


class Aws:
    """CloudWatch, Application Auto Scaling, ECS and EC2 Auto Scaling of one head.

    Attributes:
        count: The service's desired count.
        woken_at: Time of the last wake that was applied.
        ended_at: The end of the last task.
        gone_at: The end of the last instance.
        paid: Seconds of instances that have ended.
    """

    def __init__(self, events: Events, design: Design, faults: Faults, head: Head) -> None:
        self.events, self.design, self.faults, self.head = events, design, faults, head
        self.count, self.woken_at = 0, -NEVER
        self.task: Task | None = None
        self.instance: Instance | None = None
        self.ended_at, self.gone_at, self.paid = -NEVER, -NEVER, 0.0
        self._group = self._sleeps = self._unused = 0
        self._scaled_in_at = self._scaled_out_at = -NEVER
        self._may_lose_action = True
        self._idle: dict[int, float] = {}
        self._requested: dict[int, float] = {}
        self._requests: set[int] = set()
        self._draw()
        if design.missing_breaches:
            events.at(self.sleep_alarm.phase, self._evaluate_always)

    def _draw(self) -> None:
        """Draw what the documents leave open."""
        random, design = self.events.random, self.design
        at_once = random.random() < 0.4
        spare = 0 if at_once else random.randint(0, 5)
        points = design.minutes if design.is_flag else 1
        self.sleep_alarm = Alarm(
            period=sleep.SLEEP_PERIOD_SECONDS,
            points=points,
            needed=points,
            spare=spare,
            at_once=at_once,
            missing_breaches=design.missing_breaches,
            phase=random.uniform(0, sleep.SLEEP_PERIOD_SECONDS),
            delay=random.uniform(0, DELAY_SECONDS),
        )
        self.wake_alarm = Alarm(
            period=sleep.WAKE_PERIOD_SECONDS,
            points=design.wake_points,
            spare=spare,
            at_once=at_once,
            phase=random.uniform(0, sleep.WAKE_PERIOD_SECONDS),
            delay=random.uniform(0, DELAY_SECONDS),
        )
        # Until a data point is visible: where a missing one counts at once, before its period is evaluated.
        self.lag = min(random.choice((0, 15, 45)), NEVER if spare else self.sleep_alarm.delay)
        self._cooldown = random.choice((0, 60, 300))
        self._in_waits, self._out_waits = random.random() < 0.5, random.random() < 0.5
        self._sleep_watch = Watch(self.sleep_alarm, self._is_idle, (self._sleep,))
        self._wake_watch = Watch(self.wake_alarm, lambda slot: slot in self._requests or None, (self._wake, self._want))

    @property
    def is_faulty(self) -> bool:
        return self.events.now < self.faults.until

    def be_awake(self) -> None:
        """Begin with a head that is up."""
        self.count, self._group, self.instance = 1, 1, Instance(0.0, 0.0, has_image=True)
        self.task = Task("starting")
        self._up(self.task)

    # CloudWatch

    def put_idle(self, minutes: float) -> None:
        """Receive the head's idle time."""
        slot = self._slot(self.sleep_alarm.period)
        self.events.within((0, self.lag), self._see_idle, slot, float(minutes > 0) if self.design.is_flag else minutes)

    def _see_idle(self, slot: int, minutes: float) -> None:
        self._idle[slot] = min(minutes, self._idle.get(slot, NEVER))
        if minutes >= self.design.threshold:
            self.events.at(self.sleep_alarm.sees(slot, self.events.now), self._evaluate, self._sleep_watch)

    def put_request(self) -> None:
        """Receive a request for the head."""
        slots = self._slot(self.sleep_alarm.period), self._slot(self.wake_alarm.period)
        self.events.within((0, self.lag), self._see_request, *slots)

    def _see_request(self, slot: int, wake_slot: int) -> None:
        self._requested[slot] = 1
        self._requests.add(wake_slot)
        self.events.at(self.wake_alarm.sees(wake_slot, self.events.now), self._evaluate, self._wake_watch)

    def _slot(self, period: int) -> int:
        skew = self.events.random.uniform(-SKEW_SECONDS, SKEW_SECONDS) if self.design.sends_times else 0.0
        return math.floor((self.events.now + skew) / period)

    def _is_idle(self, slot: int) -> bool | None:
        value = value_of(self.design.expression, self._idle.get(slot), self._requested.get(slot))
        return None if value is None else value >= self.design.threshold

    def _evaluate(self, watch: Watch) -> None:
        """Execute the actions of an alarm that becomes active, and each minute while it is."""
        now, alarm = self.events.now, watch.alarm
        if not alarm.rings(now, watch.breaches):
            watch.acts_at = 0.0
        elif self.is_faulty and self.events.chance(0.02):  # INSUFFICIENT_DATA
            watch.acts_at = 0.0
            self.events.at(now + alarm.period, self._evaluate, watch)
        elif now >= watch.acts_at or not alarm.rings(now - alarm.period, watch.breaches):
            watch.acts_at = now + MINUTE
            self.events.at(watch.acts_at, self._evaluate, watch)
            for policy in watch.policies:
                self._act(policy)

    def _evaluate_always(self) -> None:
        self._evaluate(self._sleep_watch)
        self.events.at(self.events.now + MINUTE, self._evaluate_always)

    def _act(self, policy: Callable[[], None]) -> None:
        """Execute an action; with a fault late or twice, and once not at all."""
        random, chance = self.events.random, self.events.chance
        if self.is_faulty and self._may_lose_action and chance(0.2):
            self._may_lose_action = False
            return
        delay = random.uniform(0, ACTION_SECONDS) if self.is_faulty and chance(0.2) else random.random()
        moment = math.ceil((self.events.now + delay) / GRID) * GRID
        self.events.at(moment, policy)
        if self.is_faulty and chance(0.1):
            self.events.at(moment + random.randrange(0, AGAIN_SECONDS, GRID), policy)
        if policy == self._sleep:
            self.head.about_to_sleep(moment)

    # Application Auto Scaling

    def _sleep(self) -> None:
        now = self.events.now
        waits = now < self._scaled_in_at + self._cooldown or (
            self._in_waits and now < self._scaled_out_at + self._cooldown
        )
        if not self.count or waits or self.woken_at == now:  # in the same moment, the larger capacity wins
            return
        self.head.sleeps()
        self.count, self._scaled_in_at = 0, now
        self._sleeps += 1
        if self.task and self.task.is_protected:
            # It was renewed within the last minute. ECS refuses to renew it for more tasks than the desired count.
            # https://docs.aws.amazon.com/AmazonECS/latest/developerguide/task-scale-in-protection.html
            renewed = now - self.events.random.uniform(0, MINUTE)
            self.events.at(renewed + PROTECTED_SECONDS, self._expire, self.task, self._sleeps)
        self._follow_count()
        if self.design.sleep_ends_group:
            self._group = 0
            if not self.task:
                self._end_instance()

    def _wake(self) -> None:
        now = self.events.now
        if self.count:
            self.woken_at = now
        elif not (self._out_waits and now < self._scaled_out_at + self._cooldown):
            self.woken_at = self._scaled_out_at = now
            self._scaled_in_at = -NEVER
            self.head.wakes()
            self.count = 1
            self._follow_count()

    # ECS

    def _expire(self, task: Task, sleeps: int) -> None:
        if not self.count and sleeps == self._sleeps:
            self.release(task)

    def release(self, task: Task) -> None:
        """End a task's protection."""
        task.is_protected = False
        self._follow_count()

    def _follow_count(self) -> None:
        task = self.task
        if self.count and not task:
            self.task = Task()
            self._place(self.task)
        elif not self.count and task and task.state == "pending":
            self.gone(task)
        elif not self.count and task and task.state != "stopping" and not task.is_protected:
            self.head.stops(task)
            task.state = "stopping"
            self.events.within((2, STOP_SECONDS), self.gone, task)

    def _place(self, task: Task) -> None:
        if task is not self.task or task.state != "pending":
            return
        if self.instance:
            wait = max(0.0, self.instance.ready_at - self.events.now)
            self.events.within((wait + PLACING_SECONDS[0], wait + PLACING_SECONDS[1]), self._start, task)
        else:
            self.events.within(MANAGED_SECONDS, self._manage, task)

    def _start(self, task: Task) -> None:
        if task is self.task and task.state == "pending" and self.instance:
            task.state = "starting"
            self.events.within(WARM_SECONDS if self.instance.has_image else IMAGE_SECONDS, self._up, task)

    def _up(self, task: Task) -> None:
        if task is self.task and task.state == "starting" and self.instance:
            task.state, task.up_at, self.instance.has_image = "up", self.events.now, True
            self.head.comes_up(task)

    def gone(self, task: Task) -> None:
        """End a task; ECS starts another one if the count is 1."""
        if task is not self.task:
            return
        self.task, self.ended_at = None, self.events.now
        if self.design.sleep_ends_group and not self._group:
            self._end_instance()
        self._let_unused()
        self._follow_count()

    # EC2 Auto Scaling, and ECS's managed scaling

    def _manage(self, task: Task) -> None:
        if task is self.task and task.state == "pending":
            self._want()

    def _want(self) -> None:
        self._group = 1
        if self.instance:
            return
        launched = self.events.now
        if self.is_faulty and self.events.chance(0.2):  # EC2 has no capacity
            launched = min(self.faults.until, launched + self.events.random.uniform(2, 15) * MINUTE)
        self.instance = Instance(launched, launched + self.events.random.uniform(*BOOT_SECONDS))
        self._let_unused()
        if self.task:
            self._place(self.task)

    def _let_unused(self) -> None:
        if self.instance:
            self._unused += 1
            wait = max(0.0, self.instance.ready_at - self.events.now)
            self.events.within((wait + UNUSED_SECONDS[0], wait + UNUSED_SECONDS[1]), self._scale_in, self._unused)

    def _scale_in(self, unused: int) -> None:
        if unused == self._unused and not self.task:
            self._end_instance()

    def _end_instance(self) -> None:
        if self.instance:
            self.gone_at = self.events.now
            self.paid += max(0.0, self.gone_at - self.instance.launched_at)
            self.instance, self._group = None, 0


@cache
def value_of(expression: str, idle: float | None, requested: float | None) -> float | None:
    """Return the value of the sleep alarm's expression in a period."""
    return evaluate(expression, {"idle": idle, "requested": requested})
