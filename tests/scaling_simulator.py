"""Simulator of ECS, Auto Scaling and the scaling alarms, five seconds at a time, for one kind of worker or several.

The head is the real one (ray_on_ecs/node/scaling.py), with clients of tests/scaling_api.py. `Simulator` has one kind of
worker and its own head; `Stack` has several with one head or two. AWS's documents leave open
if ECS's managed scaling counts instances that are starting: `counts_pending`. `python -m tests.scaling_simulator`
prints the table of docs/design/scaling.md.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from ray_on_ecs.cluster_info import ClusterInfo, NodeGroup
from ray_on_ecs.contract import DEFAULT_POOL, MAX_STEPS, WORKERS, scale_out_stride
from ray_on_ecs.jobs.record import SUCCEEDED, THEN_STOP, Job
from ray_on_ecs.node.demand import Need
from ray_on_ecs.node.numbers import as_alarms_see
from ray_on_ecs.node.scaling import LOOK_SECONDS, Scaler
from tests.scaling_api import EPOCH, Api, HeadDied
from tests.worker_pools import node_group, workers

TICK = 5
MINUTE = 60
# The times of the parts are estimates: their sum is not a claim about AWS, but the same with and without the head.
STARTING, REGISTERING, PLACING, PULLING, JOINING, DRAINING = 30, 60, 10, 180, 30, 45
ALARM_SECONDS, MANAGED_SECONDS = 75, 75  # from a metric to its effect
WARMUP_SECONDS = 60
MANAGED_SCALE_IN_MINUTES, IDLE_MINUTES, IDLE_PROTECTION = 15, 30, 120
BREAKER_MINUTES = 60  # three tasks, each of which waits for an instance 10 to 30 minutes


@dataclass
class Instance:
    """EC2 instance of the group, with the times of its life; infinity for what has not happened."""

    number: int
    launched_at: float
    task_at: float = math.inf  # ECS has placed its task
    used_at: float = -math.inf  # its Ray node was in use, for the protection of its task
    idle_since: float = -math.inf
    is_used: bool = False
    ending_at: float = math.inf
    kind: str = WORKERS
    instance_type: str = ""  # of a former type, on which no task fits, if it is named

    @property
    def instance_id(self) -> str:
        return f"i-{self.number}" if self.kind == WORKERS else f"i-{self.kind}-{self.number}"

    def lifecycle(self, now: float) -> str:
        if now >= self.ending_at:
            return "Terminating:Wait" if now < self.ending_at + DRAINING else "Terminated"
        return "Pending" if now < self.launched_at + STARTING else "InService"

    @property
    def registers_at(self) -> float:
        return self.launched_at + STARTING + REGISTERING

    def has_registered(self, now: float) -> bool:
        return now >= self.registers_at

    def joined_at(self) -> float:
        return self.task_at + PULLING + JOINING


@dataclass
class Run:
    """Run on a number of nodes for some seconds, from its request on."""

    nodes: int
    seconds: float
    requested_at: float = 0.0
    then_stop: bool = False
    gives_up_after: float = math.inf
    began_at: float | None = None
    ended_at: float | None = None
    on: list[Instance] = field(default_factory=list)


class Simulator:
    """One kind of worker, its service, its group and its alarms.

    Attributes:
        most: `maxWorkers`.
        runs: The runs.
        has_head_calls: False for a head that only publishes metrics, as the alarms alone have it.
        counts_pending: Managed scaling counts instances that are starting.
        stale: Seconds by which AWS's answers are old.
        shortage: EC2 has at most this many instances.
        on_call: Called with the name of each call that changes something; it may raise Lost, Refused or HeadDied.
        kind: The kind of worker, of `pool` in `zone`.
    """

    def __init__(
        self,
        most: int,
        runs: Iterable[Run],
        *,
        has_head_calls: bool = True,
        counts_pending: bool = True,
        warm: int = 0,
        least: int = 0,
        stale: float = 0,
        shortage: float = math.inf,
        on_call: Callable[[str], None] = lambda name: None,
        kind: str = WORKERS,
        pool: str = DEFAULT_POOL,
        zone: str = "us-west-2a",
    ) -> None:
        self.kind, self.pool, self.zone = kind, pool, zone
        self.most, self.least, self.runs = most, least, list(runs)
        self.counts_pending, self.stale, self.shortage = counts_pending, stale, shortage
        self.on_call = on_call
        self.now, self.count, self.capacity = 0.0, warm, warm
        self.instances = [Instance(number, -3600, task_at=-3000, kind=kind) for number in range(warm)]
        self.suspended = list[str]()
        self.looks = 0  # of the head at the service
        self.deployed_at: float | None = None  # a deployment is in progress
        self.failed_at: float | None = None  # the last deployment has failed
        self.head_until, self.head_from = math.inf, 0.0  # a head that is away from the one to the other
        self.head = self._new_head() if has_head_calls else None
        self._has_head_calls = has_head_calls
        self._pending: list[tuple[float, Callable[[], None]]] = []  # effects of alarms to come
        self._idle_minutes = self._low_minutes = 0
        self._warm_until = -math.inf
        self._answers: deque[tuple[dict[str, Any], dict[str, Any]]] = deque(maxlen=int(stale) // TICK + 1)
        self.calls: list[tuple[float, str, Any]] = []
        self.requested: int | None = None  # that the head publishes, if it is not what is needed

    def _new_head(self) -> Scaler:
        return Scaler(
            lambda: self.jobs(), lambda service: Api(self), lambda: EPOCH + self.now, self._release, lambda job: ()
        )

    def _release(self) -> None:
        for instance in self.instances:
            if not instance.is_used:
                instance.used_at = -math.inf

    @property
    def has_head(self) -> bool:
        return not self.head_until <= self.now < self.head_from

    def stay(self, seconds: float) -> Simulator:
        """Let time pass."""
        until = self.now + seconds
        while self.now < until:
            self.tick()
        return self

    def tick(self) -> None:
        """Let a tick pass."""
        self.now += TICK
        if self.stale:
            self._answers.append((self._service(), self._group()))
        due = [effect for moment, effect in self._pending if moment <= self.now]
        self._pending = [(moment, effect) for moment, effect in self._pending if moment > self.now]
        for effect in due:
            effect()
        if self.now % MINUTE == 0:
            self._publish()
            self._manage()
        self._follow_capacity()
        self._follow_deployment()
        self._follow_count()
        self._work()
        if self.has_head and self.head and self.now % LOOK_SECONDS == 0:
            try:
                self.head.look(self.info(), {self.kind: self.need()})
            except HeadDied:
                self.head_until, self.head_from = self.now, self.now + 90
                self.head = self._new_head()

    # Ray

    def nodes(self) -> list[Instance]:
        """Return the instances whose nodes have joined Ray."""
        return [instance for instance in self.instances if instance.joined_at() <= self.now < instance.ending_at]

    def waiting(self) -> list[Run]:
        return [
            run for run in self.runs if run.requested_at <= self.now and run.began_at is None and run.ended_at is None
        ]

    def need(self) -> Need:
        nodes = self.nodes()
        used = [node for node in nodes if node.is_used]
        idle = [node for node in nodes if not node.is_used]
        return Need(
            requested=len(used) + sum(run.nodes for run in self.waiting()),
            available=len(nodes),
            in_use=len(used),
            idle_seconds=tuple(self.now - max(each.idle_since, each.joined_at()) for each in idle),
        )

    def _work(self) -> None:
        for run in self.runs:
            if run.began_at is not None and run.ended_at is None and self.now >= run.began_at + run.seconds:
                self.end(run)
        for run in self.waiting():
            free = [node for node in self.nodes() if not node.is_used]
            if len(free) >= run.nodes:
                run.began_at, run.on = self.now, free[: run.nodes]
                for each in run.on:
                    each.is_used = True
            elif self.now >= run.requested_at + run.gives_up_after:
                run.ended_at = self.now
        for instance in self.instances:
            if instance.is_used:
                instance.used_at = instance.idle_since = self.now

    def end(self, run: Run) -> None:
        """End a run, and free its nodes."""
        run.ended_at = self.now
        for each in run.on:
            each.is_used = False

    def jobs(self) -> list[Job]:
        jobs: list[Job] = []
        for number, run in enumerate(self.runs):
            if run.requested_at <= self.now:
                name = f"run-{number}" if self.kind == WORKERS else f"{self.kind}-{number}"
                metadata = {"run_name": name, "storage_path": "s3://b"}
                jobs.append(
                    {
                        "submission_id": name,
                        "metadata": {**metadata, **({THEN_STOP: "true"} if run.then_stop else {})},
                        "status": "RUNNING" if run.ended_at is None else SUCCEEDED,
                        "start_time": int(1000 * (EPOCH + run.requested_at)),
                        "end_time": None if run.ended_at is None else int(1000 * (EPOCH + run.ended_at)),
                        "driver_exit_code": None if run.ended_at is None else 0,
                        "is_interrupted": False,
                    }
                )
        return jobs

    # CloudWatch and Application Auto Scaling

    def _publish(self) -> None:
        """Publish the minute's metrics, of which the alarms take notice later."""
        need = self.need() if self.has_head else Need(requested=0, available=0, in_use=0)
        if self.has_head and self.requested is not None:
            need = replace(need, requested=self.requested)
        billed = max(sum(instance.lifecycle(self.now) == "InService" for instance in self.instances), self.capacity)
        tasks = sum(instance.task_at <= self.now < instance.ending_at for instance in self.instances)
        if need.requested > need.available < self.most:
            stride = scale_out_stride(self.most)
            number = min(max(-(-max(need.requested, tasks) // stride) * stride, self.least), self.most)
            self._pending.append((self.now + ALARM_SECONDS, lambda: self._set_count(number)))
        elif need.in_use > self.count:
            self._pending.append((self.now + ALARM_SECONDS, lambda: self._set_count(need.in_use)))
        needed = max(need.in_use, min(need.requested, self.most), self.least)
        stride = max(1, -(-(self.most - self.least) // (MAX_STEPS - 1)))
        needed = self.least + -(-(needed - self.least) // stride) * stride
        self._idle_minutes = self._idle_minutes + 1 if needed < billed else 0
        if self._idle_minutes >= IDLE_MINUTES:
            self._pending.append((self.now + ALARM_SECONDS, lambda: self._set_count(needed)))

    def _set_count(self, number: int) -> None:
        self.count = number

    # ECS

    def deploy(self) -> None:
        """Begin a deployment."""
        self.deployed_at, self.failed_at = self.now, None

    def _follow_deployment(self) -> None:
        """End a deployment: with its tasks, or after the circuit breaker's number of tasks without an instance."""
        if self.deployed_at is not None:
            if sum(instance.joined_at() <= self.now < instance.ending_at for instance in self.instances) >= self.count:
                self.deployed_at = None
            elif self.now - self.deployed_at >= BREAKER_MINUTES * MINUTE:
                self.deployed_at, self.failed_at = None, self.now

    def _manage(self) -> None:
        """Managed scaling of the capacity provider, by CapacityProviderReservation."""
        counted = [instance for instance in self.instances if instance.lifecycle(self.now) in ("Pending", "InService")]
        if not self.counts_pending:
            counted = [each for each in counted if each.lifecycle(self.now) == "InService"]
        tasks = sum(instance.task_at <= self.now < instance.ending_at for instance in self.instances)
        wanted, there = max(self.count, tasks), len(counted)
        if wanted > there and self.now >= self._warm_until:
            number = wanted if there else min(2, self.most)  # from zero ECS starts two instances
            self._warm_until = self.now + MANAGED_SECONDS + WARMUP_SECONDS
            self._pending.append((self.now + MANAGED_SECONDS, lambda: self._raise_capacity(number)))
        self._low_minutes = self._low_minutes + 1 if wanted < there else 0
        if self._low_minutes >= MANAGED_SCALE_IN_MINUTES:
            self._low_minutes = 0
            empty = [each for each in counted if each.task_at > self.now]
            for each in empty[: there - wanted]:
                each.ending_at = self.now
                self.capacity -= 1

    def _raise_capacity(self, number: int) -> None:
        self.capacity = max(self.capacity, min(number, self.most))

    def _follow_count(self) -> None:
        """Place and stop tasks."""
        with_task = [
            instance for instance in self.instances if instance.task_at < math.inf and self.now < instance.ending_at
        ]
        free = [
            instance
            for instance in self.instances
            if instance.has_registered(self.now)
            and instance.task_at == math.inf
            and not instance.instance_type
            and instance.lifecycle(self.now) == "InService"
        ]
        for each in free[: max(0, self.count - len(with_task)) if self.failed_at is None else 0]:
            each.task_at = self.now + PLACING
        idle = [
            each
            for each in with_task
            if each.task_at <= self.now and not each.is_used and self.now - each.used_at > IDLE_PROTECTION
        ]
        for each in idle[: max(0, len(with_task) - self.count)]:
            each.task_at = math.inf

    # EC2 Auto Scaling

    def counted(self) -> list[Instance]:
        return [instance for instance in self.instances if not instance.lifecycle(self.now).startswith("Terminat")]

    def _follow_capacity(self) -> None:
        while len(self.counted()) < min(self.capacity, self.shortage) and "Launch" not in self.suspended:
            self.instances.append(Instance(len(self.instances), self.now, kind=self.kind))

    def end_instance(self, instance_id: str, *, decrement: bool = True) -> None:
        """Terminate an instance of the group."""
        [instance] = [instance for instance in self.instances if instance.instance_id == instance_id]
        assert not instance.is_used, f"{instance_id} ends while it is in use"
        assert instance.task_at > self.now, f"{instance_id} ends while it has a task"
        if self.now < instance.ending_at:
            instance.ending_at = self.now
        self.capacity -= decrement  # also if it ends already, which is the worst that AWS may do

    # Answers

    def info(self) -> ClusterInfo:
        return workers(**{self.kind: self.node_group()})

    def node_group(self) -> NodeGroup:
        names = {"group": f"{self.kind}-group", "provider": f"{self.kind}-provider"}
        limits = {"min": self.least, "max": self.most, "idle_minutes": IDLE_MINUTES}
        return node_group(self.pool, zone=self.zone, **limits, **names)

    def _service(self) -> dict[str, Any]:
        rollout = "COMPLETED" if self.deployed_at is None else "IN_PROGRESS"
        rollout = rollout if self.failed_at is None else "FAILED"
        ended_at = datetime.fromtimestamp(EPOCH + (self.failed_at or 0), UTC)
        return {
            "serviceName": self.kind,
            "status": "ACTIVE",
            "desiredCount": self.count,
            "deployments": [{"status": "PRIMARY", "rolloutState": rollout, "updatedAt": ended_at}],
            "capacityProviderStrategy": [{"capacityProvider": f"{self.kind}-provider", "weight": 1, "base": 0}],
        }

    def _group(self) -> dict[str, Any]:
        return {
            "AutoScalingGroupName": f"{self.kind}-group",
            "MinSize": 0,
            "MaxSize": self.most,
            "DesiredCapacity": self.capacity,
            "SuspendedProcesses": [{"ProcessName": name, "SuspensionReason": "test"} for name in self.suspended],
            "Instances": [
                {
                    "InstanceId": instance.instance_id,
                    "LifecycleState": instance.lifecycle(self.now),
                    "ProtectedFromScaleIn": True,
                    "HealthStatus": "Healthy",
                    "InstanceType": instance.instance_type,
                }
                for instance in self.instances
                if instance.lifecycle(self.now) != "Terminated"
            ],
        }

    def answers(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the service and the group as AWS describes them, which may be old."""
        return self._answers[0] if self.stale else (self._service(), self._group())

    # Results

    @property
    def started(self) -> int:
        return len(self.instances)

    def billed_minutes(self, since: float) -> float:
        """Return the instance minutes since a time."""
        ends = [min(self.now, instance.ending_at + DRAINING) for instance in self.instances]
        pairs = zip(self.instances, ends, strict=True)
        return sum(max(0.0, end - max(since, each.launched_at)) for each, end in pairs) / 60


class Stack:
    """Several kinds of worker and their head, or two that don't know of each other.

    Attributes:
        parts: The simulators by kind.
        on_tick: Called after each tick.
        pools_of: Returns the pools of a job's run, as its record has them.
    """

    def __init__(
        self,
        *parts: Simulator,
        heads: int = 1,
        on_tick: Callable[[Stack], None] = lambda stack: None,
        pools_of: Callable[[Job], Collection[str]] = lambda job: (),
    ) -> None:
        self.parts = {part.kind: part for part in parts}
        for part in parts:
            part.head = None
        self.on_tick, self.pools_of, self.now = on_tick, pools_of, 0.0
        self._heads = [self._new_head() for _ in range(heads)]
        self._head_from = 0.0

    def _new_head(self) -> Scaler:
        parts = [*self.parts.values()]
        return Scaler(
            lambda: [job for part in parts for job in part.jobs()],
            lambda service: Api(*parts),
            lambda: EPOCH + self.now,
            self._release,
            lambda job: self.pools_of(job),
        )

    def _release(self) -> None:
        for part in self.parts.values():
            part._release()

    def info(self) -> ClusterInfo:
        return workers(**{kind: part.node_group() for kind, part in self.parts.items()})

    def stay(self, seconds: float) -> Stack:
        """Let time pass."""
        until = self.now + seconds
        while self.now < until:
            seen = as_alarms_see(self.info(), {kind: part.need() for kind, part in self.parts.items()})
            for kind, part in self.parts.items():
                part.requested = seen[kind].requested
                part.tick()
            self.now += TICK
            if self.now % LOOK_SECONDS == 0 and self.now >= self._head_from:
                needs = {kind: part.need() for kind, part in self.parts.items()}
                try:
                    for head in self._heads:
                        head.look(self.info(), needs)
                except HeadDied:
                    self._heads, self._head_from = [self._new_head()], self.now + 90
            self.on_tick(self)
        return self

    def move(self, run: Run, source: str, target: str) -> None:
        """Let a run that waits for workers of one kind wait for those of another one."""
        assert run.began_at is None
        self.parts[source].runs.remove(run)
        self.parts[target].runs.append(run)


# Kinds of numbers: the head's calls, and --then-stop.
SET_BY: dict[str, tuple[bool, bool]] = {
    "alarms": (False, False),
    "head": (True, False),
    "head, `--then-stop`": (True, True),
}


def table() -> str:
    """Return the results for runs of 30 minutes, of both readings where they differ."""
    lines = [
        "| workers | idle before | numbers set by | all run after | instances started | billed after the end, each |",
        "|---|---|---|---|---|---|",
    ]
    for most, nodes, warm in ((8, 1, 0), (8, 2, 0), (8, 8, 0), (8, 8, 2), (64, 64, 0)):
        for name, (has_head_calls, then_stop) in SET_BY.items():
            both = [_cells(most, nodes, warm, has_head_calls, then_stop, each) for each in (True, False)]
            cells = [one if one == other else f"{one} or {other}" for one, other in zip(*both, strict=True)]
            lines.append(f"| {nodes} of {most} | {warm} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cells(
    most: int, nodes: int, warm: int, has_head_calls: bool, then_stop: bool, counts_pending: bool
) -> tuple[str, str, str]:
    run = Run(nodes, 1800, requested_at=25, then_stop=then_stop)
    simulator = Simulator(most, [run], warm=warm, has_head_calls=has_head_calls, counts_pending=counts_pending)
    simulator.stay(3 * 3600)
    assert run.began_at is not None
    assert run.ended_at is not None
    minutes, seconds = divmod(run.began_at - run.requested_at, 60)
    billed = simulator.billed_minutes(run.ended_at) / nodes
    return f"{minutes:.0f} min {seconds:02.0f} s", str(simulator.started), f"{billed:.0f} min"


def at_call(number: int, error: BaseException) -> Callable[[str], None]:
    """Return a callback that raises an error at the call of this number."""
    calls = itertools.count(1)

    def on_call(name: str) -> None:
        if next(calls) == number:
            raise error

    return on_call


if __name__ == "__main__":
    print(table())
