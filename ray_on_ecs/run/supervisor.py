"""Runs a command that ends with its starter, with all processes it has started; standard library only.

usage: python -I -S supervisor.py FD MARK COMMAND…, with a pipe as standard input; another one as FD, for a line with
its process ID, then the exit status, the time of the end and the memory of the largest process (ru_maxrss); and a text
that no other command has as MARK

When the first pipe closes, because the process at its other end has died however it may, the command gets SIGTERM, and
30 s; a byte in that pipe leaves it none. When the command has ended, all that it has started is killed: nothing of it
keeps a GPU. This is a separate process, and not a child of the worker, because Ray kills the direct children, and only
these, of a worker that ends. A process that has left the command's process group, as mpirun's do, is known by a
variable of its environment, the mark. SIGTERM and SIGABRT are passed on to the command. If SIGTERM ends a shell script,
the programs that it has started and that handle SIGTERM get it, too, with the rest of the time, and the exit status is
theirs. If this process is killed, Linux kills the command at once, and the worker, if it lives, kills the rest.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

FORWARDED = (signal.SIGTERM, signal.SIGABRT)
NOT_FOUND = 127
NOT_EXECUTABLE = 126
MARK = "RAY_ON_ECS_SUPERVISOR"
PROC = "/proc"
# Stands for the variables of a process in the middle of execve: until execve returns, they can't be read.
STARTING = [b""]
# A process that is killed may have started another one meanwhile. The limit is for processes that can't die, and
# for those without environment variables, which look as if they were starting.
KILL_SECONDS, PAUSE_SECONDS = 5.0, 0.02
# How long a command has after SIGTERM, as under torchrun.
GRACE_SECONDS = 30.0
KILL_NOW = b"k"
# Of prctl(2): the signal for a process whose parent has died; and for the parent that such a process then gets.
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SHELLS = ("ash", "bash", "busybox", "dash", "ksh", "mksh", "sh", "zsh")


def main() -> None:
    """Run the command and end as it has ended."""
    if os.fork():
        os._exit(0)
    status_writer, mark, *argv = sys.argv[1:]
    os.write(int(status_writer), f"{os.getpid()}\n".encode())
    pending: list[int] = []
    for number in FORWARDED:
        signal.signal(number, lambda signum, frame: pending.append(signum))
    try:
        environment = {**os.environ, MARK: mark}
        command = subprocess.Popen(argv, stdin=subprocess.DEVNULL, env=environment, preexec_fn=_end_with_parent())
    except OSError as cause:
        print(f"{argv[0]}: {cause.strerror}", file=sys.stderr)
        status = NOT_FOUND if isinstance(cause, FileNotFoundError) else NOT_EXECUTABLE
    else:
        started: list[int] = []  # by a shell, until it got SIGTERM

        def forward(signum: int, frame: object = None) -> None:
            if signum == signal.SIGTERM and is_shell(command.pid):
                started[:] = started_by(command.pid)
                ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # for their exit statuses
            command.send_signal(signum)

        threading.Thread(target=_end_at_eof, args=(forward, mark), daemon=True).start()
        for number in FORWARDED:
            signal.signal(number, forward)
        for signum in pending:
            forward(signum)
        status = command.wait()
        if status == -signal.SIGTERM:
            status = _terminate(started)
    with suppress(OSError):  # the worker has died
        largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        os.write(int(status_writer), f"{status} {time.time()} {largest}".encode())
    _kill_all(mark)


def is_shell(pid: int) -> bool:
    """Return whether a process is a shell, such as that of a shell script; False outside Linux."""
    try:
        return os.path.basename(os.readlink(f"{PROC}/{pid}/exe")) in SHELLS
    except OSError:
        return False


def _end_with_parent() -> Callable[[], None] | None:
    """Return a function with which a new process, in any session, is killed when this one is; Linux only."""
    if not sys.platform.startswith("linux"):
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def call() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has died meanwhile
            os.kill(os.getpid(), signal.SIGKILL)

    return call


def _end_at_eof(forward: Callable[[int], None], mark: str) -> None:
    """End the command when standard input does, at once or by SIGTERM."""
    if os.read(0, 1) != KILL_NOW:
        forward(signal.SIGTERM)
        time.sleep(GRACE_SECONDS)  # this process ends as soon as the command has
    _kill_all(mark)


def started_by(shell: int) -> list[int]:
    """Return the processes that a shell has started, and those that shells without a trap among them have."""
    started = []
    for pid in _processes():
        with suppress(OSError, IndexError):
            if int(_stat(pid)[1]) == shell:
                started += [pid, *(started_by(pid) if is_shell(pid) and not handles_sigterm(pid) else ())]
    return started


def _terminate(started: Sequence[int]) -> int:
    """Send SIGTERM to processes that a shell had started, and wait for those that handle it.

    Return the first exit status of these that is not 0, or -SIGTERM if there is another program. Shells get it first,
    as they would go on with their next command. A filter, such as tee, gets none: others write to it.
    """
    handling = [pid for pid in started if handles_sigterm(pid)]
    shells = [pid for pid in started if is_shell(pid) and pid not in handling]
    others = [pid for pid in started if pid not in (*handling, *shells) and not _is_filter(pid)]
    for pid in [*shells, *others, *handling]:
        with suppress(OSError):
            os.kill(pid, signal.SIGTERM)
    statuses = [-signal.SIGTERM] * bool(others or not handling)
    for pid in handling:
        while _is_running(pid):
            time.sleep(PAUSE_SECONDS)
        with suppress(ChildProcessError):
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return next(filter(None, statuses), 0)


def handles_sigterm(pid: int) -> bool:
    """Return whether a process has a handler of SIGTERM; False outside Linux."""
    return has_sigterm(pid, "SigCgt")


def has_sigterm(pid: int, *sets: str) -> bool:
    """Return whether one of these sets of signals of a process, see proc_pid_status(5), has SIGTERM."""
    try:
        lines = _read(pid, "status").decode().splitlines()
    except OSError:
        return False
    masks = dict(line.split(":", 1) for line in lines)
    return any(int(masks.get(name, "0"), 16) >> (signal.SIGTERM - 1) & 1 for name in sets)


def _is_filter(pid: int) -> bool:
    """Return whether a process reads a pipe."""
    try:
        return os.readlink(f"{PROC}/{pid}/fd/0").startswith("pipe:")
    except OSError:
        return False


def _kill_all(mark: str) -> None:
    """Kill the command with all that it has started, and this process."""
    kill_marked(mark)
    os.killpg(0, signal.SIGKILL)


def _is_running(pid: int) -> bool:
    """Return whether a process has not ended; a zombie has."""
    try:
        return _stat(pid)[0] not in (b"Z", b"X")
    except (OSError, IndexError):
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return not os.path.isdir(f"{PROC}/self")  # not Linux


def kill_marked(mark: str) -> None:
    """Kill all processes with this mark."""
    deadline = time.monotonic() + KILL_SECONDS
    while time.monotonic() < deadline:
        environments = {pid: _environment(pid) for pid in _processes()}
        marked = [pid for pid, variables in environments.items() if f"{MARK}={mark}".encode() in variables]
        for pid in marked:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not marked and STARTING not in environments.values():
            break
        time.sleep(PAUSE_SECONDS)


def _processes() -> list[int]:
    try:
        return [int(name) for name in os.listdir(PROC) if name.isdigit()]
    except OSError:  # not Linux
        return []


def _environment(pid: int) -> list[bytes]:
    """Return the variables of a process, as `NAME=value`; none if it has ended, or is another user's."""
    try:
        variables = _read(pid, "environ")
        if variables:
            return variables.split(b"\0")
        # Before Linux 6.16 it reads empty for zombies and kernel threads, too; these have no memory at all.
        return [] if _read(pid, "statm").startswith(b"0 ") else STARTING
    except OSError:
        return []


def _stat(pid: int) -> list[bytes]:
    """Return what proc_pid_stat(5) has of a process from its state on."""
    return _read(pid, "stat").rpartition(b") ")[2].split()


def _read(pid: int, name: str) -> bytes:
    with open(f"{PROC}/{pid}/{name}", "rb") as file:
        return file.read()


if __name__ == "__main__":
    main()
