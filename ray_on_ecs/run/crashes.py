"""Native crashes in a script's output: reports of faulthandler, and exceptions of C++ that were not caught."""

from __future__ import annotations

import re
from collections.abc import Sequence

FRAME = re.compile(r'^\s+File "(.+)", line (\d+)(?:, in | in |$)(.*)')
# First line of faulthandler, maybe after text without a newline; the frames of each thread, the newest first, and a
# list of extension modules follow.
FATAL = "Fatal Python error: "
ABORTED = f"{FATAL}Aborted"
THREAD = re.compile(r"(?:Thread|Current thread) 0x|Stack \(most recent call first\)")
# First line of C++'s report, the line with the exception's text, and the prefix of that text in the last words.
TERMINATE = re.compile(r"terminate called (?:after throwing|without an active|recursively).*")
WHAT = re.compile(r"\s*what\(\):\s+(.+)")
OF_CPP = "C++ exception: "
CRASHES = (FATAL, OF_CPP)


def is_start(line: str) -> bool:
    """Return whether this line begins a crash."""
    return FATAL in line or TERMINATE.search(line) is not None


def crash(output: Sequence[str]) -> tuple[str, str | None] | None:
    """Return what ended a process and its place, such as `train.py:12`: the exception, or the signal with its frame."""
    fatal = next((number for number, line in enumerate(output) if FATAL in line), None)
    whats = [found[1] for found in map(WHAT.match, output) if found]
    terminates = [found[0] for found in map(TERMINATE.search, output) if found]
    if terminates and (fatal is None or ABORTED in output[fatal]):
        return OF_CPP + (whats or terminates)[-1], None
    if fatal is None:
        return None
    text = output[fatal][output[fatal].index(FATAL) :]
    frame = _frame(output[fatal + 1 :])
    if frame is None:
        return text, None
    file, number, function = frame.groups()
    return f'{text} in {function} (File "{file}", line {number})', f"{file}:{number}"


def _frame(stacks: Sequence[str]) -> re.Match[str] | None:
    """Return the innermost frame of the current thread, or of the last one if it has no Python code."""
    threads = [number for number, line in enumerate(stacks) if THREAD.match(line)]
    current = [number for number in threads if stacks[number].startswith("Current")] or threads[-1:]
    begin = current[0] + 1 if current else 0
    end = next((number for number in threads if number >= begin), None)
    return next(filter(None, map(FRAME.match, stacks[begin:end])), None)
