"""Process of a script: its output by lines, its last lines, its stacks if it hangs, and its end."""

from __future__ import annotations

import codecs
import fcntl
import logging
import math
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from ray_on_ecs.errors import one_line
from ray_on_ecs.private_folder import node_folder
from ray_on_ecs.run import last_words, memory, supervisor
from ray_on_ecs.run.bars import Bars
from ray_on_ecs.run.group import Directive
from ray_on_ecs.run.last_words import LastWords
from ray_on_ecs.run.stacks import ProcessStacks, read
from ray_on_ecs.secrets import Masker
from ray_on_ecs.tracking.shown_log import MAX_CHARACTERS, cut

logger = logging.getLogger(__name__)

LAST_LINES = 200
LOG_LINES = 50
STACK_SECONDS = 5.0  # for a process to write its stacks, and its last lines after it has ended
CHUNK_BYTES = 2**16
ENDS = re.compile("(\r*\n|\r)")
KEPT_CHARACTERS = 2 * MAX_CHARACTERS  # of a line, before its secrets are masked
WORKER_KILLED = "is killed by signal: Killed"  # PyTorch's words for a DataLoader worker
SIGKILL_STATUSES = (-signal.SIGKILL, 128 + signal.SIGKILL)  # the latter by a shell for its command


@dataclass(frozen=True)
class ProcessOptions:
    """Surroundings of a command.

    Attributes:
        variables: Its environment.
        folder: Its working directory.
        on_line: Called with each line of its output to show, standard error included, on another thread.
        lock: A file that is locked (shared) until the command and all that it has started have ended.
        mask: Hides secrets in each line.
        on_state: Called with each line before `on_line`, and with each state of a progress bar, shown or not.
    """

    variables: Mapping[str, str]
    folder: Path
    on_line: Callable[[str], None]
    lock: Path | None = None
    mask: Masker = field(default_factory=Masker)
    on_state: Callable[[str], object] = bool  # which does nothing


class ScriptProcess:
    """A command and all that it starts; a context. They end with the context or the command.

    If this process ends without ending the context, the command gets SIGTERM and 30 s.

    Attributes:
        pid: The process of its supervisor, whose descendant the script is.
        last_lines: The end of its output.
        heard_at: When it last gave a sign of life (`time.monotonic`): some output, or `heard()`.
        ended_at: When it ended (Unix time), or None before.
    """

    def __init__(self, argv: Sequence[str], options: ProcessOptions) -> None:
        self._options = options
        self._bars = Bars()
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self.heard_at = time.monotonic()
        self._mark = uuid.uuid4().hex
        self._oom_kills = memory.oom_kills()
        self._status_reader, status_writer = os.pipe()
        # The supervisor holds the lock until it has killed all that the command has started.
        inherited = [status_writer]
        if options.lock is not None:
            inherited.append(hold(options.lock, fcntl.LOCK_SH))
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", supervisor.__file__, str(status_writer), self._mark, *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=inherited,
            env=dict(options.variables),
            cwd=options.folder,
            start_new_session=True,
        )
        for descriptor in inherited:
            os.close(descriptor)
        self._process.wait()  # it leaves the supervisor, which is not its child
        self._status_poll = select.poll()
        self._status_poll.register(self._status_reader, select.POLLIN)
        self._told = b""
        self._has_ended = self._has_warned = False
        while b"\n" not in self._told and self._listen(None):
            pass
        self.pid = int(self._told.partition(b"\n")[0] or 0)
        self._reader = threading.Thread(target=self._read, name="script output", daemon=True)
        self._reader.start()
        self._status: int | None = None
        self._killed = ""  # reason for the kernel's kill of a process, if memory was full
        self._words: LastWords | None = None  # once it has ended
        self.ended_at: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        os.close(self._status_reader)

    def poll(self) -> int | None:
        """Return the exit status if the script has ended and all its output was read, else None.

        It is negative if a signal has ended the script: `-SIGKILL`.
        """
        return self.wait(0.0)

    def wait(self, seconds: float) -> int | None:
        """Wait for the script's end; return as `poll` does."""
        deadline = time.monotonic() + seconds
        while not self._has_ended and self._listen(max(deadline - time.monotonic(), 0.0)):
            pass
        if self._status is None and self._has_ended:
            told = self._told.decode().partition("\n")[2].split()
            if not told:  # the supervisor itself was killed
                supervisor.kill_marked(self._mark)
            self._reader.join(STACK_SECONDS)
            status, ended_at, largest = told or (-signal.SIGKILL, time.time(), 0)
            self.ended_at, self._status = float(ended_at), int(status)
            if memory.oom_kills() > self._oom_kills:
                self._killed = memory.killed_words(int(largest))
        return self._status

    def _listen(self, seconds: float | None) -> bool:
        """Wait for what the supervisor tells; return whether it has told something."""
        if not self._status_poll.poll(None if seconds is None else seconds * 1000):
            return False
        text = os.read(self._status_reader, 64)
        self._told += text
        self._has_ended = not text
        return bool(text)

    def describe(self) -> dict[str, Any]:
        """Return the state of the script, as fields of its worker's status."""
        status = self.poll()
        if status is None:
            return {"silent_seconds": time.monotonic() - self.heard_at}
        return {
            "silent_seconds": math.inf,
            "status": status,
            "ended_at": self.ended_at,
            "words": self.last_words,
            "log": tuple(line.rstrip("\n") for line in list(self.last_lines)[-LOG_LINES:]),
        }

    def has_ended(self, directive: Directive) -> bool:
        """Return whether all processes of the script have ended."""
        return self.poll() is not None

    def learn(self, directive: Directive) -> None:
        """Take what the driver says of the other workers; only MPI needs it."""

    def heard(self) -> None:
        """Count a sign of life that is not a line of output."""
        self.heard_at = time.monotonic()

    @property
    def last_words(self) -> LastWords:
        """Reason for the script's end, by its output and the kernel, which kills for memory."""
        status = self.poll()
        if self._words:
            return self._words
        lines = list(self.last_lines)
        try:
            words = self.explain(lines, status or 0)
        except Exception as error:  # an unexpected form of output
            logger.warning(f"the end of the output could not be read ({one_line(error)})")
            words = LastWords("".join(lines[-1:]).strip())
        if self._killed and status in SIGKILL_STATUSES:
            words = LastWords(self._killed)
        elif self._killed and WORKER_KILLED in words.text:
            words = replace(words, text=f"{words.text.rstrip('.')}: {self._killed}")
        self._words = None if status is None else words
        return words

    def explain(self, lines: Sequence[str], status: int) -> LastWords:
        """Return the reason for the script's end, by the end of its output and its exit status."""
        return last_words.read(lines, status)

    def terminate(self) -> None:
        """Send SIGTERM to the script."""
        self._signal(signal.SIGTERM)

    def abort(self) -> None:
        """Send SIGABRT to the script."""
        self._signal(signal.SIGABRT)

    def _signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def stacks(self) -> str:
        """End the script and return what it has written last: a Python script writes the stacks of its threads.

        PYTHONFAULTHANDLER must be among its variables. A process that the system has stopped writes nothing.
        """
        before = len(self.last_lines)
        self.last_lines = deque(list(self.last_lines), maxlen=None)
        self.abort()
        self.wait(STACK_SECONDS)
        return "".join(list(self.last_lines)[before:])

    def dump(self) -> tuple[ProcessStacks, ...]:
        """Return the stacks of all Python processes of the script, which run on."""
        return read(self.pid)

    def kill(self) -> None:
        """Kill the script and all processes that it has started."""
        if self._process.stdin and not self._process.stdin.closed:
            with suppress(OSError):
                os.write(self._process.stdin.fileno(), supervisor.KILL_NOW)
            self._process.stdin.close()
        if self.wait(STACK_SECONDS) is None:  # the supervisor was stopped by the system
            supervisor.kill_marked(self._mark)
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self.wait(STACK_SECONDS)
        self._reader.join(STACK_SECONDS)
        if self._process.stdout and not self._reader.is_alive():  # else another process holds the pipe
            self._process.stdout.close()

    def _read(self) -> None:
        """Pass on the output by lines; a part of a line is a sign of life, too."""
        assert self._process.stdout is not None
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        line, omitted, held = "", 0, ""
        while chunk := os.read(self._process.stdout.fileno(), CHUNK_BYTES):
            self.heard()
            text = held + decoder.decode(chunk)
            whole = text.rstrip("\r")  # a newline may follow
            held = text[len(whole) :]
            parts = ENDS.split(whole)
            for end, mark in zip(parts[::2], parts[1::2], strict=False):
                line, omitted = _appended(line, end, omitted)
                self._survive(self._take, line, omitted, mark)
                line, omitted = "", 0
            line, omitted = _appended(line, parts[-1], omitted)
        if line:
            self._survive(self._take, line, omitted, held)
        for state in self._bars.rest():
            self._survive(self._options.on_line, f"{state}\n")

    def _survive(self, take: Callable[..., object], *arguments: object) -> None:
        """Call with a part of the output; an error must not end the reader: the script would wait at a full pipe."""
        try:
            take(*arguments)
        except Exception as cause:  # such as of a full disk
            if not self._has_warned:
                logger.warning(
                    f"lines of the output are not shown or not recorded ({one_line(cause)}); the script runs on"
                )
            self._has_warned = True

    def _take(self, line: str, omitted: int, end: str) -> None:
        line = _shown(line, omitted, self._options.mask)
        if self._bars.is_state(line, end):
            self._survive(self._options.on_state, line)
            if shown := self._bars.take(line):
                self._options.on_line(f"{shown}\n")
            return
        line += "\n" if end else ""
        self.last_lines.append(line)
        self._survive(self._options.on_state, line)  # else the line would not be shown
        self._options.on_line(line)


def _appended(line: str, text: str, omitted: int) -> tuple[str, int]:
    """Append a text to a line as far as it is kept; return the line, and how many characters of it are omitted."""
    kept = text[: max(KEPT_CHARACTERS - len(line), 0)]
    return line + kept, omitted + len(text) - len(kept)


def _shown(line: str, omitted: int, mask: Masker) -> str:
    """Return what is shown of a line, of which so many characters are not kept, without secrets."""
    line = mask(line)
    if omitted:  # the end of what is kept may be a part of a secret, which is not masked
        length = max(len(line) - mask.longest, 0)
        line, omitted = line[:length], omitted + len(line) - length
    return cut(line, omitted)


def hold(lock: Path, kind: int) -> int:
    """Lock a file and return its descriptor, which holds the lock until all copies of it are closed.

    Raises:
        BlockingIOError: Another process holds it, and the kind has LOCK_NB.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, kind)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def scripts_lock(uri: str) -> Path:
    """Return the lock that the scripts of a run on this node hold until they have ended, by the run's folder."""
    return node_folder("scripts", uri)


def wait_for_end(lock: Path, seconds: float) -> bool:
    """Wait until no command holds a lock; return whether that is so."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            os.close(hold(lock, fcntl.LOCK_EX | fcntl.LOCK_NB))
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        else:
            return True
