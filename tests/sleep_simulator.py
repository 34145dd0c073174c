"""Simulator of a head that sleeps: its users, what it publishes, and what must hold in each history.

A history follows from its seed: users, faults, and the readings that AWS's documents leave open (tests/sleep_aws.py).
The head is a model of its side of the design: its idle time, its protection, its desk. Nothing here has a wall clock,
as nothing sends a time. `python -m tests.sleep_numbers` prints the tables of docs/design/sleep.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.sleep_aws import (
    ACTION_SECONDS,
    AGAIN_SECONDS,
    DAY,
    GRID,
    HOUR,
    MINUTE,
    NEVER,
    STOP_SECONDS,
    UNUSED_SECONDS,
    Aws,
    Design,
    Events,
    Faults,
    Task,
)

WORKERS_SECONDS = 30 * MINUTE  # they stay after a run
# Until the head notices a connection; protects a task with a run, and releases it; publishes a late data point.
LOOK_SECONDS, PROTECT_SECONDS, RELEASE_SECONDS, LATE_SECONDS = 10, 10, 120, 150
# A protected task whose head can't publish for so long may stop with a run.
SILENT_SECONDS = 10 * MINUTE
# After the faults and the request.
ACCEPTED_SECONDS = 20 * MINUTE


@dataclass
class Job:
    """Run with its request, or a job that is started in a shell: nothing starts that one again."""

    seconds: float
    with_workers: bool = True
    is_run: bool = True
    client_dies: bool = False
    put_at: float = NEVER
    accepted_at: float = NEVER
    began_at: float = NEVER


def draw_visits(events: Events, design: Design) -> list[tuple[float, str]]:
    """Draw the times at which users come, and why."""
    random, time, visits = events.random, events.random.uniform(0, HOUR), list[tuple[float, str]]()
    for _ in range(random.randint(1, 4)):
        visits.append((time, draw_kind(events)))
        longest = random.choice((10 * MINUTE, 2 * design.minutes * MINUTE, 4 * HOUR))
        time += random.uniform(0, longest)
    return visits


def draw_kind(events: Events) -> str:
    """Draw the reason of a visit."""
    return events.random.choices(("run", "wake", "shell"), (6, 1, 2))[0]


def draw_faults(events: Events, last_visit: float) -> Faults:
    """Draw faults until some time, of a fifth of the histories none."""
    random, until = events.random, events.random.uniform(0, 1.5 * (last_visit + HOUR))
    if events.chance(0.2):
        return Faults()
    begins = [random.uniform(0, until) for _ in range(random.randint(0, 2))]
    return Faults(
        until=until,
        lossy=random.choice((0.0, 0.1, 0.5)),
        late=random.choice((0.0, 0.1, 0.5)),
        outages=tuple((begin, min(until, begin + random.uniform(1, 30) * MINUTE)) for begin in begins),
        kills=tuple(random.uniform(0, until) for _ in range(random.randint(0, 2))),
    )


class History:
    """One history.

    Attributes:
        broken: The properties that it breaks, with the first time.
        seen: What happened, counted; "longest" ones in seconds.
        used: Times from and to of runs, jobs and connections.
        way_to_sleep: Seconds from enough idle time to the end of the last instance.
        runs: The runs whose requests are put.
        triggers, woken: Reasons for a wake, and wakes.
        raced: Sleeps of a head that was idle for long enough before, and no longer is.
    """

    def __init__(
        self, seed: int, design: Design | None = None, visits: Sequence[tuple[float, str]] = (), *, ambushes: int = 2
    ) -> None:
        self.events, self.design = Events(seed), design or Design()
        self.visits = visits or draw_visits(self.events, self.design)
        self.faults = Faults() if visits else draw_faults(self.events, self.visits[-1][0])
        self.aws = Aws(self.events, self.design, self.faults, self)
        self.broken: dict[str, str] = {}
        self.seen: Counter[str] = Counter()
        self.used: list[tuple[float, float]] = []
        self.way_to_sleep = 0.0
        self._ambushes, self._outages = ambushes, [*self.faults.outages]
        self.runs: list[Job] = []
        self._lost: list[Job] = []
        self._wakes: list[float] = []
        self._ups: list[tuple[float, float]] = []
        self._visitors: list[Callable[[], None]] = []  # who wait for a head
        self._busy_until = -NEVER
        self._active_at = 0.0  # the last work, request, or begin of a head
        # The last moment at which the head was idle for long enough, and at which CloudWatch heard of it, which may be
        # later; the first request since then, and the first publication of a busy head since the last sleep.
        self._enough_at = self._breach_at = self._requested_at = -NEVER
        self._told_at = NEVER
        self.triggers = self.raced = self.woken = 0

    @property
    def now(self) -> float:
        return self.events.now

    def play(self) -> History:
        """Let the history happen, until all is asleep."""
        if self.events.chance(0.5):
            self.aws.be_awake()
        for time, kind in self.visits:
            self.events.at(time, self._visit, kind)
        for time in self.faults.kills:
            self.events.at(time, self._kill)
        if not self.events.play(until=self.visits[-1][0] + self.faults.until + DAY):
            self._fail("never asleep")
        self._check_end()
        return self

    def _fail(self, what: str, detail: str = "") -> None:
        self.broken.setdefault(what, f"at {self.now:.0f} s: {detail}")

    # Users

    def _visit(self, kind: str) -> None:
        {"run": self._request_run, "wake": self._wake, "shell": self._open_shell}[kind]()

    def _request_run(self) -> None:
        """Publish, and then put the request; the client may die after either."""
        random, chance = self.events.random, self.events.chance
        run = Job(_length(self.events, 3 * HOUR), with_workers=chance(0.6), client_dies=chance(0.15))
        steps = [self._publish_request, lambda: self._put(run)]
        if not self.design.publishes_first:
            steps.reverse()
        self.triggers += 1
        steps[0]()
        if chance(0.9):
            self.events.at(self.now + random.uniform(0.2, 3), steps[1])

    def _publish_request(self) -> None:
        self._note_idle()
        self._active_at = self.now
        if self._requested_at <= self._enough_at:
            self._requested_at = self.now
        self.aws.put_request()

    def _put(self, run: Job) -> None:
        self._note_idle()
        run.put_at = self.now
        self.runs.append(run)
        if not run.client_dies:
            self.events.at(self.now + MINUTE, self._repeat, run)
        if task := self._task():
            self.events.within((0.5, 2), self._accept, task)

    def _repeat(self, run: Job) -> None:
        if run.accepted_at == NEVER:
            self._publish_request()
            self.events.at(self.now + MINUTE, self._repeat, run)

    def _wake(self) -> None:
        self.triggers += 1
        self._wakes.append(self.now)
        self._publish_request()

    def _open_shell(self) -> None:
        if self._task():
            self._connect()
        else:
            self._wake()
            self._visitors.append(self._connect)

    def _connect(self) -> None:
        """Open a shell or the dashboard, and perhaps start a job there."""
        seconds, task = _length(self.events, HOUR), self._task()
        if task:
            self._be_busy(seconds)
            self.used.append((self.now, self.now + seconds))
            if self.events.chance(0.4):
                self._begin(task, Job(seconds, with_workers=False, is_run=False))

    # The head

    def _task(self) -> Task | None:
        """Return the head's task if it is up."""
        return self.aws.task if self.aws.task and self.aws.task.state == "up" else None

    def _is_busy(self) -> bool:
        return self.now < self._busy_until or bool(self._lost) or any(run.accepted_at == NEVER for run in self.runs)

    def _idle_minutes(self) -> float:
        task = self._task()
        if not task or self._is_busy():
            return 0.0
        return (self.now - max(task.up_at, self._busy_until)) / MINUTE

    def _note_idle(self) -> None:
        if self._idle_minutes() >= self.design.minutes:
            self._enough_at = self.now

    def _be_busy(self, seconds: float) -> None:
        self._note_idle()
        self._busy_until = max(self._busy_until, self.now + seconds)

    def comes_up(self, task: Task) -> None:
        self._busy_until, self._active_at = -NEVER, self.now
        self._ups.append((self.now, NEVER))
        self.events.within((0.5, 2), self._accept, task)
        self.events.within((2, 30), self._resubmit, task)
        self.events.at(self.now + MINUTE, self._publish, task)
        for visitor in self._visitors:
            self.events.within((2, MINUTE), visitor)
        self._visitors = []

    def _accept(self, task: Task) -> None:
        if task is self._task():
            for run in self.runs:
                if run.accepted_at == NEVER:
                    run.accepted_at = self.now
                    self._begin(task, run)

    def _resubmit(self, task: Task) -> None:
        if task is self._task():
            lost, self._lost = self._lost, []
            for run in lost:
                run.seconds *= self.events.random.uniform(0.2, 1)
                self._begin(task, run)

    def _begin(self, task: Task, job: Job) -> None:
        self._be_busy(job.seconds + WORKERS_SECONDS * job.with_workers)
        job.began_at = self.now
        task.jobs.append(job)
        self.events.within((0, PROTECT_SECONDS), self._protect, task)
        self.events.at(self.now + job.seconds, self._end, task, job)

    def _protect(self, task: Task) -> None:
        if task.jobs and self.aws.count:
            task.is_protected = True

    def _end(self, task: Task, job: Job) -> None:
        if job in task.jobs:
            task.jobs.remove(job)
            self.used.append((job.began_at, self.now))
            self.events.within((RELEASE_SECONDS, RELEASE_SECONDS + PROTECT_SECONDS), self._release, task)

    def _release(self, task: Task) -> None:
        if task is self.aws.task and not task.jobs:
            self.aws.release(task)

    def _publish(self, task: Task) -> None:
        """Publish the idle time of the last look, each minute."""
        if task is not self._task():
            return
        random, is_faulty = self.events.random, self.aws.is_faulty
        if not self._is_cut_off() and not (is_faulty and self.events.chance(self.faults.lossy)):
            late = random.uniform(0, LATE_SECONDS) if is_faulty and self.events.chance(self.faults.late) else 0.0
            self.events.within((late, late + LOOK_SECONDS), self._receive, self._idle_minutes())
        self.events.at(self._next_publication(task), self._publish, task)

    def _receive(self, minutes: float) -> None:
        self.aws.put_idle(minutes)
        if minutes >= self.design.minutes:
            self._breach_at = self.now
        elif minutes < 1:
            self._told_at = min(self._told_at, self.now)
            if self.design.busy_head_requests:
                self.aws.put_request()

    def _is_cut_off(self) -> bool:
        return any(begin <= self.now < end for begin, end in self._outages)

    def _next_publication(self, task: Task) -> float:
        """Return the next minute, or a later one while data points between can't change an alarm or the count."""
        is_near = self._enough_at > self.now - 15 * MINUTE or self._idle_minutes() >= self.design.minutes - 2
        if is_near or not self.aws.count or self.design.is_flag or self.design.missing_breaches:
            return self.now + MINUTE
        idle_since = max(task.up_at, self._busy_until)
        matters_at = self._busy_until if self._is_busy() else idle_since + self.design.minutes * MINUTE
        return self.now + max(1, (matters_at - self.now) // MINUTE - 1) * MINUTE

    def stops(self, task: Task) -> None:
        """Handle SIGTERM: the head looks at the requests once more, and publishes if there is work."""
        self._check_stop(task)
        was_up = self._task() is not None
        self._lose(task)
        has_work = bool(self._lost) or any(run.accepted_at == NEVER for run in self.runs)
        if was_up and has_work and not self._is_cut_off():
            self.aws.put_request()

    def _kill(self) -> None:
        task = self.aws.task
        if task and task.state in ("starting", "up"):
            self._lose(task)
            self.seen["killed while the count is 0"] += not self.aws.count
            self.aws.gone(task)

    def _lose(self, task: Task) -> None:
        """Lose what a head has that ends."""
        self._note_idle()
        for job in task.jobs:
            self.used.append((job.began_at, self.now))
        lost = [job for job in task.jobs if job.is_run]
        task.jobs = []
        self.triggers += len(lost)
        self._lost += lost
        self._active_at = max(self._active_at, min(self._busy_until, self.now))
        self._busy_until = -NEVER
        if task.state == "up":
            self._ups[-1] = (self._ups[-1][0], self.now)

    # Properties

    @property
    def window(self) -> float:
        """Seconds after a head was idle for long enough in which its sleep may act: the documented race."""
        alarm, late = self.aws.sleep_alarm, LATE_SECONDS if self.faults.until else 0
        return LOOK_SECONDS + late + self._reaction + alarm.period * alarm.spare

    @property
    def _reaction(self) -> float:
        """Seconds in which the sleep alarm may act after a data point that it has not seen, or on it."""
        alarm, late = self.aws.sleep_alarm, ACTION_SECONDS + AGAIN_SECONDS if self.faults.until else 0
        return self.aws.lag + 2 * alarm.period + alarm.delay + late + 2 * GRID

    def about_to_sleep(self, moment: float) -> None:
        """Let a user come just before or after a sleep, and perhaps faults."""
        random, chance = self.events.random, self.events.chance
        if self._ambushes and self.aws.count and chance(0.4):
            self._ambushes -= 1
            before, after = random.choice(((15, 5), (4 * MINUTE, 10 * MINUTE)))
            self.events.at(max(self.now, moment + random.uniform(-before, after)), self._visit, draw_kind(self.events))
            if self.aws.is_faulty and chance(0.3):
                self._outages.append((self.now, min(self.faults.until, self.now + random.uniform(1, 10) * MINUTE)))
            if self.aws.is_faulty and chance(0.1):
                self.events.within((0, 2 * MINUTE), self._kill)

    def sleeps(self) -> None:
        self._note_idle()
        race, requested = self.now - self._enough_at, self.now - self._requested_at
        if race > self.window:
            self._fail("sleep without idle time", f"{race:.0f} s ago it was idle for long enough")
        if self._breach_at < self._requested_at and self._reaction < requested <= race:
            self._fail("sleep in spite of a request", f"of {requested:.0f} s ago")
        self._told_at = NEVER
        if 0 < race < NEVER:
            self.raced += 1
            which = f"longest race, {'busy' if self._task() else 'starting'}"
            self.seen[which] = max(self.seen[which], int(race))

    def wakes(self) -> None:
        task = self.aws.task
        self.woken += not task or task.state == "stopping"
        if not self.aws.instance and self.now < self.aws.ended_at + UNUSED_SECONDS[0]:
            self._fail("no instance for a wake", f"the last task ended at {self.aws.ended_at:.0f} s")

    def _check_stop(self, task: Task) -> None:
        for job in task.jobs:
            self.seen["jobs stopped in their first seconds"] += self.now <= job.began_at + PROTECT_SECONDS
            if self.now > job.began_at + PROTECT_SECONDS and not self._is_silent():
                self._fail("a job is stopped", f"that began at {job.began_at:.0f} s")

    def _is_silent(self) -> bool:
        """Return True if the head, since the count became 0, could not publish in time."""
        is_silent = self._told_at > self.now - SILENT_SECONDS
        self.seen["jobs stopped with a silent head"] += is_silent
        return is_silent

    def _check_end(self) -> None:
        for run in self.runs:
            self._check_wait("request", run.put_at, run.accepted_at)
        for moment in self._wakes:
            up_at = (max(begin, moment) for begin, end in self._ups if end > moment + MINUTE)
            self._check_wait("wake", moment, next(up_at, NEVER))
        if self._lost:
            self._fail("run without a head", f"{len(self._lost)}")
        if self.aws.count or self.aws.task or self.aws.instance:
            self._fail("never asleep", f"{self.aws.task}, {self.aws.instance}")
        if self.woken > self.triggers + self.raced:
            self._fail("more wakes than requests", f"{self.woken}")
        self._check_way_to_sleep()

    def _check_way_to_sleep(self) -> None:
        """Check the time from enough idle time to the end of the instance, after the faults.

        The next publication may share its period with the one before. Then come the alarm, the task's stop, and managed
        scaling.
        """
        alarm, idle_from = self.aws.sleep_alarm, max(self.faults.until, self._active_at)
        self.way_to_sleep = max(0.0, self.aws.gone_at - idle_from - self.design.minutes * MINUTE)
        published = 2 * MINUTE + LOOK_SECONDS
        acts = self.aws.lag + 2 * alarm.period + alarm.delay + 2 * GRID
        if self.way_to_sleep > published + acts + STOP_SECONDS + UNUSED_SECONDS[1]:
            self._fail("late sleep", f"{self.way_to_sleep:.0f} s")

    def _check_wait(self, what: str, since: float, until: float) -> None:
        wait = until - max(since, self.faults.until)
        if wait > ACCEPTED_SECONDS:
            self._fail(f"{what} without a head", f"{wait:.0f} s after {since:.0f} s and the faults")
        else:
            self.seen[f"longest {what}"] = max(self.seen[f"longest {what}"], int(wait))


def _length(events: Events, longest: float) -> float:
    return math.exp(events.random.uniform(math.log(MINUTE), math.log(longest)))
