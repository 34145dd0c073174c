"""Filters for a run's log: the script's lines are shown, and Ray's lines about itself are not.

Ray forwards the output of all its processes to the driver, which prints it through this module; Ray's log files keep
every line. The lines that its C++ code writes into a driver's log at SIGTERM are left out wherever that is shown or
stored.
"""

from __future__ import annotations

import os
import re
import sys
import uuid
from collections.abc import Iterable, Iterator
from typing import IO, Any

# A longer line, such as a printed tensor of megabytes, is cut: it would bury the others.
MAX_CHARACTERS, MARK_CHARACTERS = 64 * 2**10, 80
# Colours and styles; all other sequences can move the cursor, write the clipboard, or show a link that is another one.
COLOURS = re.compile(r"(\x1b\[[0-9;:]*m)")
ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI
    r"|(?:\x1b[PX\]^_]|[\x90\x98\x9d-\x9f])[^\x07\n\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"  # strings: OSC, DCS, SOS, PM, APC
    r"|\x1b[ -/]*[0-~]"
)
# After these the next line has no style.
RESETS = ("\x1b[m", "\x1b[0m")
# All but tab and newline, and the marks that turn the direction of text.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]")
# A line that is tqdm's progress bar alone, in any format of its numbers.
IN_BRACKETS = r"\[[^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*\]"
BAR = re.compile(rf"\d%\|.*\| *[\d.?]+\w*/[\d.?]+\w* {IN_BRACKETS}\s*$")
# The actors whose standard output is the script's: workers of a run, and of a program that uses Ray Train.
WORKERS = ("ScriptActor", "RayTrainWorker")
# Lines that Ray's processes write at every start of workers.
OF_PROCESSES = re.compile(
    r"core_worker\.cc:\d+: Actor with class name: 'PreemptionWatcher' "
    r"|PYTHON worker processes have been started on node"
    r"|__ray_tqdm_magic_token__"
)
# The end of Ray's message on a lost raylet.
OF_RAYLET = re.compile(r" Last \d+ lines of the Raylet logs:\n.*", re.DOTALL)
# A signal as Ray's C++ code reports it: a header and the stack, on standard error and again as lines of its log.
SIGNAL = re.compile(r"(^|logging\.cc:\d+: )\*\*\* (SIG\w+) received at time=")
STACK = re.compile(r"(^|logging\.cc:\d+: )(PC: @|\s+@) ")


class Filter:
    """Filter of one stream, which leaves out the harmless lines and those that report a SIGTERM."""

    def __init__(self, harmless: re.Pattern[str] | None = None) -> None:
        self._harmless = harmless
        self._signal = ""

    def shown(self, lines: Iterable[str]) -> Iterator[str]:
        """Yield the lines to show, cut to `MAX_CHARACTERS`. They have no line ends."""
        for line in lines:
            header = SIGNAL.search(line)
            if header:
                self._signal = header[2]
            is_sigterm = self._signal == "SIGTERM" and (header or STACK.search(line))
            if not is_sigterm and not (self._harmless and self._harmless.search(line)):
                yield cut(line)


def cut(line: str, omitted: int = 0) -> str:
    """Return a line of at most `MAX_CHARACTERS`; a longer or already cut one ends with the number of those omitted."""
    if len(line) <= MAX_CHARACTERS and not omitted:
        return line
    shown = line[: MAX_CHARACTERS - MARK_CHARACTERS]
    return f"{shown} ... [{len(line) - len(shown) + omitted:,} more characters are not shown]"


def printable(line: str, *, has_colours: bool = False) -> str:
    """Return a line without what would change the terminal: escape sequences and control characters.

    With `has_colours` its colours stay, and end with it: they could conceal what is printed after it.
    """
    parts = COLOURS.split(line)
    parts[::2] = [CONTROLS.sub("", ESCAPES.sub("", part)) for part in parts[::2]]
    text = "".join(parts if has_colours else parts[::2])
    if has_colours and len(parts) > 1 and parts[-2] not in RESETS:
        text += RESETS[-1]
    return text.encode(errors="replace").decode()  # a JSON document may have halves of characters


def shows_colours(stream: IO[str]) -> bool:
    """Return True if a stream is a terminal and NO_COLOR (https://no-color.org) is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


class ForwardedLines:
    """Printer of the lines that Ray forwards to the driver; all but a script's get their actor's name as a prefix."""

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        self.arrived: set[str] = set()  # the last lines of workers, which are not shown
        self._filters: dict[tuple[Any, ...], Filter] = {}

    def new_mark(self) -> str:
        """Return a last line for one worker; Ray may forward it several times if nodes share a disk."""
        return f"{self._mark} {uuid.uuid4().hex}"

    def print(self, batch: dict[str, Any], ignore_prefix: bool = False) -> None:
        """Print the lines of one process, as Ray's own function of these arguments does."""
        name = batch.get("actor_name") or batch.get("task_name")
        pid = batch.get("pid")
        is_error = batch["is_err"]
        if pid == "autoscaler":  # it does not start nodes here
            return
        if name in WORKERS and not is_error:
            last = {line for line in batch["lines"] if line.startswith(self._mark)}
            lines: Iterable[str] = [cut(line) for line in batch["lines"] if line not in last]
            self.arrived |= last
        else:
            stream_filter = self._filters.setdefault((batch.get("ip"), pid, is_error), Filter(OF_PROCESSES))
            lines = stream_filter.shown(OF_RAYLET.sub("", line) for line in batch["lines"])
        prefix = "" if name in WORKERS else f"({name or pid}) "
        stream = sys.stderr if is_error else sys.stdout
        for line in lines:
            print(prefix + printable(line, has_colours=shows_colours(stream)), file=stream, flush=True)
