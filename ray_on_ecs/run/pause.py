"""A pause of a script's processes in which SIGTERM ends them: nothing is written after a look at their files."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from ray_on_ecs.run.supervisor import handles_sigterm, has_sigterm, is_shell, started_by

# For the processes to stop, for the signal to pass the supervisor, and for the script to end by it.
SIGNAL_SECONDS, POLL_SECONDS = 1.0, 0.002


@contextmanager
def paused(processes: Sequence[psutil.Process]) -> Generator[list[psutil.Process]]:
    """Stop processes by SIGSTOP while the block runs; yield those that then go on.

    A system call that has begun ends before its thread stops.
    """
    held = list(processes)
    try:
        for process in processes:
            with suppress(psutil.Error):
                process.suspend()
        for process in processes:
            _wait(lambda process=process: _is_stopped(process))
        yield held
    finally:
        for process in held:
            with suppress(psutil.Error):
                process.resume()


def end_paused(held: list[psutil.Process]) -> bool:
    """Let SIGTERM, which was sent to the first of these processes, end it; the others stay stopped.

    The supervisor then kills these. Return whether it has ended so. A process that handles the signal is left as it is,
    as any process outside Linux, and as all behind a shell if one that it has started handles it.
    """
    command = held[0]
    if is_shell(command.pid) and any(map(handles_sigterm, started_by(command.pid))):
        return False
    if not _wait(lambda: has_sigterm(command.pid, "ShdPnd", "SigPnd")) or has_sigterm(
        command.pid, "SigCgt", "SigIgn", "SigBlk"
    ):
        return False
    with suppress(psutil.Error):
        command.resume()
    if has_ended := _wait(lambda: not command.is_running() or command.status() == psutil.STATUS_ZOMBIE):
        held.clear()
    return has_ended


def _is_stopped(process: psutil.Process) -> bool:
    """Return whether all threads of a process stand still."""
    states = [
        path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{process.pid}/task").glob("*/stat")
    ]
    return set(states) <= set("TtZX") if states else process.status() != psutil.STATUS_RUNNING


def _wait(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + SIGNAL_SECONDS
    with suppress(psutil.Error, OSError):
        while not (is_so := condition()) and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        return is_so
    return True
