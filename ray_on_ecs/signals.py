"""Signals that stop a run: Ctrl-C, SIGTERM and SIGHUP become one exception in the driver's main thread."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Added to the number of a signal, as in a shell.
SIGNALLED = 128


class Stop(KeyboardInterrupt):
    """The user, the job's stop or a closed terminal ends the run; its exit status is 129 for SIGHUP, else 130."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__()
        self.exit_status = SIGNALLED + (signal.SIGHUP if number == signal.SIGHUP else signal.SIGINT)


# The signals so far: where Ray waits for an answer, it replaces Stop by a KeyboardInterrupt.
_received: list[int] = []


def exit_status_of(stop: BaseException) -> int:
    """Return the exit status of a command that was stopped by this exception."""
    if isinstance(stop, Stop):
        return stop.exit_status
    return Stop(_received[-1] if _received else signal.SIGINT).exit_status


@contextmanager
def stoppable() -> Generator[None]:
    """Raise `Stop` at these signals until the block ends, except signals that this process was started to ignore.

    Ray sets its own handler of SIGTERM when the driver joins a cluster: enter the block after that.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    terminals = open_terminals()

    def stop(number: int, frame: FrameType | None) -> None:
        _received.append(number)
        if number == signal.SIGHUP:
            leave_terminals(terminals)
        raise Stop(number)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def keys_for(arguments: Sequence[str], **options: Any) -> Generator[subprocess.Popen[Any]]:
    """Run a program that gets the keys that send signals, and that this process does not react to until the block ends.

    They have handlers and are not ignored: a program inherits what is ignored. They are set first: it may be faster.
    """
    numbers = (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        with subprocess.Popen(arguments, **options) as process:
            yield process
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def open_terminals() -> list[int]:
    """Return the standard file descriptors that are terminals."""
    return [descriptor for descriptor in range(3) if os.isatty(descriptor)]


def leave_terminals(terminals: list[int]) -> None:
    """Redirect closed terminals to the null device: writing to them would raise an error."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in terminals:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
