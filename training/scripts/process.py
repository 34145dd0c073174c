"""A script's process: its output by lines, its last lines, its stacks if it hangs, and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from training.scripts import supervisor

LAST_LINES = 50
# How long a process has to write its stacks, and its last lines after it has ended.
STACK_SECONDS = 5.0


class ScriptProcess:
    """A command that runs in a process group of its own; a context. The group ends with this process or the context.

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

    def heard(self) -> None:
        """Count a sign of life that is not a line of output."""
        self.heard_at = time.monotonic()

    def terminate(self) -> None:
        """Send SIGTERM to the script."""
        self._process.send_signal(signal.SIGTERM)

    def stacks(self) -> str:
        """End the script and return what it has written last: a Python script writes the stacks of its threads.

        PYTHONFAULTHANDLER must be among its variables. A process that the system has stopped writes nothing.
        """
        before = len(self.last_lines)
        self.last_lines = deque(list(self.last_lines), maxlen=None)
        self._process.send_signal(signal.SIGABRT)
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
        self._reader.join()  # nothing holds the pipe any more
        if self._process.stdout:
            self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.heard()
            self.last_lines.append(line)
            self._on_line(line)
