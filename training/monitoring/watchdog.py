"""No silent hang: when no step is made for too long, every worker's stacks go to the run's folder, and the workers end.

Ray Train then counts a failure and starts them again from the last checkpoint. The driver watches, so that a worker
whose interpreter hangs is seen as well: its stacks are written by a signal handler that needs no interpreter.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console

from training.monitoring.run_state import WorkerProcess, read_run_state
from training.run import layout
from training.run.storage import RunStorage

LOOK_SECONDS = 1.0
WRITE_SECONDS = 3.0
ANSWER_SECONDS = 60.0
SILENT = "Its node does not answer.\n"


def enable_stack_dumps() -> WorkerProcess:
    """This process, which from now on writes the stacks of its threads when it gets SIGUSR1."""
    handle, path = tempfile.mkstemp(prefix="stacks-", suffix=".txt")
    faulthandler.register(signal.SIGUSR1, file=handle, all_threads=True)
    began = psutil.Process().create_time()
    return WorkerProcess(ray.get_runtime_context().get_node_id(), os.getpid(), began, path)


class Watchdog:
    """The driver's end, a context within which the training runs.

    Args:
        run_state: The run's run_state.
        timeout: Seconds without a sign of life that are a stall.
        storage: The run's folder.
        console: Where a stall is told.

    Attributes:
        found: For each stall, where its stacks are.
        worker_group_starts: How often workers had started to train when the last one was found.
    """

    def __init__(self, run_state: Any, timeout: float, storage: RunStorage, console: Console) -> None:
        self._run_state, self._timeout, self._storage, self._console = run_state, timeout, storage, console
        self.found: list[str] = []
        self.worker_group_starts = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(ANSWER_SECONDS)

    def _watch(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            state = read_run_state(self._run_state)
            if state and state.ranks and state.seconds_since_heartbeat > self._timeout:
                self._end(state.ranks, state.worker_group_starts)

    def _end(self, ranks: dict[int, WorkerProcess], starts: int) -> None:
        """Write the stacks of the workers that are still there, and end them; that of none is not a stall."""
        ended = self._asked(_stacks, ranks)
        if (stacks := {rank: text for rank in ranks if (text := ended.get(rank, SILENT))}) and not self._stop.is_set():
            self.worker_group_starts = starts
            self._tell(stacks)
            ended = self._asked(_kill, ranks)
        try:
            ray.get(self._run_state.forget.remote({rank: ranks[rank] for rank in ended}))
        except RayError:
            return

    def _tell(self, stacks: dict[int, str]) -> None:
        folder = f"{layout.STACKS_FOLDER}/{datetime.now(UTC):%Y%m%d-%H%M%S}"
        self.found.append(f"{self._storage.uri}/{folder}")
        self._console.print(
            f"no step for {self._timeout:g} s: the workers are ended, and start again from the last checkpoint if "
            f"--max-failures allows it; their stacks are in {self.found[-1]}",
            highlight=False,
            soft_wrap=True,
        )
        try:
            for rank, text in stacks.items():
                self._storage.write(f"{folder}/rank_{rank}.txt", text)
        except OSError as cause:
            self._console.print(f"the stacks could not be stored ({cause})", highlight=False, soft_wrap=True)

    def _asked(self, task: Any, ranks: dict[int, WorkerProcess]) -> dict[int, Any]:
        """What a task answers on each worker's node: None of a node that is gone, and nothing where it doesn't come."""
        asked = {task.options(scheduling_strategy=_on(each)).remote(each): rank for rank, each in ranks.items()}
        done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_SECONDS)
        answers = {}
        for each in done:
            try:
                answers[asked[each]] = ray.get(each)
            except RayTaskError:
                continue
            except RayError:  # its node is gone, and the worker with it
                answers[asked[each]] = None
        return answers


def _on(worker: WorkerProcess) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(worker.node_id, soft=False)


@ray.remote(num_cpus=0, max_retries=0)
def _stacks(worker: WorkerProcess) -> str | None:
    """What a worker on this node is doing, or None if it has ended."""
    if (process := _process(worker)) is None:
        return None
    about = f"process {worker.pid}, {process.status()}, on {os.uname().nodename}\n\n"
    process.send_signal(signal.SIGUSR1)
    path, size = Path(worker.stacks), -1
    deadline = time.monotonic() + WRITE_SECONDS
    while time.monotonic() < deadline and not (0 < size == path.stat().st_size):
        size = path.stat().st_size
        time.sleep(0.2)
    return about + (path.read_text() or "It does not answer: it is stopped, or stuck in the system.\n")


@ray.remote(num_cpus=0, max_retries=0)
def _kill(worker: WorkerProcess) -> None:
    if process := _process(worker):
        process.kill()


def _process(worker: WorkerProcess) -> psutil.Process | None:
    """The worker's process, if it is still that one."""
    try:
        process = psutil.Process(worker.pid)
        return process if process.create_time() == worker.began else None
    except psutil.NoSuchProcess:
        return None
