"""The end of a script's output: the exception of its traceback, or the line that best explains its end."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

# Prefix that torch puts before each line of an exception.
TORCH_PREFIX = re.compile(r"^\[rank\d+\]: ?")
# How an exception is named at the end of a traceback, with its module.
EXCEPTION = re.compile(r"([^\W\d][\w.]*)(: |$)")
# The same where no header of a traceback stands before it, as with the SyntaxError of the script itself.
NAMED_ERROR = re.compile(r"([\w.]*(?:Error|Exception|Interrupt))(: |$)")
# A module that `python -m` does not find, for which it has no traceback.
NO_MODULE = re.compile(
    r"\S*(?i:python|pypy)[\d.]*: "
    r"(?:Error while finding module specification for .*\(ModuleNotFoundError: (No module .*?)\).*|(No module .*))"
)
# Errors of Ray that report an error in another process.
OF_RAY = ("ray.exceptions.", "ray.train.", "ray.tune.")
# Prefixes of Ray's lines on a lost process or node; the last such line has the reason.
LOST = "The actor "
FRAME = re.compile(r'^\s+File "(.+)", line (\d+)(?:, in | in |$)(.*)')
TRACEBACK = "Traceback (most recent call last)"
# How faulthandler begins; the frames of each thread, and a list of extension modules, follow.
FATAL = "Fatal Python error: "
# Open MPI ends some lines with a zero.
BLANKS = "\0 \t\r\n"


@dataclass(frozen=True)
class LastWords:
    """Reason for a script's end, from its output.

    Attributes:
        text: The most informative line; empty without one.
        exception: The type of the exception that ended it, with its module, or None.
        place: The innermost line of that exception's traceback, such as `train.py:12`, or None.
        advice: What mends it; empty if that isn't known.
    """

    text: str = ""
    exception: str | None = None
    place: str | None = None
    advice: str = ""


def read(lines: Sequence[str], status: int) -> LastWords:
    """Return why a script has ended.

    Args:
        lines: The end of its output.
        status: Its exit status, negative for a signal. An exception only explains a positive one.
    """
    bare = [TORCH_PREFIX.sub("", line).rstrip(BLANKS) for line in lines]
    output = [line for line in bare if line]
    if not output:
        return LastWords()
    words: LastWords | None = None
    if status < 0:
        words = _crash(output)
    elif status > 0:
        words = _exception(output)
    return words or LastWords(output[-1].lstrip())


def _exception(output: list[str]) -> LastWords | None:
    """Return the exception of the last traceback, or of `python -m`."""
    if missing := NO_MODULE.fullmatch(output[-1]):
        return LastWords(f"ModuleNotFoundError: {missing[1] or missing[2]}", "ModuleNotFoundError")
    headers = [number for number, line in enumerate(output) if line.startswith(TRACEBACK)]
    if not headers:
        error = NAMED_ERROR.match(output[-1])
        place = _place(output[:-1])
        return LastWords(output[-1], error[1], place) if error and place else None
    block = output[headers[-1] + 1 :]
    after = [(number, line) for number, line in enumerate(block) if not line.startswith(" ")]
    # mpirun may write a line of another rank between the lines of a traceback.
    for number, line in after:
        error = EXCEPTION.match(line)
        if error is None:
            continue
        if error[1].startswith(OF_RAY):  # the error of the actor or task is below it
            for cause_number, text in reversed(after[1:]):
                cause = NAMED_ERROR.match(text)
                if cause:
                    return LastWords(_sentence(block[cause_number:]), cause[1], _place(block[:cause_number]))
            lost = [text for _, text in after[1:] if text.startswith(LOST)]
            if lost:
                return LastWords(f"{error[1]}: {lost[-1]}", error[1], _place(block[:number]))
        return LastWords(_sentence(block[number:]), error[1], _place(block[:number]))
    return LastWords(after[0][1]) if after else None


def _sentence(lines: Sequence[str]) -> str:
    """Return the first line, and the next ones as long as it ends with a colon, since such a line explains nothing."""
    text, *rest = lines
    for line in rest:
        if not text.endswith(":"):
            break
        text = f"{text} {line.strip()}"
    return text


def _crash(output: list[str]) -> LastWords | None:
    """Return faulthandler's line for a native crash, with the first frame."""
    start = next((number for number, line in enumerate(output) if line.startswith(FATAL)), None)
    if start is None:
        return None
    frame = next(filter(None, map(FRAME.match, output[start:])), None)
    if frame is None:
        return LastWords(output[start])
    file, number, function = frame.groups()
    return LastWords(f'{output[start]} in {function} (File "{file}", line {number})', place=f"{file}:{number}")


def _place(lines: Sequence[str]) -> str | None:
    """Return the last frame of these lines."""
    frames = list(filter(None, map(FRAME.match, lines)))
    return f"{frames[-1][1]}:{frames[-1][2]}" if frames else None
