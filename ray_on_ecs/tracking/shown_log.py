"""The log of a run as it is shown: the script's lines, without those that Ray writes about itself.

Ray forwards the lines of all its processes to the driver, which prints them by this module; Ray's own logs keep all of
them. Those that Ray's job supervisor and Ray's C++ write into a job's log are left out where that is shown or stored.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from typing import IO, Any

# The dashboard sends a job's log in messages of up to ten lines, and Ray's client takes none above 4 MiB: after a line
# of 6 MB nothing more would be shown, not even the end of the run.
MAX_CHARACTERS, MARK_CHARACTERS = 64 * 2**10, 80
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
# Ray's own function that prints the lines, in ray._private.worker.
PRINT = "print_to_stdstream"
# Ray Train's workers. Their standard output has the lines of the scripts.
WORKER = "RayTrainWorker"
# Ray's autoscaler does not start nodes here.
AUTOSCALER = "autoscaler"
# Lines of Ray's processes at every start of workers, which ask for nothing.
OF_PROCESSES = re.compile(
    r"core_worker\.cc:\d+: Actor with class name: 'PreemptionWatcher' "
    r"|PYTHON worker processes have been started on node"
    r"|__ray_tqdm_magic_token__"
)
# The lines with which Ray's job supervisor begins each job's log.
OF_JOBS = re.compile(
    r"^\S+ \S+\s+INFO job_manager\.py:\d+ -- Runtime env is setting up\."
    r"|^Running entrypoint for job \S+: "
)
# A signal as Ray's C++ reports it: a first line and the stack, on standard error and once more as lines of its log.
SIGNAL = re.compile(r"(^|logging\.cc:\d+: )\*\*\* (SIG\w+) received at time=")
STACK = re.compile(r"(^|logging\.cc:\d+: )(PC: @|\s+@) ")


class Filter:
    """Leaves out Ray's lines about itself.

    Args:
        harmless: The lines to leave out, beside the report of a SIGTERM, which has several. A filter is for one stream.
    """

    def __init__(self, harmless: re.Pattern[str] = OF_JOBS) -> None:
        self._harmless = harmless
        self._signal = ""

    def shown(self, lines: Iterable[str]) -> Iterator[str]:
        """Yield the lines to show, cut to `MAX_CHARACTERS`. They have no line ends."""
        for line in lines:
            if header := SIGNAL.search(line):
                self._signal = header[2]
            is_sigterm = self._signal == "SIGTERM" and (header or STACK.search(line))
            if not (is_sigterm or self._harmless.search(line)):
                yield cut(line)


def cut(line: str) -> str:
    """Return a line of at most `MAX_CHARACTERS`; a longer one ends with the number of characters that are cut off."""
    if len(line) <= MAX_CHARACTERS:
        return line
    kept = MAX_CHARACTERS - MARK_CHARACTERS
    return f"{line[:kept]} ... [{len(line) - kept:,} more characters are not shown]"


def without_escapes(text: str) -> str:
    """Return a text without colours and other escape sequences of terminals."""
    return ESCAPES.sub("", text)


def shows_colours(stream: IO[str]) -> bool:
    """Return whether a stream is a terminal and NO_COLOR is not set. See https://no-color.org."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


class ForwardedLines:
    """Prints the lines that Ray forwards to the driver: a script's by themselves, others behind their actor's name."""

    def __init__(self) -> None:
        self._filters: dict[tuple[Any, ...], Filter] = {}

    def print(self, batch: dict[str, Any], ignore_prefix: bool = False) -> None:
        """Print the lines of one process.

        Args:
            batch: Ray's document: `lines`, `is_err` for standard error, and `pid`, `ip`, `actor_name` or `task_name`.
            ignore_prefix: Of Ray's own function; not used.
        """
        name, pid, is_error = batch.get("actor_name") or batch.get("task_name"), batch.get("pid"), batch["is_err"]
        if pid == AUTOSCALER:
            return
        if name == WORKER and not is_error:
            lines: Iterable[str] = map(cut, batch["lines"])
        else:
            stream_filter = self._filters.setdefault((batch.get("ip"), pid, is_error), Filter(OF_PROCESSES))
            lines = stream_filter.shown(batch["lines"])
        prefix = "" if name == WORKER else f"({name or pid}) "
        stream = sys.stderr if is_error else sys.stdout
        for line in lines:
            print(prefix + (line if shows_colours(stream) else without_escapes(line)), file=stream, flush=True)


def install() -> None:
    """Have Ray print by `ForwardedLines`; before `ray.init`, which hands the function to its threads."""
    from ray._private import worker

    setattr(worker, PRINT, ForwardedLines().print)
