"""How far the run is: workers tell a small actor, the driver draws a bar from it."""

import threading
import time
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from training.errors import TrainingError, UsageError
from training.storage import RunStorage

SECONDS_BETWEEN = 0.5
NAMESPACE = "training"
# A command that was killed takes its board with it, a little later.
ENDING_SECONDS = 15.0


@dataclass(frozen=True)
class Whereabouts:
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
class State:
    """How far a run is.

    Attributes:
        epoch: The epoch under way.
        step: The steps done of it.
        steps: The steps it has.
        finished: The metrics of the epochs that this command has finished.
        made: The steps that this command has made, also those that were lost with a worker.
        first_step: When the first of them was done, in seconds of the epoch, or None before.
        starts: How often workers have started to train.
        given_up: Why the workers can't go on, however often they are started; None while they can.
        ranks: The workers that train, by rank.
        idle: Seconds without a sign of life.
    """

    epoch: int = 0
    step: int = 0
    steps: int = 1
    finished: list[dict[str, Any]] = field(default_factory=list)
    made: int = 0
    first_step: float | None = None
    starts: int = 0
    given_up: TrainingError | None = None
    ranks: dict[int, "Whereabouts"] = field(default_factory=dict)
    idle: float = 0.0

    def move(self, epoch: int, step: int, steps: int) -> None:
        """Note the steps done of an epoch; fewer than before are those since a checkpoint."""
        before = self.step if epoch == self.epoch and step >= self.step else 0
        self.made += step - before
        if self.made and self.first_step is None:
            self.first_step = time.time()
        self.epoch, self.step, self.steps = epoch, step, steps

    def finish(self, metrics: dict[str, Any]) -> None:
        """Note a finished epoch, with its last steps."""
        self.move(metrics["epoch"], metrics["steps"], metrics["steps"])
        self.finished.append(metrics)
        self.move(metrics["epoch"] + 1, 0, metrics["steps"])


@ray.remote(num_cpus=0)
class Board:
    """Holds the latest state; rank 0 writes it, the driver reads it."""

    def __init__(self) -> None:
        self.state = State()
        self._sign = time.monotonic()

    def alive(self) -> None:
        """Note a sign of life."""
        self._sign = time.monotonic()

    def enlist(self, rank: int, whereabouts: Whereabouts) -> None:
        """Note a worker that starts."""
        self.alive()
        self.state.ranks[rank] = whereabouts

    def resumed(self, epoch: int, step: int, steps: int) -> None:
        """Note where the workers went on."""
        self.alive()
        self.state.starts += 1
        self.state.epoch, self.state.step, self.state.steps = epoch, step, steps

    def give_up(self, cause: TrainingError) -> None:
        """Note why it is no use to start the workers again."""
        self.state.given_up = cause

    def forget(self, ranks: dict[int, Whereabouts]) -> None:
        """Forget workers that have ended, but not those that have come in their place."""
        for rank, worker in ranks.items():
            if self.state.ranks.get(rank) == worker:
                del self.state.ranks[rank]

    def step(self, epoch: int, step: int, steps: int) -> None:
        """Note the steps done of an epoch."""
        self.alive()
        self.state.move(epoch, step, steps)

    def epoch(self, metrics: dict[str, Any]) -> None:
        """Note a finished epoch."""
        self.alive()
        self.state.finish(metrics)

    def read(self) -> State:
        """The state now."""
        ranks = dict(self.state.ranks)
        return replace(self.state, ranks=ranks, idle=time.monotonic() - self._sign)


def new_board(storage: RunStorage) -> Any:
    """A board beside the driver: on a worker's node it would go with that node. There is one for a run at a time.

    Raises:
        UsageError: Another command on this cluster trains the run.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    board = Board.options(scheduling_strategy=here, name=storage.uri, namespace=NAMESPACE)
    deadline = time.monotonic() + ENDING_SECONDS
    while True:
        try:
            return board.remote()
        except ValueError:  # Ray knows one of that name
            if time.monotonic() > deadline:
                raise UsageError(
                    f"--run-name: run {storage.run_name!r} is being trained by another command on this cluster; wait "
                    "for it or stop it, or give another --run-name"
                ) from None
            time.sleep(SECONDS_BETWEEN)


def look(board: Any) -> State | None:
    """The state now, or None where the board can't be asked: that is no reason to lose the training."""
    try:
        return ray.get(board.read.remote())
    except RayError:
        return None


class Reporter:
    """A worker's end: every rank tells where it is, and rank 0 how far, not more often than the driver looks."""

    def __init__(self, board: Any, rank: int, whereabouts: Whereabouts) -> None:
        board.enlist.remote(rank, whereabouts)
        self._board = board if rank == 0 else None
        self._epoch, self._last = 0, 0.0

    def resumed(self, epoch: int, step: int, steps: int) -> None:
        """Tell where this rank goes on: the epoch, the steps done of it and the steps it has."""
        self._epoch = epoch
        if self._board:
            self._board.resumed.remote(epoch, step, steps)

    def step(self, step: int, steps: int) -> None:
        """Tell how many of the epoch's steps are done."""
        if self._board and self._is_time():
            self._board.step.remote(self._epoch, step, steps)

    def epoch(self, metrics: dict[str, Any]) -> None:
        """Tell that an epoch is finished."""
        self._epoch = metrics["epoch"] + 1
        if self._board:
            self._board.epoch.remote(metrics)

    def alive(self) -> None:
        """Tell that this rank is at work, though not at a step."""
        if self._board and self._is_time():
            self._board.alive.remote()

    def _is_time(self) -> bool:
        now = time.monotonic()
        if now - self._last < SECONDS_BETWEEN:
            return False
        self._last = now
        return True


class ProgressBar:
    """The driver's end, a context: a bar where there is a terminal, and a line for each epoch everywhere.

    What the workers print meanwhile appears above the bar.
    """

    def __init__(self, board: Any, epochs: int, console: Console) -> None:
        self._board, self._epochs, self._console = board, epochs, console
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        )
        self._task = self._progress.add_task("starting the workers", total=None)
        self._shown = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "ProgressBar":
        self._progress.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        if kind is None:
            self._draw()
        self._progress.update(self._task, visible=False)
        self._progress.stop()

    def _watch(self) -> None:
        while not self._stop.wait(SECONDS_BETWEEN):
            self._draw()

    def _draw(self) -> None:
        if (state := look(self._board)) is None:
            return
        for metrics in state.finished[self._shown :]:
            self._console.print(_epoch_line(metrics, self._epochs), highlight=False)
        self._shown = len(state.finished)
        if state.step or state.finished:
            description = f"epoch {min(state.epoch + 1, self._epochs)}/{self._epochs}"
            done, total = state.epoch * state.steps + state.step, self._epochs * state.steps
            self._progress.update(self._task, description=description, completed=done, total=total)


def _epoch_line(metrics: dict[str, Any], epochs: int) -> str:
    return (
        f"epoch {metrics['epoch'] + 1}/{epochs}  train loss {metrics['train_loss']:.4f}  "
        f"test loss {metrics['test_loss']:.4f}  test accuracy {metrics['test_accuracy']:.4f}  "
        f"{metrics['train_seconds'] + metrics['test_seconds']:.1f} s"
    )
