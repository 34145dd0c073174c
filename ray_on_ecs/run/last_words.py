"""The end of a script's output: the exception of its traceback, or the line that best explains its end."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

# Prefix that torch puts before each line of an exception.
TORCH_PREFIX = re.compile(r"^\[rank\d+\]: ?")
# How an exception is named at the end of a traceback, with its module.
EXCEPTION = re.compile(r"([^\W\d][\w.]*)(: |:?$)")
# The same where no header of a traceback stands before it, as with the SyntaxError of the script itself.
NAMED_ERROR = re.compile(r"([\w.]*(?:Error|Exception|Interrupt))(: |:?$)")
# A module that `python -m` does not find, for which it has no traceback.
NO_MODULE = re.compile(
    r"\S*(?i:python|pypy)[\d.]*: "
    r"(?:Error while finding module specification for .*\(ModuleNotFoundError: (No module .*?)\).*|(No module .*))"
)
# Errors of Ray that report an error in another process.
OF_RAY = ("ray.exceptions.", "ray.train.", "ray.tune.")
# Errors of a program that has started another one, which has written its own error before; up to so many lines, such as
# torchrun's, are between both.
OF_PARENT = ("CalledProcessError", "ChildFailedError", "ProcessExitedException", "BrokenProcessPool")
LINES_BETWEEN = 12
# The lines of torchrun's and of Python's logs, and its report of a process that has written nothing.
LOG_LINE = re.compile(r"[A-Z]\d{4} |\[|\d{4}-\d\d-\d\d |(?:INFO|WARNING|ERROR)\b")
ELASTIC = re.compile(r"\s+(?:exitcode  : |traceback : (?!To enable))(.+)")
# Python's line for a folder that it can't run, which has no traceback; and argparse's for a wrong flag.
NO_MAIN = re.compile(r"\S*python[\d.]*: can't find '__main__'")
NO_FLAG = re.compile(r"[\w./-]+: error: ")
# Hydra's last line, after its error of a configuration.
HYDRA = "Set the environment variable HYDRA_FULL_ERROR=1"
# The error of a wrong flag, which some libraries show before their help, or in a box.
FLAG_ERROR = re.compile(r"(?:[\w./-]+: )?(?:ERROR|FATAL|error|Error)\b.*: ")
BOX = " |│─╭╮╰╯"
# pytest's last line, and the ones above it.
PYTEST = re.compile(r"=*\s*\d+ (?:failed|passed|error).* in [\d.]+s\b")
PYTEST_ERROR = re.compile(r"(?:FAILED|ERROR) (\S+)(?: - (.+))?")
# An answer from a person was wanted: by input(), click, getpass() and pdb.
NO_INPUT = re.compile(
    r"^EOFError: EOF when reading a line$|(?:^|: )Aborted[!.]$"
    r"|^(?:bdb\.BdbQuit|click\.exceptions\.Abort)$"
)
# Prefixes of Ray's lines on a lost process or node; the last such line has the reason.
LOST = "The actor "
FRAME = re.compile(r'^\s+File "(.+)", line (\d+)(?:, in | in |$)(.*)')
TRACEBACK = "Traceback (most recent call last)"
# Also of PyTorch's DataLoader, and after a space of Open MPI, which mixes outputs.
HEADER = re.compile(rf"(?: |Original )?{re.escape(TRACEBACK)}")
# An exception group, whose lines have a margin; and the line before each of its exceptions.
GROUP = f"Exception Group {TRACEBACK}"
MARGIN = re.compile(r"^ +[|+] ?")
IN_GROUP = re.compile(r"-+\+?-+ \d+ -+$")
RICH_FRAME = "\N{BOX DRAWINGS LIGHT ARC DOWN AND RIGHT}"
# How faulthandler begins; the frames of each thread, and a list of extension modules, follow.
FATAL = "Fatal Python error: "
# The exit status of a wrong flag.
WRONG_FLAG = 2
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
        is_mistake: True for another mistake of the command or the script than its exception says.
    """

    text: str = ""
    exception: str | None = None
    place: str | None = None
    advice: str = ""
    is_mistake: bool = False


def read(lines: Sequence[str], status: int) -> LastWords:
    """Return why a script has ended, by the end of its output and its exit status, negative for a signal."""
    bare = [TORCH_PREFIX.sub("", line).rstrip(BLANKS) for line in lines]
    if any(GROUP in line for line in bare):
        bare = [MARGIN.sub("", line) for line in bare]
    output = [line for line in bare if line]
    if not output:
        return LastWords()
    words: LastWords | None = None
    if status < 0:
        words = _crash(output)
    elif status > 0:  # an exception does not explain another status
        words = _exception(output)
    words = words or LastWords(_last_line(output, status))
    asks_for_password = words.exception == "EOFError" and "/getpass.py:" in (words.place or "")
    if status > 0 and (NO_INPUT.search(words.text) or asks_for_password):
        return replace(words, text=f"{words.text} (a run has no standard input)", is_mistake=True)
    return words


def _last_line(output: list[str], status: int) -> str:
    """Return the last line with a word, or the one that names a wrong flag."""
    texts = [line.strip(BOX) for line in output if re.search(r"\w", line)] or output[-1:]
    errors = [text for text in texts[-LINES_BETWEEN:] if FLAG_ERROR.match(text)] if status == WRONG_FLAG else []
    return (errors or texts)[-1]


def _exception(output: list[str]) -> LastWords | None:
    """Return the exception of the last traceback, or the error of a program that it started."""
    headers = _headers(output)
    if missing := NO_MODULE.fullmatch(output[-1]):
        return LastWords(f"ModuleNotFoundError: {missing[1] or missing[2]}", "ModuleNotFoundError")
    if output[-1].startswith(HYDRA) and not headers:
        said = [line for line in output[:-1] if not (line[0].isspace() or line.endswith(":"))]
        return LastWords(said[-1], is_mistake=True) if said else None
    if NO_MAIN.match(output[-1]):
        return LastWords(output[-1].partition(": ")[2], is_mistake=True)
    if PYTEST.match(output[-1]):
        return _of_pytest(output)
    if not headers:
        error = NAMED_ERROR.match(output[-1])
        place = _place(output[:-1])
        is_framed = any(line.startswith(RICH_FRAME) and TRACEBACK in line for line in output)
        return LastWords(output[-1], error[1], place) if error and (place or is_framed) else None
    words = _of_traceback(output[headers[-1] + 1 :])
    if words and (words.exception or "").rpartition(".")[2] in OF_PARENT:
        return _of_child(output[: headers[-1]], words) or _of_torchrun(output, words)
    return words


def _headers(output: list[str]) -> list[int]:
    """Return the numbers of the lines that begin a traceback; text without a newline may stand before it."""
    return [
        number
        for number, (line, following) in enumerate(zip(output, [*output[1:], ""], strict=True))
        if HEADER.match(line)
        or IN_GROUP.match(line)
        or (line.endswith(f"{TRACEBACK}:") and FRAME.match(following) and not ELASTIC.match(line))
    ]


def _of_child(output: list[str], parent: LastWords) -> LastWords | None:
    """Return the error that ends the output of a child process, before its parent's traceback."""
    while output and LOG_LINE.match(output[-1]):
        output = output[:-1]
    if not output:
        return None
    if "exit status 2" in parent.text and NO_FLAG.match(output[-1]):
        return LastWords(output[-1], is_mistake=True)
    fatal = [number for number, line in enumerate(output) if line.startswith(FATAL)]
    headers = sorted(_headers(output) + fatal)
    if headers and output[headers[-1]].startswith(FATAL):
        return _crash(output[headers[-1] :])
    ends = [number for number, line in enumerate(output) if headers and number > headers[-1] and EXCEPTION.match(line)]
    is_near = bool(ends) and len(output) - ends[0] <= LINES_BETWEEN
    return _exception(output) if is_near or not headers else None


def _of_torchrun(output: list[str], words: LastWords) -> LastWords:
    """Return an error with torchrun's last report of a process that wrote no traceback."""
    reports = list(filter(None, map(ELASTIC.match, output)))
    if not words.text.endswith("ChildFailedError:") and "=====" not in words.text:
        return words
    return replace(words, text=f"{words.exception}: {reports[-1][1]}" if reports else str(words.exception))


def _of_pytest(output: list[str]) -> LastWords | None:
    """Return the last failure of a session of pytest."""
    for found in filter(None, map(PYTEST_ERROR.match, reversed(output))):
        error = NAMED_ERROR.match(found[2] or "")
        return LastWords(found[0], error[1] if error else None, found[1])
    return None


def _of_traceback(block: list[str]) -> LastWords | None:
    """Return the exception of the lines after a traceback's header."""
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
