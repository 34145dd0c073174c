"""The place of a rank, by the stacks of its processes.

A rank waits if the innermost frames of its main thread, up to the user's code, are those of a collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import psutil

from ray_on_ecs.run.stacks import NO_RIGHTS, Frame, ProcessStacks

COLLECTIVES = {
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_reduce"),
    *("all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast"),
    *("broadcast_object_list", "destroy_process_group", "gather", "gather_object", "init_device_mesh"),
    *("init_process_group", "monitored_barrier", "new_group", "new_subgroups", "recv", "recv_object_list", "reduce"),
    *("reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send", "send_object_list"),
    "wait_tensor",
}
OF_COLLECTIVES = "/torch/distributed/"
# Functions of these work, or call others, before they wait in a collective.
OF_DCP = "/torch/distributed/checkpoint/"
WORK_FIRST = (OF_DCP, "/torch/distributed/collective_utils.py")
OF_DDP = "/torch/nn/parallel/distributed.py"
DDP = "DistributedDataParallel"
# Of a Checkpointer: the methods in which it waits for the other ranks leave no frames of PyTorch.
OF_CHECKPOINTER, OF_RANKS = "/ray_on_ecs/checkpoint/", "/ray_on_ecs/checkpoint/collectives.py"
OF_FUTURES = "/concurrent/futures/_base.py"
OF_BACKGROUND = "/ray_on_ecs/checkpoint/background.py"
WAITS_FOR_RANKS = {"broadcast", "gather", "receive", "scatter"}
CHECKPOINTER = "Checkpointer"
BACKWARD = "_engine_run_backward"
# In files with these parts of Python and packages, a thread waits for another thread or a child process.
FOR_OTHERS = (
    *("/asyncio/", "/concurrent/futures/", "/joblib/", "/multiprocessing/", "/queue.py", "/selectors.py"),
    *("/socketserver.py", "/subprocess.py", "/threading.py", "/torch/multiprocessing/", "/torch/utils/data/"),
)
DATA_WORKER, IN_DATA_WORKER, IN_THREAD = "pt_data_worker", "in a data loader worker", "in a thread"
FOR_THREADS = ("/concurrent/futures/_base", "/concurrent/futures/thread", "/queue.py", "/threading.py")
FOR_PROCESSES = (
    *("/multiprocessing/connection.py", "/multiprocessing/popen", "/subprocess.py"),
    "/torch/utils/data/dataloader.py",
)
FORKED = "BaseProcess._bootstrap"  # of multiprocessing, in a new process
WAITS, IS_IN, IS, HAS = ("waits in", "wait in"), ("is in", "are in"), ("is", "are"), ("has", "have")
STOPPED = {
    psutil.STATUS_STOPPED: "stopped by a signal (SIGSTOP), and goes on at SIGCONT",
    psutil.STATUS_TRACING_STOP: "stopped by a debugger",
}


@dataclass(frozen=True)
class Position:
    """The place of a rank.

    Attributes:
        verbs: The verb of a sentence, for one rank and for several.
        where: The place, as it stands after the verb.
        collective: The collective in which it waits, or nothing.
        is_known: False if the stacks can't be read.
        stacks: The stacks that show it, by a title.
        began: Since when it waits (Unix time), if that is known.
    """

    verbs: tuple[str, str]
    where: str
    collective: str = ""
    is_known: bool = True
    stacks: tuple[tuple[str, tuple[Frame, ...]], ...] = ()
    began: float | None = None

    @property
    def is_waiting(self) -> bool:
        """True in a collective."""
        return bool(self.collective)

    @property
    def is_down(self) -> bool:
        """True if it is stopped, has ended or has not answered."""
        return self.verbs in (IS, HAS)

    @property
    def key(self) -> tuple[object, ...]:
        """The part that ranks in the same place share."""
        return self.verbs, self.where


def position_of(processes: Sequence[ProcessStacks]) -> Position:
    """Return the place of a rank by its main process and what that waits for."""
    pids = {process.pid for process in processes}
    main = next((process for process in processes if process.parent not in pids), processes[0])
    shown = (("main thread", main.threads[0].frames),) if main.threads else ()
    if state := STOPPED.get(main.state):
        return Position(IS, state, stacks=shown)
    if not main.threads:
        return Position(IS_IN, main.fault or NO_RIGHTS, is_known=False)
    frames = main.threads[0].frames
    inner = _inner(frames)
    user = next((frame for frame in frames if frame.is_users), None)
    at = f", {user.place.rpartition(', ')[2]}" if user else ""
    if collective := _collective(inner):
        return Position(WAITS, collective + at, collective, stacks=shown)
    if _waits_for_ranks(inner):
        return Position(WAITS, _checkpointer(inner) + at, CHECKPOINTER, stacks=shown)
    if other := _elsewhere(main, processes, inner, at):
        return other
    if _is_backward(inner):
        return Position(IS_IN, f"backward{at}", "all_reduce", stacks=shown)
    where = user.place if user else (frames[0].place if frames else "no Python code")
    return Position(IS_IN, where, stacks=shown)


def _inner(frames: Sequence[Frame]) -> list[Frame]:
    """Return the frames that the user's code has called, the innermost one first."""
    return list(takewhile(lambda frame: not frame.is_users, frames))


def _collective(inner: Sequence[Frame]) -> str:
    """Return the collective that these frames are in, as the user's code has called it; empty if there is none."""
    of_torch = [
        frame for frame in inner if OF_COLLECTIVES in frame.file and not any(part in frame.file for part in WORK_FIRST)
    ]
    named = [frame.function for frame in of_torch if frame.function in COLLECTIVES]
    if named:
        return named[-1]
    if of_torch and any(OF_DDP in frame.file for frame in inner):
        return DDP  # its parameters are compared and copied when it is made
    return of_torch[0].function if of_torch and of_torch[0] == inner[0] else ""


def _waits_for_ranks(frames: Sequence[Frame]) -> bool:
    """Return whether a Checkpointer waits for other ranks in these frames."""
    return any(OF_RANKS in frame.file and frame.function.rpartition(".")[2] in WAITS_FOR_RANKS for frame in frames)


def _checkpointer(inner: Sequence[Frame]) -> str:
    """Return the method of a Checkpointer that the user's code has called."""
    return [frame.function for frame in inner if OF_CHECKPOINTER in frame.file][-1]


def _waits_for_others(inner: Sequence[Frame]) -> bool:
    return any(part in frame.file for frame in inner[:4] for part in FOR_OTHERS)


def _is_backward(inner: Sequence[Frame]) -> bool:
    return any(frame.function == BACKWARD for frame in inner)


def _elsewhere(
    main: ProcessStacks, processes: Sequence[ProcessStacks], inner: Sequence[Frame], at: str
) -> Position | None:
    """Return the place of what a main thread with these frames waits for; None if it waits for nothing known."""
    if any(OF_BACKGROUND in frame.file for frame in inner):
        return _background(main, OF_BACKGROUND, inner, at)
    if other := _other(main, processes, inner):
        return other
    is_for_future = any(OF_FUTURES in frame.file for frame in inner[:4])
    return _background(main, OF_DCP, inner, at) if is_for_future else None


def _background(main: ProcessStacks, part: str, inner: Sequence[Frame], at: str) -> Position | None:
    """Return the place of a thread with this part in its files, which stores a checkpoint; None without one."""
    for thread in main.threads[1:]:
        if any(part in frame.file for frame in thread.frames):
            stacks = ((IN_THREAD, thread.frames), ("main thread", main.threads[0].frames))
            if _waits_for_ranks(thread.frames):
                return Position(WAITS, _checkpointer(inner) + at, CHECKPOINTER, stacks=stacks)
            if collective := _collective(thread.frames):
                return Position(WAITS, collective + at, collective, stacks=stacks)
            return Position(IS_IN, f"{thread.frames[0].place}, {IN_THREAD}", stacks=stacks)
    return None


def _other(main: ProcessStacks, processes: Sequence[ProcessStacks], inner: Sequence[Frame]) -> Position | None:
    """Return the place of another thread or a child process, if a main thread with these frames waits for one."""
    if _is_backward(inner):  # hooks may run on autograd's threads, which Python has not started
        native = [each for each in main.threads[1:] if each.frames and "/threading.py" not in each.frames[-1].file]
        others = [(IN_THREAD, thread.frames) for thread in native]
    elif _waits_for_others(inner):
        others = _others(main, processes, inner)
    else:
        return None
    for title, own in others:
        found = next((frame for frame in own if frame.is_users), own[0] if title == IN_DATA_WORKER else None)
        if found:
            stacks = ((title, own), ("main thread", main.threads[0].frames))
            return Position(IS_IN, f"{found.place}, {title}", stacks=stacks)
    return None


def _others(
    main: ProcessStacks, processes: Sequence[ProcessStacks], inner: Sequence[Frame]
) -> list[tuple[str, tuple[Frame, ...]]]:
    """Return the stacks of a rank beside its main thread's that don't wait themselves, with titles.

    Those that a main thread with these frames may wait for come first, and threads never if it waits for a process. A
    forked process has its parent's frames below its own.
    """
    waits_for = "".join(frame.file for frame in inner[:4])
    threads = () if any(part in waits_for for part in FOR_PROCESSES) else main.threads[1:]
    of_threads = [(IN_THREAD, thread.frames) for thread in threads]
    of_processes = []
    for process in processes:
        if process is not main:
            title = IN_DATA_WORKER if process.name == DATA_WORKER else "in a child process"
            own = [tuple(takewhile(lambda frame: frame.function != FORKED, each.frames)) for each in process.threads]
            of_processes += [(title, frames) for frames in own]
    is_for_thread = any(part in waits_for for part in FOR_THREADS)
    found = of_threads + of_processes if is_for_thread else of_processes + of_threads
    return [(title, frames) for title, frames in found if frames and not _waits_for_others(_inner(frames))]
