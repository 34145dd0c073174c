"""How far a run is: rank 0 reports it to a small Ray actor on the driver's node, and the driver reads it there."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from training.errors import TrainingError, UsageError
from training.run.storage import RunStorage

REPORT_SECONDS = 0.5
NAMESPACE = "training"
# A command that was killed takes its run_state with it, a little later.
ENDING_SECONDS = 15.0


@dataclass(frozen=True)
class WorkerProcess:
    """A worker's process.

    Attributes:
        node_id: Ray's id of its node.
        pid: The process there.
        began: When that process was created, in seconds of the epoch: another may get its number later.
        stacks: The file there to which it writes its stacks when it gets SIGUSR1.
    """

    node_id: str
    pid: int
    began: float
    stacks: str


@dataclass
class RunState:
    """How far a run is.

    Attributes:
        epoch: The epoch under way.
        step: The steps done of it.
        steps: The steps it has.
        finished: The metrics of the epochs that this command has finished.
        steps_completed: The steps that this command has made, also those that were lost with a worker.
        first_step: When the first of them was done, in seconds of the epoch, or None before.
        worker_group_starts: How often workers have started to train.
        fatal_error: Why the workers can't go on, however often they are started; None while they can.
        ranks: The workers that train, by rank.
        seconds_since_heartbeat: Seconds without a sign of life.
    """

    epoch: int = 0
    step: int = 0
    steps: int = 1
    finished: list[dict[str, Any]] = field(default_factory=list)
    steps_completed: int = 0
    first_step: float | None = None
    worker_group_starts: int = 0
    fatal_error: TrainingError | None = None
    ranks: dict[int, WorkerProcess] = field(default_factory=dict)
    seconds_since_heartbeat: float = 0.0

    def advance(self, epoch: int, step: int, steps: int) -> None:
        """Note the steps done of an epoch; fewer than before are those since a checkpoint."""
        before = self.step if epoch == self.epoch and step >= self.step else 0
        self.steps_completed += step - before
        if self.steps_completed and self.first_step is None:
            self.first_step = time.time()
        self.epoch, self.step, self.steps = epoch, step, steps

    def finish_epoch(self, metrics: dict[str, Any]) -> None:
        """Note a finished epoch, with its last steps."""
        self.advance(metrics["epoch"], metrics["steps"], metrics["steps"])
        self.finished.append(metrics)
        self.advance(metrics["epoch"] + 1, 0, metrics["steps"])


@ray.remote(num_cpus=0)
class RunStateActor:
    """Holds the latest state; rank 0 writes it, the driver reads it."""

    def __init__(self) -> None:
        self.state = RunState()
        self._sign = time.monotonic()

    def heartbeat(self) -> None:
        """Note a sign of life."""
        self._sign = time.monotonic()

    def register_worker(self, rank: int, process: WorkerProcess) -> None:
        """Note a worker that starts."""
        self.heartbeat()
        self.state.ranks[rank] = process

    def resumed(self, epoch: int, step: int, steps: int) -> None:
        """Note where the workers went on."""
        self.heartbeat()
        self.state.worker_group_starts += 1
        self.state.epoch, self.state.step, self.state.steps = epoch, step, steps

    def set_fatal_error(self, cause: TrainingError) -> None:
        """Note why it is no use to start the workers again."""
        self.state.fatal_error = cause

    def forget(self, ranks: dict[int, WorkerProcess]) -> None:
        """Forget workers that have ended, but not those that have come in their place."""
        for rank, worker in ranks.items():
            if self.state.ranks.get(rank) == worker:
                del self.state.ranks[rank]

    def step(self, epoch: int, step: int, steps: int) -> None:
        """Note the steps done of an epoch."""
        self.heartbeat()
        self.state.advance(epoch, step, steps)

    def epoch(self, metrics: dict[str, Any]) -> None:
        """Note a finished epoch."""
        self.heartbeat()
        self.state.finish_epoch(metrics)

    def read(self) -> RunState:
        """The state now."""
        ranks = dict(self.state.ranks)
        return replace(self.state, ranks=ranks, seconds_since_heartbeat=time.monotonic() - self._sign)


def create_run_state(storage: RunStorage) -> Any:
    """A run_state beside the driver: on a worker's node it would go with that node. There is one for a run at a time.

    Raises:
        UsageError: Another command on this cluster trains the run.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    run_state = RunStateActor.options(scheduling_strategy=here, name=storage.uri, namespace=NAMESPACE)
    deadline = time.monotonic() + ENDING_SECONDS
    while True:
        try:
            return run_state.remote()
        except ValueError:  # Ray knows one of that name
            if time.monotonic() > deadline:
                raise UsageError(
                    f"--run-name: run {storage.run_name!r} is being trained by another command on this cluster; wait "
                    "for it or stop it, or give another --run-name"
                ) from None
            time.sleep(REPORT_SECONDS)


def read_run_state(run_state: Any) -> RunState | None:
    """The state now, or None where the run_state can't be asked: that is no reason to lose the training."""
    try:
        return ray.get(run_state.read.remote())
    except RayError:
        return None
