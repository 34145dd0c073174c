"""Stacks of a script's Python processes, read from outside by py-spy while they run on."""

from __future__ import annotations

import json
import os
import re
import shutil
import site
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import ray_on_ecs
from ray_on_ecs.errors import one_line
from ray_on_ecs.run import supervisor
from ray_on_ecs.run.collectives import Last

# For all processes of a worker; one takes some 20 ms.
READ_SECONDS = 20.0
# py-spy reads a process that changes its stacks meanwhile: the next attempt succeeds.
ATTEMPTS = 3
# The last one is what the runner starts in a script's process.
LIBRARY = re.compile(
    r"^<frozen |/(?:site|dist)-packages/|/lib(?:64)?/(?:pypy|python)3[^/]*/|/autoload/ray_on_ecs_\w+\.py$"
)
OWN = f"{Path(ray_on_ecs.__file__).parent}/"
# A process's rank is in the variables with which it was started: those of Open MPI's processes, and torchrun's.
RANK_VARIABLES = ("PMIX_RANK", "RANK")
NO_RIGHTS = "this node does not allow ptrace, which py-spy needs"
# The output of a script at SIGABRT.
FAULTHANDLER = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')
FAULTHANDLER_THREAD = re.compile(r"^(?:Current thread|Thread) 0x")


@dataclass(frozen=True)
class Frame:
    """A frame of a stack."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"

    @property
    def is_users(self) -> bool:
        """True for the user's code, False for that of Python, packages and the runner."""
        return not (LIBRARY.search(self.file) or self.file.startswith(OWN))

    @property
    def place(self) -> str:
        """The function and the line, in short."""
        at = f"{Path(self.file).name}:{self.line}"
        return at if self.function == "<module>" else f"{self.function}, {at}"


@dataclass(frozen=True)
class Thread:
    """A thread; the frames begin with the innermost one."""

    name: str
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class ProcessStacks:
    """A Python process of a script."""

    pid: int
    parent: int = 0
    rank: int | None = None  # in its variables
    name: str = ""  # such as `pt_data_worker`
    state: str = ""  # as psutil names it
    threads: tuple[Thread, ...] = ()  # the main thread first; empty if they can't be read
    fault: str = ""  # why they can't be read


@dataclass(frozen=True)
class Stacks:
    """Stacks of a worker's script.

    Attributes:
        request: The ID of the request, or nothing for those of a hang.
        processes: Its Python processes.
        words: The last words of a script that was ended, which may have its stacks, too.
        node: The node, by its instance and address; empty on one machine.
        joined: The last collective, if it is known.
    """

    request: str = ""
    processes: tuple[ProcessStacks, ...] = ()
    words: str = ""
    node: str = ""
    joined: Last | None = None

    def __str__(self) -> str:
        texts = [_text(process) for process in self.processes]
        return "\n".join([*texts, self.words] if self.words else texts)


def read(root: int) -> tuple[ProcessStacks, ...]:
    """Return the stacks of all Python processes of a script, which run on, by the process of its supervisor."""
    try:
        supervised = psutil.Process(root).children(recursive=True)
    except psutil.Error:
        return ()
    deadline = time.monotonic() + READ_SECONDS
    return tuple(process for each in supervised if (process := _read(each, deadline)))


def in_words(words: str) -> tuple[Thread, ...]:
    """Return the stacks that a script has printed at SIGABRT, the main thread first."""
    threads: list[list[Frame]] = []
    for line in words.splitlines():
        if FAULTHANDLER_THREAD.match(line):
            threads.append([])
        elif threads and (found := FAULTHANDLER.match(line)):
            threads[-1].append(Frame(found[3], found[1], int(found[2])))
    # The main thread is the last one; its stack begins with the module.
    return tuple(Thread("" if number else "MainThread", tuple(each)) for number, each in enumerate(reversed(threads)))


def _read(process: psutil.Process, deadline: float) -> ProcessStacks | None:
    """Return the stacks of a process; None if it is not one of Python's, or has ended."""
    with suppress(psutil.Error, OSError):
        command = process.cmdline()
        if "python" not in Path(process.exe()).name or supervisor.__file__ in command:
            return None
        variables = process.environ()
        rank = next((int(variables[name]) for name in RANK_VARIABLES if variables.get(name, "").isdecimal()), None)
        state, name = process.status(), process.name()
        threads, fault = _threads(process.pid, deadline)
        return ProcessStacks(process.pid, process.ppid(), rank, name, state, threads, fault)
    return None


def _threads(pid: int, deadline: float) -> tuple[tuple[Thread, ...], str]:
    """Return the threads of a process, or the reason why they can't be read.

    The process is not paused: one that is stopped by ptrace stays so if py-spy is killed in the wrong moment.
    """
    program = _py_spy()
    if program is None:
        return (), "py-spy is neither beside Python nor on PATH; pip install py-spy"
    fault = "not within the time for it"
    for _ in range(ATTEMPTS):
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            break
        try:
            command = [program, "dump", "--nonblocking", "--json", "--pid", str(pid)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
            return _parsed(pid, json.loads(done.stdout)), ""
        except (OSError, subprocess.TimeoutExpired) as cause:
            return (), one_line(str(cause))
        except (ValueError, LookupError, TypeError):
            fault = one_line(done.stderr.strip() or "py-spy has not answered")
            if "ermission" in fault or "not permitted" in fault:
                return (), NO_RIGHTS
    return (), fault


def _py_spy() -> str | None:
    """Return the path of py-spy: in this environment, where `pip install --user` puts it, or on PATH."""
    places = (str(Path(sys.executable).parent), f"{site.getuserbase()}/bin", os.environ.get("PATH", os.defpath))
    return shutil.which("py-spy", path=os.pathsep.join(places))


def _parsed(pid: int, document: list[dict[str, Any]]) -> tuple[Thread, ...]:
    """Return the threads in py-spy's answer, the main thread first."""
    ordered = sorted(document, key=lambda thread: thread["os_thread_id"] != pid)
    return tuple(
        Thread(
            thread["thread_name"] or "",
            tuple(
                Frame(each["name"].rpartition("<locals>.")[2], each["filename"], int(each["line"]))
                for each in thread["frames"]
            ),
        )
        for thread in ordered
    )


def _text(process: ProcessStacks) -> str:
    lines = [f"process {process.pid} ({process.name}, {process.state})"]
    if process.fault:
        lines.append(f"  its stacks can't be read ({process.fault})")
    for thread in process.threads:
        lines += [f"  thread {thread.name or 'without a name'}", *(f"    {frame}" for frame in thread.frames)]
    return "\n".join([*lines, ""])
