"""How far a run is: rank 0 reports it to a small Ray actor on the driver's node, and the driver reads it there.

It is a convenience, for the progress bar and CloudWatch. Reports are absolute, so an actor that Ray had to restart
knows everything again with the next one, and no decision about the run depends on it.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

REPORT_SECONDS = 0.5
READ_SECONDS = 5.0


@dataclass(frozen=True)
class Progress:
    """Where the workers are.

    Attributes:
        epoch: The epoch in progress, from 0.
        step: Steps done of it.
        steps_per_epoch: Steps that it has.
        worker_group: Identifies these workers; a restart has others.
        steps_made: Steps that these workers have made.
        first_step_at: When these workers finished their first step (Unix time), or None.
    """

    epoch: int
    step: int
    steps_per_epoch: int
    worker_group: str
    steps_made: int = 0
    first_step_at: float | None = None

    @property
    def total_steps(self) -> int:
        """Steps done since the start of the training."""
        return self.epoch * self.steps_per_epoch + self.step


@dataclass(frozen=True)
class RunState:
    """What the actor knows.

    Attributes:
        incarnation: Another one after Ray had to restart the actor.
        progress: The last report, or None before the first.
        metrics: The metrics that the reader doesn't have, by number, in order: an epoch's, or what a script logged.
    """

    incarnation: str
    progress: Progress | None
    metrics: dict[int, Any]


class RunStateActor:
    """Holds the last reports; Ray runs it as an actor."""

    def __init__(self) -> None:
        self._incarnation = uuid.uuid4().hex
        self._progress: Progress | None = None
        self._metrics: dict[int, Any] = {}

    def report(self, progress: Progress) -> None:
        """Keep the progress."""
        self._progress = progress

    def report_metrics(self, number: int, metrics: Any) -> None:
        """Keep metrics under their number."""
        self._metrics[number] = metrics

    def read(self, after: int) -> RunState:
        """Return the state, with the metrics of higher numbers."""
        new = {number: self._metrics[number] for number in sorted(self._metrics) if number > after}
        return RunState(self._incarnation, self._progress, new)


class RunStateClient:
    """The actor's methods. Nothing here waits for a report to arrive, or fails when the actor is gone."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def report(self, progress: Progress) -> None:
        """Report the progress."""
        self._actor.report.remote(progress)

    def report_metrics(self, number: int, metrics: Any) -> None:
        """Report metrics: those of an epoch under its number, or what a script logged, in order."""
        self._actor.report_metrics.remote(number, metrics)

    def read(self, after: int) -> RunState | None:
        """Return the state with the metrics of higher numbers, or None if the actor doesn't answer."""
        try:
            return ray.get(self._actor.read.remote(after), timeout=READ_SECONDS)
        except RayError:
            return None


def create_run_state() -> RunStateClient:
    """Create the run-state actor, which gets what is reported while Ray restarts it as soon as it is back."""
    return RunStateClient(create_actor(RunStateActor, max_task_retries=-1))


def create_actor(kind: type, **options: Any) -> Any:
    """Create an actor on the driver's node, so that losing a worker node does not lose it; Ray restarts it."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor: Any = ray.remote(kind)
    return actor.options(num_cpus=0, max_restarts=-1, scheduling_strategy=here, **options).remote()
