"""The end of a script's output: the exception of its traceback, or the line that best explains its end.

The output is read as blocks from the top: a traceback or a crash, and what follows it up to the next one. A block that
many lines follow was handled by the script, and does not explain its end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ray_on_ecs.run import crashes
from ray_on_ecs.run.crashes import FRAME
from ray_on_ecs.signals import SIGNALLED

# Prefixes that torch puts before each line of an exception, and torchrun's --tee before each line.
TORCH_PREFIX = re.compile(r"^(?:\[(?:rank|default)\d+\]: ?)+")
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
# Errors of a parent process, after the error that its child printed.
OF_PARENT = ("CalledProcessError", "ChildFailedError", "ProcessExitedException", "BrokenProcessPool")
# Most lines, such as torchrun's, between a child's error and its parent's; and most lines, such as those of a long
# message or of other ranks, after the exception that ended the script.
LINES_BETWEEN, LINES_AFTER = 12, 40
# The lines of torchrun's and of Python's logs, and its report of a process that printed nothing.
LOG_LINE = re.compile(r"[A-Z]\d{4} |\[|\d{4}-\d\d-\d\d |(?:INFO|WARNING|ERROR)\b")
OF_ELASTIC = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError"
OF_TORCHRUN = r"[A-Z]\d{4} \S+ +\d+ \S*torch/|\[[-\d]+ [\d:,]+\] torch\.|[A-Z]+:torch\."
ELASTIC = re.compile(r"\s+(?:exitcode  : |traceback : (?!To enable))(.+)")
EXIT_STATUS = re.compile(r"(\d+) \(pid: ")
# A line that belongs to the one before, as in a stack or a frame of rich; torchrun's log; and a line without a word.
CONTINUED = re.compile(rf"[\s│╭╰]|frame #\d|(?:Current t|T)hread 0x|Extension modules: |{OF_TORCHRUN}|\W*$")
# Python's line for a folder that it can't run, which has no traceback; and argparse's for a wrong flag.
NO_MAIN = re.compile(r"\S*python[\d.]*: can't find '__main__'")
NO_FLAG = re.compile(r"[\w./-]+: error: ")
# The last line of Hydra after its error of a configuration, and of absl and tyro after a wrong flag.
HYDRA = "Set the environment variable HYDRA_FULL_ERROR=1"
HELP = ("Pass --helpshort or --helpfull", "For full helptext, ")
ABSL = "FATAL Flags parsing error:"
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
TRACEBACK = "Traceback (most recent call last)"
# Also of PyTorch's DataLoader, and after a space of Open MPI, which mixes outputs.
HEADER = re.compile(rf"(?: |Original )?{re.escape(TRACEBACK)}")
# An exception group, whose lines have a margin; and the line before each of its exceptions.
GROUP = f"Exception Group {TRACEBACK}"
MARGIN = re.compile(r"^ +[|+] ?")
IN_GROUP = re.compile(r"-+(?:\+-+)? \d+ -+$")
RICH_FRAME = "\N{BOX DRAWINGS LIGHT ARC DOWN AND RIGHT}"
# The line before a traceback of a thread, of another process, or of an asyncio task or callback.
ASIDE = re.compile(r"Exception in thread |^Process \S+:$|^(?:future|handle): <")
# The line between the tracebacks of an exception and of the one that was raised when it was handled.
DIRECT_CAUSE = "The above exception was the direct cause"
CHAINED = (DIRECT_CAUSE, "During handling of the above exception")
# PyTorch's words for a lost DataLoader worker; the direct cause may have the signal.
OF_DATALOADER = "DataLoader worker (pid"
# Noise after the reason for an end: warnings of PyTorch's C++ and of Python, lines of W&B, exceptions that Python
# ignores, as in __del__ and atexit, and those of its resource tracker.
LINES = r"(?:[ \t].*\n)*.*\n"
NOISE = re.compile(
    r"(?m)^(?:\[W\d{4} .*\n|[^:\n]+:\d+: \w*Warning: .*\n(?:[ \t].*\n)?|wandb:(?! ERROR).*\n"
    r"|(?:Exception ignored |Error in atexit\.).*\n"
    rf"(?:Traceback .*\n{LINES}(?:(?:{'|'.join(CHAINED)}).*\nTraceback .*\n{LINES})*|[\w.]+(?:Error|Exception)\b.*\n)?"
    rf'|Traceback .*\n  File ".*/resource_tracker\.py".*\n{LINES})'
)
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
    if status > 0:
        output = NOISE.sub("", "\n".join([*output, ""])).split("\n")[:-1] or output
    if not output:
        return LastWords()
    output = _end(output, LINES_AFTER)
    words = _of_crash(output) if status < 0 or status > SIGNALLED else None
    if status > 0 and words is None:  # an exception does not explain a signal
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


def _end(output: list[str], most: int) -> list[str]:
    """Return the output after the last block that more than `most` other lines follow."""
    begin = 0
    starts = sorted(_headers(output) + [number for number, line in enumerate(output) if crashes.is_start(line)])
    for start, stop in pairwise([*starts, len(output)]):
        is_crash = crashes.is_start(output[start])
        errors = [] if is_crash else [n for n in range(start + 1, stop) if EXCEPTION.match(output[n])]
        after = (errors or [start])[0] + 1
        has_report = output[after - 1].startswith((*OF_RAY, OF_ELASTIC))
        if not has_report and sum(not CONTINUED.match(line) for line in output[after:stop]) > most:
            begin = after
    return output[begin:]


def _exception(output: list[str]) -> LastWords | None:
    """Return the exception of the last traceback, or the error of a program that it started."""
    headers = _headers(output)
    if PYTEST.match(output[-1]):
        return _of_pytest(output)
    if refusal := _refusal(output, headers):
        return refusal
    if not headers:
        error, place = NAMED_ERROR.match(output[-1]), _place(output[:-1])
        return LastWords(output[-1], error[1], place) if error and place else None
    index = _main(output, headers)
    header, stop = headers[index], [*headers, len(output)][index + 1]
    words = _of_traceback(output[header:stop])
    if index and words and OF_DATALOADER in words.text and output[header - 1].startswith(DIRECT_CAUSE):
        cause = _of_traceback(output[headers[index - 1] : header])
        return cause if cause and OF_DATALOADER in cause.text else words
    if words and (words.exception or "").rpartition(".")[2] in OF_PARENT:
        return _of_child(output[:header], words) or _of_torchrun(output[:header], output[header:], words)
    return words


def _refusal(output: list[str], headers: list[int]) -> LastWords | None:
    """Return why Python can't run a module or a folder, or why a library refuses a configuration or a flag."""
    if missing := NO_MODULE.fullmatch(output[-1]):
        return LastWords(f"ModuleNotFoundError: {missing[1] or missing[2]}", "ModuleNotFoundError")
    if NO_MAIN.match(output[-1]):
        return LastWords(output[-1].partition(": ")[2], is_mistake=True)
    if output[-1].startswith(HYDRA) and not headers:
        said = [line for line in output[:-1] if not (line[0].isspace() or line.endswith(":"))]
        return LastWords(said[-1], is_mistake=True) if said else None
    texts = [line.strip(BOX) for line in output if re.search(r"\w", line)]
    starts = [number for number, line in enumerate(output) if line.startswith((ABSL, RICH_FRAME))]
    if not (starts and texts and texts[-1].startswith(HELP)):
        return None
    begin = starts[-1] + output[starts[-1]].startswith(RICH_FRAME)
    return LastWords(_sentence([line.strip(BOX) for line in output[begin:]]), is_mistake=True)


def _main(output: list[str], headers: list[int]) -> int:
    """Return the index of the last traceback that is not of a thread or a task, or of the last if all are."""
    kept, is_aside = [], False
    for index, header in enumerate(headers):
        before = output[header - 1] if header else ""
        is_aside = is_aside if before.startswith(CHAINED) else bool(ASIDE.search(before))
        if not is_aside:
            kept.append(index)
    return (kept or [len(headers) - 1])[-1]


def _headers(output: list[str]) -> list[int]:
    """Return the numbers of the lines that begin a traceback; text without a newline may stand before it."""
    has_group = any(GROUP in line for line in output)
    return [
        number
        for number, (line, following) in enumerate(zip(output, [*output, ""][1:], strict=True))
        if HEADER.match(line)
        or (line.startswith(RICH_FRAME) and TRACEBACK in line)
        or (has_group and IN_GROUP.match(line))
        or (line.endswith(f"{TRACEBACK}:") and FRAME.match(following) and not ELASTIC.match(line))
    ]


def _of_crash(output: list[str]) -> LastWords | None:
    crash = crashes.crash(output)
    return LastWords(crash[0], place=crash[1]) if crash else None


def _of_child(output: list[str], parent: LastWords) -> LastWords | None:
    """Return the error that ends the output of a child process, before its parent's traceback."""
    while output and LOG_LINE.match(output[-1]):
        output = output[:-1]
    output = _end(output, LINES_BETWEEN)
    if not output:
        return None
    if "exit status 2" in parent.text and NO_FLAG.match(output[-1]):
        return LastWords(output[-1], is_mistake=True)
    return _of_crash(output[max(_headers(output), default=0) :]) or _exception(output)


def _of_torchrun(output: list[str], report: list[str], words: LastWords) -> LastWords:
    """Return the last line of torchrun's process without a traceback, or an error with torchrun's last report of it."""
    if words.exception != OF_ELASTIC:
        return words
    told = [number for number, line in enumerate(report) if ELASTIC.match(line) and TRACEBACK in line]
    if told:
        return _of_traceback([line.removeprefix("  ") for line in report[told[-1] :]]) or words
    ends = [found[1] for found in map(ELASTIC.match, report) if found]
    said = [line for line in output if not re.match(OF_TORCHRUN, line)]
    if said and ends and (found := EXIT_STATUS.match(ends[-1])):
        status = int(found[1])
        return LastWords(_last_line(said, status), is_mistake=status == WRONG_FLAG)
    return replace(words, text=f"{words.exception}: {ends[-1]}" if ends else str(words.exception))


def _of_pytest(output: list[str]) -> LastWords | None:
    """Return the last failure of a session of pytest."""
    for found in filter(None, map(PYTEST_ERROR.match, reversed(output))):
        error = NAMED_ERROR.match(found[2] or "")
        return LastWords(found[0], error[1] if error else None, found[1])
    return None


def _of_traceback(lines: list[str]) -> LastWords | None:
    """Return the exception of a traceback, whose header and all that follows are given."""
    header, *block = lines
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
        is_wrapped = header.startswith(RICH_FRAME)
        text = " ".join(map(str.strip, block[number:])) if is_wrapped else _sentence(block[number:])
        return LastWords(text, error[1], _place(block[:number]))
    return LastWords(after[0][1]) if after else None


def _sentence(lines: Sequence[str]) -> str:
    """Return the first line, and the next ones as long as it ends with a colon, since such a line explains nothing."""
    text, *rest = lines
    for line in rest:
        if not text.endswith(":"):
            break
        text = f"{text} {line.strip()}"
    return text


def _place(lines: Sequence[str]) -> str | None:
    """Return the last frame of these lines."""
    frames = list(filter(None, map(FRAME.match, lines)))
    return f"{frames[-1][1]}:{frames[-1][2]}" if frames else None
