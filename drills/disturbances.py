"""Disturbances of a run: kill, stop or freeze a part of the cluster while the run's command is active."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import psutil

from tests.disturbed_run import END_SECONDS, S3Run
from tests.local_cluster import kill
from tests.waiting import until

SECONDS_BETWEEN_TWO_KILLS = (1.0, 10.0)
OUTAGE_SECONDS = 60.0
FREEZE_STALL_SECONDS = 30
# Less than the time after which a worker that does not answer is lost.
FREEZE_SECONDS = 20.0


class TooLateError(Exception):
    """The command ended before the disturbance was over."""


@dataclass(frozen=True)
class Disturber:
    """Disturbs one run.

    Attributes:
        run: The run, whose command is active.
        random: Chooses among the processes.
        restart: Starts the run's command again.
        outage: A context within which every request to S3 fails.
        cloudwatch_outage: The same for CloudWatch.
        monitor_seconds: How long the monitoring fails.
        moments: When the run has been disturbed (Unix time).
    """

    run: S3Run
    random: random.Random
    restart: Callable[[], object]
    outage: Callable[[], AbstractContextManager[None]]
    cloudwatch_outage: Callable[[], AbstractContextManager[None]]
    monitor_seconds: float
    moments: list[float] = field(default_factory=list)

    def kill_rank(self) -> None:
        """Kill a process of the script."""
        kill(self._find(lambda: self.run.ranks).pid)

    def kill_worker(self) -> None:
        """Kill a worker's process, which looks after a process of the script."""
        kill(self._find(self.run.cluster.actors).pid)

    def kill_raylet(self) -> None:
        """Kill a node's raylet, which ends the node."""
        node = self.random.choice(self.run.cluster.workers)
        kill(self._find(lambda: self.run.cluster.worker_processes(node, "raylet/raylet")).pid)

    def kill_twice(self) -> None:
        """Kill two processes, each one of the script or a raylet, 1 to 10 s apart."""
        kill_one, kill_another = self.random.choices((self.kill_rank, self.kill_raylet), k=2)
        kill_one()
        if not wait_until(self.run, time.time() + self.random.uniform(*SECONDS_BETWEEN_TWO_KILLS)):
            raise TooLateError
        kill_another()

    def kill_driver(self) -> None:
        """Kill the command, and start it again as its user would."""
        if self.run.command is None or self.run.has_ended:
            raise TooLateError
        kill(self.run.command.pid)
        self.run.command.wait()
        self.restart()

    def drain_node(self) -> None:
        """Send SIGTERM to a node, as ECS does when it stops a task."""
        self.random.choice(self.run.cluster.workers).send_signal(signal.SIGTERM)

    def freeze_rank(self) -> None:
        """Stop a process of the script with SIGSTOP: it hangs, and the other ranks wait for it."""
        self._find(lambda: self.run.ranks).suspend()

    def freeze_worker(self) -> None:
        """Stop a worker's process with SIGSTOP for some seconds; its script goes on."""
        frozen = self._find(self.run.cluster.actors)
        frozen.suspend()
        try:
            if not wait_until(self.run, time.time() + FREEZE_SECONDS):
                raise TooLateError
        finally:
            frozen.resume()

    def fail_s3(self) -> None:
        """Let every request to S3 fail for a minute."""
        with self.outage():
            if not wait_until(self.run, time.time() + OUTAGE_SECONDS):
                raise TooLateError

    def fail_monitor(self) -> None:
        """Stop the dashboard with SIGSTOP, and let every request to CloudWatch fail; the run may end meanwhile."""
        dashboard = self._find(lambda: self.run.cluster.head_processes("dashboard/dashboard.py"))
        dashboard.suspend()
        try:
            with self.cloudwatch_outage():
                wait_until(self.run, time.time() + self.monitor_seconds)
        finally:
            dashboard.resume()

    def _find(self, find: Callable[[], list[psutil.Process]]) -> psutil.Process:
        """Wait for processes of a kind to start, and choose one of them."""

        def has_started_or_ended() -> list[psutil.Process] | bool:
            self.run.cluster.replace_ended()
            return find() or self.run.has_ended

        processes = until(has_started_or_ended, END_SECONDS)
        if self.run.has_ended:
            raise TooLateError
        return self.random.choice(processes)


KINDS: dict[str, Callable[[Disturber], None]] = {
    "rank-killed": Disturber.kill_rank,
    "worker-killed": Disturber.kill_worker,
    "raylet-killed": Disturber.kill_raylet,
    "killed-twice": Disturber.kill_twice,
    "driver-killed": Disturber.kill_driver,
    "node-drained": Disturber.drain_node,
    "rank-frozen": Disturber.freeze_rank,
    "worker-frozen": Disturber.freeze_worker,
    "s3-outage": Disturber.fail_s3,
    "monitor-failed": Disturber.fail_monitor,
}


def wait_until(run: S3Run, moment: float) -> bool:
    """Wait until a Unix time while ended nodes are replaced; return False if the command ends before."""

    def is_over() -> bool:
        run.cluster.replace_ended()
        return run.has_ended or time.time() >= moment

    until(is_over, max(moment - time.time(), 0.0) + END_SECONDS, between=0.05)
    return not run.has_ended
