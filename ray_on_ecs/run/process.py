"""A script's process: its output by lines, its last lines, its stacks if it hangs, and its end."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from ray_on_ecs.run import supervisor
from ray_on_ecs.run.group import Member

LAST_LINES = 50
# How long a process has to write its stacks, and its last lines after it has ended.
STACK_SECONDS = 5.0
# What torch puts before each line of an exception.
TORCH_PREFIX = re.compile(r"^\[rank\d+\]: ?")
# How an exception is named at the end of a traceback, with its module.
EXCEPTION = re.compile(r"[^\W\d][\w.]*(: |$)")
# Open MPI ends some lines with a zero.
BLANKS = "\0 \t\r\n"


class ScriptProcess:
    """A command and all that it starts; a context. They end with this process or the context, or with the command.

    Args:
        argv: The command.
        variables: Its environment.
        folder: Its working directory.
        on_line: Called with each line of its output, standard error included, on a thread of its own.

    Attributes:
        last_lines: The end of its output.
        heard_at: When it last gave a sign of life (`time.monotonic`): a line, or `heard()`.
    """

    def __init__(
        self, argv: Sequence[str], variables: Mapping[str, str], folder: Path, on_line: Callable[[str], None]
    ) -> None:
        self._on_line = on_line
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self.heard_at = time.monotonic()
        self._status_reader, status_writer = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", supervisor.__file__, str(status_writer), *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(status_writer,),
            env=dict(variables),
            cwd=folder,
            start_new_session=True,
            text=True,
            errors="replace",
        )
        os.close(status_writer)
        self._reader = threading.Thread(target=self._read, name="script output", daemon=True)
        self._reader.start()
        self._status: int | None = None

    def __enter__(self) -> ScriptProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        os.close(self._status_reader)

    def poll(self) -> int | None:
        """Return the exit status if the script has ended and all its output was read, else None.

        It is negative if a signal has ended the script: `-SIGKILL`.
        """
        if self._status is None and self._process.poll() is not None:
            self._reader.join(STACK_SECONDS)
            said = os.read(self._status_reader, 16)
            self._status = int(said) if said else self._process.returncode
        return self._status

    def wait(self, seconds: float) -> int | None:
        """Wait for the script's end; return as `poll` does."""
        try:
            self._process.wait(max(seconds, 0.0))
        except subprocess.TimeoutExpired:
            return None
        return self.poll()

    def describe(self, member: Member) -> Member:
        """Return what the others should know of the worker, with how the script is doing."""
        status = self.poll()
        silent_seconds = time.monotonic() - self.heard_at if status is None else math.inf
        return replace(member, status=status, silent_seconds=silent_seconds)

    def learn(self, members: Mapping[int, Member]) -> None:
        """Take what is known of the workers, by rank: a script by itself needs nothing of it."""

    def heard(self) -> None:
        """Count a sign of life that is not a line of output."""
        self.heard_at = time.monotonic()

    @property
    def pid(self) -> int:
        """The process whose descendant the script is."""
        return self._process.pid

    @property
    def last_words(self) -> str:
        """The line that says best why the script has ended: of an exception, or the last one."""
        return last_words(list(self.last_lines), self.poll() or 0)

    def terminate(self) -> None:
        """Send SIGTERM to the script."""
        self._process.send_signal(signal.SIGTERM)

    def abort(self) -> None:
        """Send SIGABRT to the script."""
        self._process.send_signal(signal.SIGABRT)

    def stacks(self) -> str:
        """End the script and return what it has written last: a Python script writes the stacks of its threads.

        PYTHONFAULTHANDLER must be among its variables. A process that the system has stopped writes nothing.
        """
        before = len(self.last_lines)
        self.last_lines = deque(list(self.last_lines), maxlen=None)
        self.abort()
        self.wait(STACK_SECONDS)
        return "".join(list(self.last_lines)[before:])

    def kill(self) -> None:
        """Kill the script and all processes that it has started."""
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(STACK_SECONDS)
        except subprocess.TimeoutExpired:  # the supervisor was stopped by the system
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._reader.join(STACK_SECONDS)
        if self._process.stdout and not self._reader.is_alive():  # else a process that hides from us holds the pipe
            self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.heard()
            self.last_lines.append(line)
            self._on_line(line)


def last_words(lines: Sequence[str], status: int) -> str:
    """Return the line that says best why a script has ended; empty if there is none.

    Args:
        lines: The end of its output.
        status: Its exit status; if that is no signal's, the exception of the last traceback is the reason.
    """
    said = [TORCH_PREFIX.sub("", line).rstrip(BLANKS) for line in lines]
    said = [line for line in said if line]
    tracebacks = [number for number, line in enumerate(said) if line.startswith("Traceback (most recent call last)")]
    if status > 0 and tracebacks:
        after = [line for line in said[tracebacks[-1] + 1 :] if not line.startswith(" ")]
        # mpirun may write a line of another rank between those of a traceback.
        said = [line for line in after if EXCEPTION.match(line)][:1] or after[:1] or said
    return said[-1].lstrip() if said else ""
